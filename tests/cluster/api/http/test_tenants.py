"""A client sees nothing of the requests of another: in answers, figures, headers and errors.

An engine really runs behind the API. One key's requests wait, run and end, while another key asks for all there is.
"""

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.http.keys import ApiKey
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import Dispatcher
from crossdock.router.fleet import RouterConfig
from tests.cluster.api.engine_api import EngineApi, LiveApi, all_up, live_api
from tests.cluster.api.one_model import one_model_api
from tests.cluster.api.scripted_api import refused
from tests.cluster.dispatch.in_process import InProcess

KEYS = ("mine", "theirs", {"key": "operator", "sees_all_requests": True})
LENGTHS = {"mine": 230, "theirs": 187}  # tokens of prompts; no other figure of a test has these
ABOUT_THE_MACHINE = {"now", "cost", "overrun", "step_error"}  # the clock, and how fast steps are


@pytest.fixture
def api(tokenizer: ModelTokenizer) -> Iterator[LiveApi]:
    with live_api(tokenizer, KEYS) as api:
        yield api


def get(api: LiveApi, path: str, key: str = "mine") -> Any:
    answer = httpx.get(api.url + path, headers={"authorization": f"Bearer {key}"}, timeout=240)
    assert answer.status_code == 200, answer.text
    return answer.json()


def seen_by(api: LiveApi, key: str) -> dict[str, Any]:
    """Return all that the API shows to a key about requests, without the figures of the machine."""
    replicas = get(api, "/v1/replicas", key)["data"]
    return {
        "replicas": [{name: replica[name] for name in replica.keys() - ABOUT_THE_MACHINE} for replica in replicas],
        "requests": get(api, "/v1/requests", key),
        "mine": get(api, "/v1/requests/of-mine", key),
    }


def numbers(value: Any) -> Iterator[Any]:
    """Yield every number in a JSON value, at any depth."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from numbers(part)
    elif isinstance(value, int | float):
        yield value


def test_nothing_that_a_key_sees_changes_with_the_requests_of_another(api: LiveApi) -> None:
    """Neither while they are in flight nor when they have run."""
    api.work("mine")
    alone = seen_by(api, "mine")
    assert {chunk["request_id"] for step in alone["replicas"][0]["steps"] for chunk in step["chunks"]} >= {"of-mine"}
    asking = [api.api.ask("standard", LENGTHS["theirs"], key="theirs", max_tokens=60) for _ in range(3)]
    tasks, gate = api.call(api.api.held(*asking))
    try:
        assert seen_by(api, "mine") == alone, "while they wait"
        assert seen_by(api, "operator") != alone
    finally:
        gate.set()

    async def ended() -> list[httpx.Response]:
        return list(await asyncio.gather(*tasks))

    assert [answer.status_code for answer in api.call(ended())] == [200] * 3
    assert seen_by(api, "mine") == alone, "after they have run"
    assert LENGTHS["theirs"] in set(numbers(seen_by(api, "operator")))


def test_own_chunks_beside_the_streams_of_another_show_no_figure_of_those(api: LiveApi) -> None:
    """Steps that both share: how many streams there were, and what the step was predicted to take, are left out."""

    theirs = [api.api.ask("standard", LENGTHS["theirs"], key="theirs", max_tokens=60) for _ in range(3)]
    own = api.api.ask("standard", LENGTHS["mine"], key="mine", **{"request-id": "of-mine"})
    assert [answer.status_code for answer in api.call(api.api.beside(theirs, own))] == [200] * 4
    (operators,) = get(api, "/v1/requests/of-mine", "operator")["requests"]
    assert any(chunk["num_decodes"] for chunk in operators["chunks"]), "the steps were shared"
    (shown,) = get(api, "/v1/requests/of-mine")["requests"]
    assert shown["num_shared_decode_steps"] is None
    assert {chunk[name] for chunk in shown["chunks"] for name in ("num_decodes", "predicted_s", "limit")} == {None}
    (replica,) = get(api, "/v1/replicas")["data"]
    assert replica["pages"] is None
    assert replica["steps"]
    for step in replica["steps"]:
        assert {step[name] for name in ("num_decodes", "num_skipped", "predicted_s", "limit")} == {None}
        assert {chunk["request_id"] for chunk in step["chunks"]} == {"of-mine"}
    assert LENGTHS["theirs"] not in set(numbers(seen_by(api, "mine")))


def test_key_reads_on_after_the_steps_it_has_seen(api: LiveApi) -> None:
    """Its steps are numbered by time: numbers of a replica's steps would count those of others."""
    api.work("mine")
    (first,) = get(api, "/v1/replicas")["data"]
    (all_,) = get(api, "/v1/replicas", "operator")["data"]
    assert first["incarnation"] != all_["incarnation"]
    at = [step["number"] for step in first["steps"]]
    assert at == sorted(set(at))
    middle = at[len(at) // 2]
    (rest,) = get(api, f"/v1/replicas?after={first['incarnation']}:{middle}")["data"]
    assert [step["number"] for step in rest["steps"]] == [number for number in at if number > middle]
    (none,) = get(api, f"/v1/replicas?after={first['incarnation']}:{first['last_step']}")["data"]
    assert (none["steps"], none["last_step"]) == ([], first["last_step"])


async def test_headers_of_a_key_count_its_own_requests_alone(tokenizer: ModelTokenizer) -> None:
    keys = [{"key": key, "requests_per_minute": 50, "tokens_per_minute": 100_000} for key in ("mine", "theirs")]
    async with EngineApi(tokenizer, keys=keys) as api:
        await asyncio.gather(*(api.ask("standard", key="theirs") for _ in range(5)))
        answer = await api.ask("standard", key="mine")
        assert answer.headers["x-ratelimit-remaining-requests"] == "49"
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) >= 100_000 - 203, "it fills again as time passes"
        shown = {name for name in answer.headers if name.startswith("x-")}
        of_key = [f"{part}-{unit}" for part in ("limit", "remaining", "reset") for unit in ("requests", "tokens")]
        assert shown == {"x-request-id", "x-slo-class", *(f"x-ratelimit-{name}" for name in of_key)}


async def test_refusal_for_load_shows_seconds_alone(tokenizer: ModelTokenizer) -> None:
    """How long the queue is, in seconds, is what a client must know to try again."""
    async with EngineApi(tokenizer, keys=["mine", "theirs"]) as api:
        asking = (api.ask("urgent", 200, key="theirs") for _ in range(4))
        tasks, gate = await api.held(*asking, num_submissions=2)  # the router refuses the others
        asking = asyncio.create_task(api.ask("urgent", 20, key="mine"))
        await asyncio.sleep(0)
        gate.set()
        answers = [await asking, *await asyncio.gather(*tasks)]
        refusals = [answer for answer in answers if answer.status_code == 429]
        assert refusals, "the test's own load"
        for answer in refusals:
            message = refused(answer, 429)["message"]
            assert re.fullmatch(
                r"the first token would come in [\d.]+ s; class 'urgent' promises [\d.]+ s\. "
                r"Retry in [\d.]+ s, ask for a less urgent class, or name none and wait",
                message,
            ), message
            assert {name for name in answer.headers if name.startswith("x-")} == {"x-request-id", "x-slo-class"}


# -- cached prefixes ---------------------------------------------------------------------------------------------------

GROUPED: list[Any] = ["mine", "theirs", {"key": "one", "cache_group": "us"}, {"key": "other", "cache_group": "us"}]


async def cached(api: httpx.AsyncClient, key: str, **fields: Any) -> int:
    """Return how many tokens of the same prompt were cached for a key: what its answer says."""
    body = {"prompt": [5, 6, 7, 8] * 25, "max_tokens": 4, "ignore_eos": True, "temperature": 0, **fields}
    answer = await api.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_prefix_cached_for_one_tenant_is_not_found_by_another(tokenizer: ModelTokenizer) -> None:
    """Neither where it was computed nor where its pages were sent. Keys of one group do share."""
    replicas = [InProcess(role="prefill"), InProcess(role="decode")]
    dispatcher = Dispatcher("tiny", RouterConfig(shipping="always"))
    app = one_model_api(dispatcher, tokenizer, HttpConfig.model_validate({"api_keys": GROUPED}))
    for number, replica in enumerate(replicas):
        dispatcher.join(f"r{number}", replica, replica.profile)
    await all_up(dispatcher, len(replicas))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        assert await cached(http, "mine") == 0
        own = await cached(http, "mine")
        assert own > 0
        assert await cached(http, "theirs") == 0
        assert await cached(http, "mine", cache_salt="us") == 0, "nor with another salt of its own"
        assert await cached(http, "mine", cache_salt="us") == own
        assert await cached(http, "one") == 0, "nor in a group that is named like the salt"
        assert await cached(http, "other") == own
        assert await cached(http, "other", cache_salt="us") == 0
        assert await cached(http, "theirs") == own, "its own, which is there as well"
    await dispatcher.close()
    for replica in replicas:
        counts = replica.engine_thread.engine.pages.counts()
        assert counts.cached > 0
        await replica.engine_thread.close()


async def test_cached_prefix_without_keys_is_found_with_the_same_salt_alone(tokenizer: ModelTokenizer) -> None:
    async with EngineApi(tokenizer, enable_prefix_caching=True) as api:
        found = []
        for salt in ("", "", "x", "x", ""):
            answer = await api.ask("standard", cache_salt=salt)
            found.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
        assert found == [False, True, False, True, True]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("embeddings", {"input": [[5] * 200]}),
        ("completions", {"prompt": [5] * 200, "max_tokens": 0, "echo": True}),
    ],
)
async def test_prompts_without_an_output_take_of_a_keys_seconds(
    tokenizer: ModelTokenizer, path: str, body: dict[str, Any]
) -> None:
    async with EngineApi(tokenizer, keys=[{"key": "mine", "seconds_per_minute": 1e-3}]) as api:

        async def ask() -> httpx.Response:
            return await api.http.post(f"/v1/{path}", json=body, headers={"authorization": "Bearer mine"})

        assert (await ask()).status_code == 200
        assert "0.001 seconds per minute" in refused(await ask(), 429)["message"]


async def test_seconds_of_tenants_are_shown_to_operators_and_limit_a_key(tokenizer: ModelTokenizer) -> None:
    limited = {"key": "mine", "name": "searching", "seconds_per_minute": 1e-3}
    gateway = {"key": "gate", "names_tenants": True, "sees_all_requests": True}
    async with EngineApi(tokenizer, keys=[limited, gateway], tenant_header="X-Tenant") as api:
        assert (await api.ask("standard", key="mine", **{"request-id": "of-mine"})).status_code == 200
        assert (await api.ask("standard", key="gate", tenant="acme")).status_code == 200
        error = refused(await api.ask("standard", key="mine"), 429)
        assert "0.001 seconds per minute" in error["message"]
        metrics = (await api.http.get("/metrics")).text
        charged = dict(re.findall(r'crossdock_charged_seconds_total{.*?tenant="([^"]*)".*?} (\S+)', metrics))
        of_gateway = f"{ApiKey(key='gate').owner[:8]}/acme"
        assert charged.keys() == {"searching", of_gateway}
        assert min(map(float, charged.values())) > 0
        shown = [
            (await api.http.get("/v1/requests/of-mine", headers={"authorization": f"Bearer {key}"})).json()
            for key in ("gate", "mine")
        ]
        of_all, own = (answer["requests"][0]["charged_s"] for answer in shown)
        assert of_all == pytest.approx(float(charged["searching"]), abs=1e-5)
        assert own is None, "it shows how many streams shared the steps"
