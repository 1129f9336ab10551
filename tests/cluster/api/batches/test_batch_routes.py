"""/v1/files and /v1/batches before real engines, through OpenAI's client."""

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from crossdock.cluster.api.batches.folder import TERMINAL
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.workers.schedule.request.slo import SloClass
from tests.cluster.api.batches.scripted_batches import CHATS
from tests.cluster.api.engine_api import EngineApi
from tests.waiting import until

CLASSES = (SloClass(name="standard", ttft_s=1e3, tpot_s=1.0), SloClass(name="batch", ttft_s=1e3, tpot_s=1.0))
HI = [{"role": "user", "content": "Hi"}]


@asynccontextmanager
async def serving(tokenizer: ModelTokenizer, folder: Path, **options: Any) -> AsyncIterator[EngineApi]:
    http = {"batch_folder": str(folder), "batch_file_bytes": 1 << 20, **options.pop("http", {})}
    async with EngineApi(tokenizer, http=http, slo_classes=CLASSES, **options) as api:
        api.app.state.batches.start()
        yield api
        await api.app.state.batches.close()
        assert await api.owned_pages() == 0


def client(api: EngineApi, key: str = "none") -> openai.AsyncOpenAI:
    transport = httpx.AsyncClient(transport=httpx.ASGITransport(api.app))
    return openai.AsyncOpenAI(base_url="http://localhost/v1", api_key=key, max_retries=0, http_client=transport)


def request(custom_id: str, url: str, body: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode() + b"\n"


async def ended(user: openai.AsyncOpenAI, name: str) -> Any:
    async def is_over() -> bool:
        return (await user.batches.retrieve(name)).status in TERMINAL

    await until(is_over)
    return await user.batches.retrieve(name)


async def content(user: openai.AsyncOpenAI, file_id: str) -> list[Any]:
    return [json.loads(line) for line in (await user.files.content(file_id)).text.splitlines()]


def rounded(value: Any) -> Any:
    """Return an answer with its numbers rounded: sums depend on what shares a step."""
    if isinstance(value, list | dict):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: rounded(each) for key, each in pairs}
    return pytest.approx(value, abs=1e-3) if isinstance(value, float) else value


SHOWN = {"chat_template": "{{ messages[0].content }}"}
BODIES = {
    CHATS: {"messages": [{"role": "user", "content": "q"}], "max_tokens": 4, "seed": 3, "logprobs": True, **SHOWN},
    "/v1/completions": {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0},
    "/v1/embeddings": {"input": ["a", "b"]},
}


@pytest.mark.parametrize("url", BODIES)
async def test_answers_of_lines_are_those_of_the_endpoint(tokenizer: ModelTokenizer, tmp_path: Path, url: str) -> None:
    async with serving(tokenizer, tmp_path, http={"trust_request_chat_template": True}) as api:
        user, body = client(api), BODIES[url]
        direct = (await api.http.post(url, json=body)).json()
        wrong = request("wrong", url, body | {"model": "other"}) + request("stream", url, body | {"stream": True})
        lines = b"".join(request(f"c{i}", url, body) for i in range(6)) + wrong
        file = await user.files.create(file=("in.jsonl", lines), purpose="batch")
        made = await user.batches.create(
            input_file_id=file.id,
            endpoint=url,
            completion_window="24h",
            metadata={"a": "b"},  # type: ignore[arg-type]
        )
        batch = await ended(user, made.id)
        assert (batch.status, batch.metadata, batch.request_counts.completed) == ("completed", {"a": "b"}, 6)
        varying = {"id", "created", "service_tier", "usage"}
        for found in await content(user, batch.output_file_id):
            answer = found["response"]["body"]
            assert answer.keys() == direct.keys()
            for name in answer.keys() - varying:
                assert rounded(answer[name]) == rounded(direct[name])
        errors = {each["custom_id"]: each["response"] for each in await content(user, batch.error_file_id)}
        assert errors["wrong"]["status_code"] == 404
        assert errors["stream"]["body"]["error"]["param"] == "stream"
        assert [each.id async for each in user.batches.list(limit=1)] == [batch.id]


async def test_files_are_listed_by_pages_and_deleted(tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    async with serving(tokenizer, tmp_path) as api:
        user = client(api)
        made = [await user.files.create(file=(f"{i}.jsonl", b"{}"), purpose="batch") for i in range(3)]
        assert {each.id async for each in user.files.list(limit=2)} == {each.id for each in made}
        assert (await user.files.retrieve(made[0].id)).bytes == 2
        assert (await user.files.delete(made[0].id)).deleted
        with pytest.raises(openai.NotFoundError):
            await user.files.retrieve(made[0].id)


async def test_keys_see_their_own_files_and_batches_only(tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    async with serving(tokenizer, tmp_path, keys=["one", "two"]) as api:
        one, two = client(api, "one"), client(api, "two")
        line = request("a", "/v1/completions", BODIES["/v1/completions"])
        file = await one.files.create(file=("in.jsonl", line), purpose="batch")
        batch = await one.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        assert (await ended(one, batch.id)).request_counts.completed == 1
        for asking in (
            two.files.retrieve(file.id),
            two.files.content(file.id),
            two.batches.retrieve(batch.id),
            two.batches.cancel(batch.id),
            two.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                await asking
        assert [each async for each in two.files.list()] == [each async for each in two.batches.list()] == []


async def test_batch_uses_the_share_of_the_tenant_that_a_gateway_named(
    tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    gateway = {"key": "gate", "names_tenants": True, "sees_all_requests": True}
    async with serving(tokenizer, tmp_path, keys=[gateway], tenant_header="X-Tenant") as api:
        user = client(api, "gate").with_options(default_headers={"X-Tenant": "acme"})
        line = request("a", "/v1/completions", BODIES["/v1/completions"])
        file = await user.files.create(file=("in.jsonl", line), purpose="batch")
        batch = await user.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        assert (await ended(user, batch.id)).request_counts.completed == 1
        metrics = (await api.http.get("/metrics")).text
        accounts = set(re.findall(r'crossdock_charged_seconds_total{.*?tenant="([^"]*)"', metrics))
        assert {name.partition("/")[2] for name in accounts} == {"acme"}, "after the name of the gateway's key"
        assert "tenant" not in (await user.batches.retrieve(batch.id)).model_dump()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"input_file_id": "../secret"}, "file_id"),
        ({"output_expires_after": {"seconds": 0}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"seconds": 3600, "anchor": "now"}}, "output_expires_after.anchor"),
        ({"metadata": {"a" * 65: "b"}}, "metadata"),
    ],
)
async def test_wrong_batch_is_refused_by_its_field(
    tokenizer: ModelTokenizer, tmp_path: Path, fields: Any, param: str
) -> None:
    async with serving(tokenizer, tmp_path) as api:
        given = {"input_file_id": "file-" + "0" * 32, "endpoint": CHATS, "completion_window": "24h"}
        answer = await api.http.post("/v1/batches", json=given | fields)
        assert answer.status_code in (400, 404)
        assert answer.json()["error"]["param"] == param


async def test_expiry_of_a_file_or_of_results_is_taken_and_a_header_says_that_files_stay(
    tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    of_file = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    async with serving(tokenizer, tmp_path) as api:
        form: dict[str, Any] = {"files": {"file": ("a.jsonl", b"{}")}, "data": {"purpose": "batch", **of_file}}
        taken = await api.http.post("/v1/files", **form)
        assert taken.status_code == 200
        assert "'expires_after' changes nothing" in taken.headers["warning"]
        body = {"input_file_id": taken.json()["id"], "endpoint": CHATS, "completion_window": "24h"}
        for expiry in ({}, {"output_expires_after": {"anchor": "created_at", "seconds": 3600}}):
            created = await api.http.post("/v1/batches", json={**body, **expiry})
            assert created.status_code == 200, created.text
            warnings = created.headers.get_list("warning")
            assert [warning.partition(" changes nothing: ")[0] for warning in warnings] == [
                f"299 crossdock \"'{name}'" for name in expiry
            ]


async def test_wrong_uploads_are_refused(tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    async with serving(tokenizer, tmp_path) as api:

        async def status(**given: Any) -> tuple[int, Any]:
            answer = await api.http.post("/v1/files", **given)
            return answer.status_code, answer.json()["error"]["param"] or answer.json()["error"]["code"]

        file = {"file": ("a.jsonl", b"{}")}
        assert await status(files={"file": ("a", b"x" * (2 << 20))}, data={"purpose": "batch"}) == (
            413,
            "request_too_large",
        )
        assert await status(files=file, data={"purpose": "fine-tune"}) == (400, "purpose")
        assert await status(files=file, data={"purpose": "batch", "other": "x"}) == (400, "other")
        assert await status(data={"purpose": "batch"}) == (400, "file")
        assert await status(json={"purpose": "batch"}) == (400, "file")
        broken = {"content-type": "multipart/form-data; boundary=x"}
        assert await status(content=b"--y\r\n", headers=broken) == (400, "invalid_form")
        assert not list(tmp_path.glob("*/files/*"))


async def test_server_without_a_folder_names_the_setting(tokenizer: ModelTokenizer) -> None:
    async with EngineApi(tokenizer) as api:
        for path in ("/v1/files", "/v1/batches"):
            answer = await api.http.post(path, json={})
            assert answer.status_code == 404
            assert "--batch-folder" in answer.json()["error"]["message"]
