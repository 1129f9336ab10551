"""Classes, refusals and timelines as clients meet them: HTTP in front of real engines, in this process."""

import asyncio
from typing import Any

import httpx
import pytest

from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.router.fleet import RouterConfig
from tests.cluster.api.engine_api import EngineApi
from tests.cluster.dispatch.in_process import IN_TURN
from tests.workers.replica.driven import hold, posted

KEYS = ("plain", {"key": "bound", "classes": ["standard"]}, {"key": "operator", "sees_all_requests": True})


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


@pytest.mark.parametrize(("stream", "router"), [(False, None), (True, IN_TURN)])
async def test_request_that_would_be_late_is_refused(
    tokenizer: ModelTokenizer, stream: bool, router: RouterConfig | None
) -> None:
    """The last of three equal prompts cannot start within twice its own time.

    The router refuses it; a router that does not predict leaves that to the replica.
    """
    num_asked = 2 if router is None else 3
    async with EngineApi(tokenizer, router=router) as api:
        gate = await hold(api.replicas[0].engine_thread)
        asking = [asyncio.create_task(api.ask(stream=stream)) for _ in range(3)]
        await posted(api.replicas[0].engine_thread, num_asked)
        gate.set()
        answers = await asyncio.gather(*asking)
        assert [is_refusal(answer) for answer in answers] == [False, False, True]
        assert [answer.status_code for answer in answers[:2]] == [200, 200]
        assert (await api.ask(stream=stream)).status_code == 200  # alone, a request is served however long it takes
        metrics = await api.dispatcher.metrics_text()
        assert 'crossdock_ingress_requests_refused_total{slo_class="urgent",ingress="0"} 1.0' in metrics
        refused = 'crossdock_requests_refused_total{slo_class="urgent",replica="r0"} 1.0'
        assert (refused in metrics) == (router is not None)


async def test_no_token_is_sent_before_every_choice_is_accepted(tokenizer: ModelTokenizer) -> None:
    """The first prompt has tokens while the second is still being submitted, and then refused."""
    async with EngineApi(tokenizer) as api:
        replica, last = api.replicas[0], asyncio.Event()
        submit = replica.submit

        async def slow(submission: Any) -> int:
            if len(submission.prompt_token_ids) == 3:
                await last.wait()
                raise ValueError("prompt has 3 tokens")
            return await submit(submission)

        replica.submit = slow  # type: ignore[method-assign]
        asking = asyncio.create_task(api.ask("standard", prompt=[[5] * 20, [6] * 3], stream=True, max_tokens=100))
        while not any(one["num_output_tokens"] > 2 for one in await api.dispatcher.live_requests(None)):
            await asyncio.sleep(0.001)
        last.set()
        assert (await asking).status_code == 400


@pytest.mark.parametrize("router", [None, IN_TURN])
async def test_request_that_names_no_class_waits_where_one_that_does_is_refused(
    tokenizer: ModelTokenizer, router: RouterConfig | None
) -> None:
    """All have the same class. The router refuses those that ask for it, or leaves that to the replica."""
    async with EngineApi(tokenizer, router=router, default_slo_class="urgent") as api:
        loop = api.replicas[0].engine_thread
        gate = await hold(loop)
        tiers = (None, "auto", "default", None, None, None)
        waiting = [asyncio.create_task(api.ask(tier)) for tier in tiers]
        await posted(loop, len(tiers))
        naming = [asyncio.create_task(api.ask(tier, **{"slo-class": "urgent"})) for tier in (None, "urgent")]
        await posted(loop, len(tiers) + (0 if router is None else len(naming)))
        gate.set()
        answers = await asyncio.gather(*waiting)
        assert [answer.status_code for answer in answers] == [200] * len(tiers)
        assert {answer.headers["x-slo-class"] for answer in answers} == {"urgent"}
        assert [is_refusal(answer) for answer in await asyncio.gather(*naming)] == [True, True]


async def test_requests_beyond_the_queue_are_refused_until_others_have_a_token(tokenizer: ModelTokenizer) -> None:
    async with EngineApi(tokenizer, most_queued=3) as api:
        [first, *others], gate = await api.held(api.ask(None), api.ask(None, prompt=[[5] * 9] * 2), num_submissions=3)
        for refused in (await api.ask(None), await api.ask(None, n=2), await api.ask("urgent")):
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "10"
            assert "3 requests wait for their first token" in refused.json()["error"]["message"]
        assert api.dispatcher.num_queued == 3
        gate.set()
        assert [answer.status_code for answer in await asyncio.gather(first, *others)] == [200, 200]
        assert (await api.ask(None, prompt=[[5] * 9] * 3)).status_code == 200
        assert (await api.ask(None, prompt=[[5] * 9] * 4)).status_code == 429, "more at once than may wait"
        assert api.dispatcher.num_queued == 0


async def test_key_whose_requests_fill_its_share_of_the_queue_leaves_places_to_others(
    tokenizer: ModelTokenizer,
) -> None:
    async with EngineApi(tokenizer, keys=("a", "b"), most_queued=4) as api:
        [first], gate = await api.held(api.ask(None, prompt=[[5] * 9] * 2, key="a"), num_submissions=2)
        refused = await api.ask(None, key="a")
        assert refused.status_code == 429
        assert "2 requests, of which this API key has its share" in refused.json()["error"]["message"]
        other = asyncio.create_task(api.ask(None, key="b"))
        gate.set()
        assert [answer.status_code for answer in await asyncio.gather(first, other)] == [200, 200]
        assert (await api.ask(None, key="a")).status_code == 200
        assert api.dispatcher.num_queued == 0


async def test_late_request_waits_with_admission_queue(tokenizer: ModelTokenizer) -> None:
    async with EngineApi(tokenizer, admission="queue") as api:
        gate = await hold(api.replicas[0].engine_thread)
        asking = [asyncio.create_task(api.ask()) for _ in range(5)]
        await posted(api.replicas[0].engine_thread, 5)
        gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200] * 5


async def test_timeline_is_found_by_id_and_complete(tokenizer: ModelTokenizer) -> None:
    async with EngineApi(tokenizer, num_replicas=2, max_num_batched_tokens=100) as api:
        answer = await api.ask("standard", tokens=100, n=2, **{"request-id": "owner/42"})
        assert answer.headers["x-request-id"] == "owner/42"
        by_header = await api.get("/owner/42")
        assert by_header.status_code == 200
        found = by_header.json()
        assert (found["id"], found["object"]) == ("owner/42", "request.timeline")
        assert (await api.get(f"/{answer.json()['id']}")).json() == found  # cmpl-…
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
        missing = await api.get("/nobody")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "request_not_found"
        assert missing.json()["error"]["type"] == "invalid_request_error"


async def test_requests_in_flight_are_listed(tokenizer: ModelTokenizer) -> None:
    async with EngineApi(tokenizer) as api:
        assert (await api.get("")).json() == {"object": "list", "data": []}
        ids = ("first", "second")
        asking, gate = await api.held(*(api.ask("standard", **{"request-id": one}) for one in ids))
        data = (await api.get("")).json()["data"]
        assert [one["request_id"] for one in data] == ["first", "second"]
        assert all(one["slo_class"] == "standard" and one["num_prompt_tokens"] == 200 for one in data)
        assert all(one["state"] == "waiting" and one["waiting_s"] >= 0 for one in data)
        assert all("chunks" not in one for one in data)
        gate.set()
        await asyncio.gather(*asking)
        assert (await api.get("")).json()["data"] == []


async def test_key_sees_only_its_own_requests(tokenizer: ModelTokenizer) -> None:
    async with EngineApi(tokenizer, keys=KEYS) as api:
        await api.ask("standard", 5, key="plain", **{"request-id": "mine"})
        assert (await api.get("/mine")).status_code == 401
        assert (await api.get("/mine", "plain")).status_code == 200
        assert (await api.get("/mine", "bound")).status_code == 404  # as if it did not exist
        assert (await api.get("/mine", "operator")).status_code == 200
        await api.ask(
            "standard", 5, key="bound", **{"request-id": "mine"}
        )  # the same id of another key reveals nothing
        assert len((await api.get("/mine", "bound")).json()["requests"]) == 1
        assert len((await api.get("/mine", "operator")).json()["requests"]) == 2
        asking, gate = await api.held(api.ask("standard", 5, key="plain"))
        assert (await api.get("", "bound")).json()["data"] == []
        assert len((await api.get("", "plain")).json()["data"]) == 1
        assert len((await api.get("", "operator")).json()["data"]) == 1
        gate.set()
        await asyncio.gather(*asking)


async def test_ends_are_counted_as_clients_see_them(tokenizer: ModelTokenizer) -> None:
    """A stop string ends the stream of tokens early, which is no abort."""
    async with EngineApi(tokenizer) as api:
        whole = await api.ask("standard", max_tokens=20, temperature=0)
        stop = whole.json()["choices"][0]["text"][5:8]
        stopped = await api.ask("standard", max_tokens=20, temperature=0, stop=[stop])
        assert [answer.json()["choices"][0]["finish_reason"] for answer in (whole, stopped)] == ["length", "stop"]
        [asking], gate = await api.held(api.ask("standard", max_tokens=20))
        asking.cancel()
        await asyncio.wait([asking])
        gate.set()
        metrics = await api.dispatcher.metrics_text()
        for reason, count in {"length": 1, "stop": 1, "abort": 1, "error": 0}.items():
            ended = f'crossdock_ingress_requests_ended_total{{finish_reason="{reason}",ingress="0"}} {count}.0'
            assert ended in metrics, reason
