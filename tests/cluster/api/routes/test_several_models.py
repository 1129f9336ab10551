"""Several models behind one API: the field `model` picks the fleet, and what is of the server stays one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from crossdock.cluster.api.body.generation_defaults import GenerationDefaults
from crossdock.cluster.api.body.pooler_config import EmbeddingDefaults
from crossdock.cluster.api.endpoints import build_api
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.http.service_tiers import ServiceTiers
from crossdock.cluster.api.routes.adapters import AdapterNames
from crossdock.cluster.api.routes.model_routes import ModelRoutes
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import Dispatcher, ReplicaLost
from crossdock.cluster.dispatch.dispatchers import Dispatchers
from crossdock.workers.schedule.request.submission import Adapter
from tests.cluster.api.scripted_api import HI, LiveServer, ScriptedDispatcher, refused
from tests.waiting import until

ONE, TWO = "first/One", "two"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": HI},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 4},
}


class Absent(ScriptedDispatcher):
    """A model whose replicas have not been up so far."""

    @property
    def model(self) -> Any:
        raise ReplicaLost("no replica has been up yet")


def read(name: str, folder: Path) -> Adapter:
    return Adapter(name, str(folder), folder.name)


@pytest.fixture(scope="module")
def engines(tokenizer: ModelTokenizer) -> dict[str, ScriptedDispatcher]:
    return {ONE: ScriptedDispatcher(tokenizer, 100), TWO: ScriptedDispatcher(tokenizer), "later": Absent(tokenizer)}


def built(engines: dict[str, ScriptedDispatcher], tokenizer: ModelTokenizer, folder: Path) -> FastAPI:
    """Return an API in front of the engines, one of them with an alias, with a folder for batches and adapters."""
    server = HttpConfig(batch_folder=str(folder / "batches"))
    (folder / "sql").mkdir()
    routes: list[ModelRoutes] = []
    for name, engine in engines.items():
        own = server.model_copy(update={"model_aliases": ("alias",) if name == TWO else (), "tool_call_parser": "none"})
        parts = ServiceTiers(), GenerationDefaults(), EmbeddingDefaults(), None, None
        names = AdapterNames(read, folder, None, (name,)), name
        routes.append(ModelRoutes(engine, tokenizer, own, *parts, *names, beside=routes[0] if routes else None))  # type: ignore[arg-type]

    async def texts() -> dict[str, str]:
        return {"ingress": fleets.ingress_text()}

    fleets = Dispatchers({name: Dispatcher(name) for name in engines}, texts)
    return build_api(routes, fleets, server)


@pytest.fixture(scope="module")
def http(
    engines: dict[str, ScriptedDispatcher], tokenizer: ModelTokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    app = built(engines, tokenizer, tmp_path_factory.mktemp("several"))
    with LiveServer(app) as url, httpx.Client(base_url=url, timeout=240) as client:
        yield client


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("name", "served"), [(ONE, ONE), (TWO, TWO), ("alias", TWO)])
def test_model_of_request_picks_its_fleet(
    http: httpx.Client, engines: dict[str, ScriptedDispatcher], path: str, name: str, served: str
) -> None:
    before = {each: len(engine.submissions) for each, engine in engines.items()}
    answer = http.post(path, json=BODIES[path] | {"model": name})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == name
    taken = {each: len(engine.submissions) - before[each] for each, engine in engines.items()}
    assert taken == {each: int(each == served) for each in engines}


def test_each_model_has_limits_of_its_own(http: httpx.Client) -> None:
    found = [http.post("/tokenize", json={"model": name, "prompt": "Hi"}).json() for name in (ONE, TWO)]
    assert [each["max_model_len"] for each in found] == [100, 200]


def test_request_without_a_served_model_is_told_all_names(http: httpx.Client) -> None:
    error = refused(http.post("/v1/completions", json={"model": "x", "prompt": "Hi"}), 404, code="model_not_found")
    assert "first/One, two, alias, later" in error["message"]
    error = refused(http.post("/v1/completions", json={"prompt": "Hi"}), 400, param="model")
    assert "first/One, two, alias, later" in error["message"]
    refused(http.get("/v1/models/x"), 404, code="model_not_found")


def test_models_are_listed_also_where_no_replica_is_up(http: httpx.Client) -> None:
    listed = {each["id"]: each for each in http.get("/v1/models").json()["data"]}
    assert {name: each["max_model_len"] for name, each in listed.items()} == {
        ONE: 100,
        TWO: 200,
        "alias": 200,
        "later": None,
    }
    assert http.get(f"/v1/models/{ONE}").json() == listed[ONE]
    assert listed["later"]["created"] > 1_700_000_000, "since the server started"
    refused(http.post("/v1/completions", json={"model": "later", "prompt": "Hi"}), 503)


def test_stored_response_is_continued_by_another_model(
    http: httpx.Client, engines: dict[str, ScriptedDispatcher]
) -> None:
    first = http.post("/v1/responses", json={"model": TWO, "input": "Hi"}).json()
    assert http.get(f"/v1/responses/{first['id']}").json() == first
    body = {"model": ONE, "input": "On", "previous_response_id": first["id"], "max_output_tokens": 1}
    assert http.post("/v1/responses", json=body).status_code == 200
    assert len(engines[ONE].submissions[-1].prompt_token_ids) > len(engines[TWO].submissions[-1].prompt_token_ids)


def test_adapter_names_its_base_model_where_several_take_adapters(
    http: httpx.Client, engines: dict[str, ScriptedDispatcher]
) -> None:
    body = {"lora_name": "sql", "lora_path": "sql"}
    error = http.post("/v1/load_lora_adapter", json=body).json()["error"]
    assert (error["param"], "first/One, two, later" in error["message"]) == ("base_model_name", True)
    assert http.post("/v1/load_lora_adapter", json=body | {"base_model_name": TWO}).status_code == 200
    error = http.post("/v1/load_lora_adapter", json=body | {"base_model_name": ONE}).json()["error"]
    assert "name of another model" in error["message"]
    assert http.post("/v1/completions", json={"model": "sql", "prompt": "Hi"}).status_code == 200
    assert engines[TWO].submissions[-1].adapter == Adapter("sql", engines[TWO].submissions[-1].adapter.path, "sql")  # type: ignore[union-attr]
    parents = {each["id"]: each["parent"] for each in http.get("/v1/models").json()["data"]}
    assert parents["sql"] == TWO
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"}).status_code == 200
    refused(http.get("/v1/models/sql"), 404)


async def test_lines_of_a_batch_name_any_of_the_models(
    engines: dict[str, ScriptedDispatcher], tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    app = built(engines, tokenizer, tmp_path)
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"model": name, "prompt": "Hi"}}
        for name in (ONE, TWO, "x")
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        file = (await client.post("/v1/files", files={"file": ("in", content)}, data={"purpose": "batch"})).json()
        made = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await client.post("/v1/batches", json=made)).json()
        app.state.batches.start()

        async def is_over() -> bool:
            batch.update((await client.get(f"/v1/batches/{batch['id']}")).json())
            return bool(batch["status"] == "completed")

        await until(is_over)
        await app.state.batches.close()
        assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        output = (await client.get(f"/v1/files/{batch['output_file_id']}/content")).text
    answered = [json.loads(line) for line in output.splitlines()]
    assert {each["custom_id"]: each["response"]["body"]["model"] for each in answered} == {ONE: ONE, TWO: TWO}


def test_metrics_of_each_model_have_its_name(http: httpx.Client) -> None:
    text = http.get("/metrics").text
    for name in (ONE, TWO):
        assert f'crossdock_ingress_requests{{model="{name}",ingress="ingress"}} 0.0' in text
    assert text.count("# HELP crossdock_ingress_requests ") == 1
