"""Classes, refusals and timelines as clients meet them: HTTP in front of real engines, in this process."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import httpx
import pytest
from pydantic import ByteSize
from transformers import PreTrainedTokenizerFast

from crossdock.cluster.api.endpoints import build_api
from crossdock.cluster.api.http_config import HttpConfig
from crossdock.cluster.api.tiers import Tiers
from crossdock.cluster.api.tokenizer import Text
from crossdock.cluster.dispatch.dispatch import Dispatcher
from crossdock.router.fleet import RouterConfig
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.cost import StepCost
from crossdock.workers.schedule.slo import SloClass
from tests.cluster.dispatch.test_dispatch import IN_TURN, InProcess, ready
from tests.workers.replica.driven import hold, posted

CLASSES = (
    SloClass(name="urgent", ttft_s=1e-9, tpot_s=1.0),  # so its deadline is twice what a prompt takes alone
    SloClass(name="standard", ttft_s=1e3, tpot_s=1.0),
)
KEYS = ("plain", {"key": "bound", "classes": ["standard"]}, {"key": "operator", "sees_all_requests": True})


class Served:
    """The API in front of one engine or more."""

    def __init__(
        self, text: Text, num_replicas: int, keys: Any, router: RouterConfig | None = None, **engine: Any
    ) -> None:
        settings = {"kv_cache_memory": ByteSize(4 << 20), "slo_classes": CLASSES, "enable_prefix_caching": False}
        config = EngineConfig.model_validate(settings | engine)
        self.replicas = [InProcess(config) for _ in range(num_replicas)]
        self.dispatcher = Dispatcher("tiny", router)
        http = HttpConfig.model_validate({"api_keys": keys})
        self.app = build_api(self.dispatcher, text, http, Tiers(config.slo_classes, config.default_slo_class))
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://a")

    async def start(self) -> None:
        for number, replica in enumerate(self.replicas):  # all say they are equally fast: the router takes turns
            self.dispatcher.join(f"r{number}", replica, self.replicas[0].profile)
        while not all(link.is_open for link in self.dispatcher._links.values()):
            await ready(self.dispatcher)
            await asyncio.sleep(0.001)

    async def stop(self) -> None:
        await self.http.aclose()
        await self.dispatcher.close()
        for replica in self.replicas:
            await replica.loop.close()

    async def ask(self, tier: str | None = "urgent", tokens: int = 200, **fields: Any) -> httpx.Response:
        headers = {f"x-{name}": fields.pop(name) for name in ("request-id", "slo-class") if name in fields}
        if "key" in fields:
            headers["authorization"] = f"Bearer {fields.pop('key')}"
        body = {"prompt": [5] * tokens, "max_tokens": 3, "ignore_eos": True, "service_tier": tier, **fields}
        return await self.http.post("/v1/completions", json=body, headers=headers)

    async def held(
        self, *asking: Coroutine[Any, Any, httpx.Response], num_submissions: int = 0
    ) -> tuple[list[Any], threading.Event]:
        """Begins requests to a single replica, which takes them and computes nothing until the event is set."""
        loop, count = self.replicas[0].loop, num_submissions or len(asking)
        gate = await hold(loop)
        tasks = [asyncio.create_task(one) for one in asking]
        await posted(loop, count)
        again = asyncio.create_task(hold(loop))
        await posted(loop, count + 1)
        gate.set()
        return tasks, await again

    async def get(self, path: str, key: str = "none") -> httpx.Response:
        return await self.http.get(f"/v1/requests{path}", headers={"authorization": f"Bearer {key}"})

    async def owned_pages(self) -> int:
        return sum([await replica.owned_pages() for replica in self.replicas])


@pytest.fixture(scope="module")
def text(tokenizers: dict[str, PreTrainedTokenizerFast]) -> Text:
    return Text(tokenizers["byte_level"])


def served(text: Text, story: Callable[[Served], Awaitable[None]], num: int = 1, keys: Any = (), **engine: Any) -> None:
    async def whole() -> None:
        it = Served(text, num, keys, **engine)
        await it.start()
        try:
            await story(it)
        finally:
            await it.stop()

    asyncio.run(whole())


def is_refusal(answer: httpx.Response) -> bool:
    """Checks a 429 in OpenAI's shape."""
    if answer.status_code != 429:
        return False
    assert answer.headers["content-type"] == "application/json"
    assert int(answer.headers["retry-after"]) >= 1
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "class 'urgent' promises" in error["message"]
    return True


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("router", [None, IN_TURN])
def test_a_request_that_would_be_late_is_429(text: Text, stream: bool, router: RouterConfig | None) -> None:
    """Of three equal prompts that come at once, the last cannot start within twice its own time. The router knows;
    where it does not predict, the replica says so."""
    num_asked = 2 if router is None else 3

    async def story(it: Served) -> None:
        gate = await hold(it.replicas[0].loop)
        asking = [asyncio.create_task(it.ask(stream=stream)) for _ in range(3)]
        await posted(it.replicas[0].loop, num_asked)
        gate.set()
        answers = await asyncio.gather(*asking)
        assert [is_refusal(answer) for answer in answers] == [False, False, True]
        assert [answer.status_code for answer in answers[:2]] == [200, 200]
        assert (await it.ask(stream=stream)).status_code == 200  # alone it is served, however long it takes
        metrics = await it.dispatcher.metrics_text()
        assert 'crossdock_ingress_requests_refused_total{slo_class="urgent",ingress="0"} 1.0' in metrics
        told = 'crossdock_requests_refused_total{slo_class="urgent",replica="r0"} 1.0'
        assert (told in metrics) == (router is not None)

    served(text, story, router=router)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", [{"n": 3}, {"prompt": [[5] * 200] * 3}])
def test_one_refusal_is_that_of_the_whole_request(text: Text, stream: bool, body: dict[str, Any]) -> None:
    async def story(it: Served) -> None:
        [asking], gate = await it.held(it.ask(stream=stream, **{"request-id": "whole"}, **body), num_submissions=3)
        assert is_refusal(await asking)
        gate.set()
        await it.replicas[0].loop.call(lambda: None)
        assert await it.owned_pages() == 0
        ended = (await it.get("/whole")).json()["requests"]
        assert [one["finish_reason"] for one in ended] == ["abort", "abort"]

    served(text, story)


def test_no_token_is_sent_before_every_choice_is_taken(text: Text) -> None:
    """The first prompt has its first token while the second is still being submitted, and refused in the end."""

    async def story(it: Served) -> None:
        replica, last = it.replicas[0], asyncio.Event()
        submit = replica.submit

        async def slow(submission: Any) -> int:
            if len(submission.prompt_token_ids) == 3:
                await last.wait()
                raise ValueError("prompt has 3 tokens")
            return await submit(submission)

        replica.submit = slow  # type: ignore[method-assign]
        asking = asyncio.create_task(it.ask("standard", prompt=[[5] * 20, [6] * 3], stream=True, max_tokens=100))
        while not any(one["num_output_tokens"] > 2 for one in await it.dispatcher.live_requests(None)):
            await asyncio.sleep(0.001)
        last.set()
        assert (await asking).status_code == 400

    served(text, story)


def test_it_waits_where_admission_says_queue(text: Text) -> None:
    async def story(it: Served) -> None:
        gate = await hold(it.replicas[0].loop)
        asking = [asyncio.create_task(it.ask()) for _ in range(5)]
        await posted(it.replicas[0].loop, 5)
        gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200] * 5

    served(text, story, admission="queue")


def test_what_one_replica_refuses_another_is_asked_for(text: Text) -> None:
    async def story(it: Served) -> None:
        first, second = (replica.loop for replica in it.replicas)
        gates = [await hold(loop) for loop in (first, second)]
        asking = [asyncio.create_task(it.ask()) for _ in range(4)]
        await posted(first, 2)
        await posted(second, 2)
        asking.append(asyncio.create_task(it.ask()))
        await posted(first, 3)
        gates[0].set()
        await posted(second, 3)  # the fifth, which the first replica has refused
        gates[1].set()
        answers = await asyncio.gather(*asking)
        assert [is_refusal(answer) for answer in answers] == [False] * 4 + [True]  # nor could the second be in time
        metrics = await it.dispatcher.metrics_text()
        for name in ("r0", "r1"):
            assert f'crossdock_requests_refused_total{{slo_class="urgent",replica="{name}"}} 1.0' in metrics
        assert 'crossdock_ingress_requests_refused_total{slo_class="urgent",ingress="0"} 1.0' in metrics

    served(text, story, num=2, router=IN_TURN)


def test_classes_by_tier_by_header_and_by_key(text: Text) -> None:
    async def story(it: Served) -> None:
        async def told(tier: str | None, **fields: Any) -> str:
            answer = await it.ask(tier, tokens=5, **fields)
            assert answer.status_code == 200, answer.text
            echoed: str = answer.json()["service_tier"]
            [found] = (await it.get(f"/{answer.headers['x-request-id']}", "operator")).json()["requests"]
            assert found["slo_class"] == echoed  # on the replica too
            return echoed

        assert await told(None, key="plain") == "standard"
        assert await told("priority", key="plain") == "urgent"
        assert await told("flex", key="plain") == "standard"
        assert await told(None, key="plain", **{"slo-class": "urgent"}) == "urgent"
        assert await told("auto", key="bound") == "standard"
        for fields in ({"tier": "priority"}, {"tier": None, "slo-class": "urgent"}):
            answer = await it.ask(key="bound", **fields)  # type: ignore[arg-type]
            assert answer.status_code == 403
            assert answer.json()["error"]["type"] == "permission_error"
            assert "bound" not in answer.text
        answer = await it.ask("gold", key="plain")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "service_tier")

    served(text, story, keys=KEYS)


def test_the_timeline_of_a_request(text: Text) -> None:
    async def story(it: Served) -> None:
        answer = await it.ask("standard", tokens=100, n=2, **{"request-id": "tenant/42"})
        assert answer.headers["x-request-id"] == "tenant/42"
        by_header = await it.get("/tenant/42")
        assert by_header.status_code == 200
        found = by_header.json()
        assert (found["id"], found["object"]) == ("tenant/42", "request.timeline")
        assert (await it.get(f"/{answer.json()['id']}")).json() == found  # cmpl-…
        assert len(found["requests"]) == 2
        for one in found["requests"]:
            assert one["replica"] in ("r0", "r1")
            assert (one["state"], one["finish_reason"], one["num_output_tokens"]) == ("finished", "length", 3)
            chunks = one["chunks"]
            assert sum(chunk["num_tokens"] for chunk in chunks) == one["num_prompt_tokens"] == 100
            assert all(chunk["step_s"] > 0 and chunk["predicted_s"] > 0 and chunk["reason"] for chunk in chunks)
            assert 0 <= one["queued_s"] < one["first_token_s"] < one["ended_s"]
            assert (one["num_decode_steps"], one["ttft_met"]) == (2, True)
            assert one["gap_p50_s"] <= one["gap_max_s"]
        missing = await it.get("/nobody")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "request_not_found"
        assert missing.json()["error"]["type"] == "invalid_request_error"

    served(text, story, num=2, max_num_batched_tokens=100)


def test_replicas_say_what_they_can_do(text: Text) -> None:
    async def story(it: Served) -> None:
        await asyncio.gather(*(it.ask("standard", key="plain") for _ in range(4)))
        assert (await it.http.get("/v1/replicas")).status_code == 401
        answer = await it.http.get("/v1/replicas", headers={"authorization": "Bearer plain"})
        told = answer.json()["data"]
        assert [one["replica"] for one in told] == ["r0", "r1"]
        for one, replica in zip(told, it.replicas, strict=True):
            assert SchedulingProfile.model_validate(one["profile"]) == replica.profile
            assert StepCost.model_validate(one["cost"]).base > 0

    served(text, story, num=2, keys=KEYS)


def test_requests_in_flight(text: Text) -> None:
    async def story(it: Served) -> None:
        assert (await it.get("")).json() == {"object": "list", "data": []}
        ids = ("first", "second")
        asking, gate = await it.held(*(it.ask("standard", **{"request-id": one}) for one in ids))
        data = (await it.get("")).json()["data"]
        assert [one["request_id"] for one in data] == ["first", "second"]
        assert all(one["slo_class"] == "standard" and one["num_prompt_tokens"] == 200 for one in data)
        assert all(one["state"] == "waiting" and one["waiting_s"] >= 0 for one in data)
        assert all("chunks" not in one for one in data)
        gate.set()
        await asyncio.gather(*asking)
        assert (await it.get("")).json()["data"] == []

    served(text, story)


def test_a_key_sees_its_own_requests(text: Text) -> None:
    async def story(it: Served) -> None:
        await it.ask("standard", 5, key="plain", **{"request-id": "mine"})
        assert (await it.get("/mine")).status_code == 401
        assert (await it.get("/mine", "plain")).status_code == 200
        assert (await it.get("/mine", "bound")).status_code == 404  # as if it did not exist
        assert (await it.get("/mine", "operator")).status_code == 200
        await it.ask("standard", 5, key="bound", **{"request-id": "mine"})  # another's id tells nothing
        assert len((await it.get("/mine", "bound")).json()["requests"]) == 1
        assert len((await it.get("/mine", "operator")).json()["requests"]) == 2
        asking, gate = await it.held(it.ask("standard", 5, key="plain"))
        assert (await it.get("", "bound")).json()["data"] == []
        assert len((await it.get("", "plain")).json()["data"]) == 1
        assert len((await it.get("", "operator")).json()["data"]) == 1
        gate.set()
        await asyncio.gather(*asking)

    served(text, story, keys=KEYS)
