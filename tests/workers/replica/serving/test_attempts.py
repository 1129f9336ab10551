"""An engine thread while attempts come twice, late or too many at once, and while something in it fails."""

import asyncio
from dataclasses import replace

import pytest

from crossdock.workers.replica.serving import channel, engine_thread
from crossdock.workers.replica.serving.engine_thread import EngineThread
from crossdock.workers.replica.serving.inbox import Inbox
from crossdock.workers.replica.serving.readers import Superseded
from crossdock.workers.schedule.request.request import FinishReason, TokenDelta
from crossdock.workers.schedule.request.submission import SamplingParams, Submission
from tests.workers.replica.driven import Driven, driving, hold, posted

PROMPT = [5] * 50


def attempt(epoch: int, max_tokens: int = 150) -> Submission:
    return Submission("r", PROMPT, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True), epoch=epoch)


async def end(driven: Driven, epoch: int) -> None:
    """Wait until the attempt has ended with all of its tokens."""
    async for message in driven.thread.channel("other").messages():
        for delta in message.deltas:
            assert delta.epoch == epoch
            if delta.finish_reason is not None:
                assert delta.finish_reason is FinishReason.LENGTH
                return


def fail() -> None:
    raise LookupError("broken on purpose")


async def progress(thread: EngineThread, name: str, epoch: int = 0) -> list[int | str] | None:
    """Return how far one attempt is."""
    [numbers] = await thread.progress([(name, epoch)])
    return numbers


async def test_later_attempt_replaces_the_one_that_is_served_and_an_earlier_one_is_refused() -> None:
    async with driving() as driven:
        await driven.thread.submit("test", attempt(3))
        ending = asyncio.create_task(end(driven, 4))
        await asyncio.sleep(0)
        await driven.thread.submit("other", attempt(4))
        with pytest.raises(Superseded):
            await driven.thread.submit("other", attempt(3))
        with pytest.raises(Superseded):
            await driven.thread.submit("other", attempt(4))
        await driven.thread.abort([("r", 3)])
        assert await progress(driven.thread, "r", 3) is None
        await ending
        assert [one["finish_reason"] for one in driven.thread.timelines.find("", None, 0.0)] == ["abort", "length"]
        assert driven.engine.pages.counts().owned == 0


@pytest.mark.parametrize("is_posted", [False, True])
async def test_abort_that_overtakes_its_submission_ends_that_and_no_later_one(is_posted: bool) -> None:
    async with driving() as driven:
        gate = await driven.hold()
        submitting = asyncio.create_task(driven.thread.submit("test", attempt(1)))
        if is_posted:
            await posted(driven.thread, 1)
            waiting = await progress(driven.thread, "r", 1)
            assert waiting is not None, "it waits for the step that runs"
            assert waiting[0] == "submitted"
        await driven.thread.abort([("r", 1)])
        assert await progress(driven.thread, "r", 1) is None
        gate.set()
        with pytest.raises(Superseded):
            await submitting
        assert driven.engine.scheduler.table.get("r") is None
        ending = asyncio.create_task(end(driven, 2))
        await asyncio.sleep(0)
        await driven.thread.submit("other", attempt(2))
        await ending


async def test_progress_is_that_of_the_request_and_of_the_replica_only_while_the_request_waits() -> None:
    async with driving() as driven:
        thread = driven.thread
        assert await progress(thread, "a") is None
        gate = await driven.hold()
        for name in "abcde":  # four have places
            submitting = asyncio.create_task(driven.submit(name, 40, max_tokens=200))
            await posted(thread, "abcde".index(name) + 1)
        while (running := await progress(thread, "d")) is None or running[0] == "submitted" or int(running[2]) < 42:
            gate = await hold(thread, before=gate)
        await submitting
        stream, waiting = await progress(thread, "a"), await progress(thread, "e")
        for _ in range(3):
            await progress(thread, "a")
        assert (await progress(thread, "a"), await progress(thread, "e")) == (stream, waiting)
        assert waiting is not None
        assert stream is not None
        assert (waiting[0], stream[0]) == ("waiting", "running")
        gate = await hold(thread, before=gate)
        assert await progress(thread, "a") != stream
        assert await progress(thread, "e") != waiting, "it waits behind others that are computed"
        gate.set()
        await thread.abort([(name, 0) for name in "abcde"])


def test_many_submissions_are_spread_over_steps_and_aborts_go_first() -> None:
    inbox, done = Inbox(), []
    for number in range(40):
        inbox.post(lambda number=number: done.append(number))  # type: ignore[misc]
    inbox.post(lambda: done.append("abort"), is_urgent=True)
    rounds = []
    while len(inbox):
        for action in inbox.due():
            action()
        rounds.append(len(done))
    assert done == ["abort", *range(40)]
    assert rounds == [17, 33, 41]


async def test_stream_goes_on_between_hundreds_of_submissions() -> None:
    async with driving() as driven:
        await driven.submit("stream", 10, max_tokens=200)
        gate = await driven.hold()
        steps = int(driven.metric("crossdock_steps_total"))
        driven.thread.channel("other")
        work = Submission("", [5] * 5, SamplingParams(max_tokens=1))
        asking = [
            asyncio.create_task(driven.thread.submit("other", replace(work, id=f"{number}"))) for number in range(320)
        ]
        await posted(driven.thread, 320)
        gate.set()
        await asyncio.gather(*asking)
        assert driven.metric("crossdock_steps_total") - steps >= 320 // 16 - 1
        await driven.ended["stream"].wait()
        assert driven.timeline("stream")["finish_reason"] == "length"


async def test_failure_outside_a_step_ends_requests_and_not_the_replica() -> None:
    async with driving() as driven:
        await driven.submit("a", 40, max_tokens=200)
        driven.thread._inbox.post(fail)
        await driven.ended["a"].wait()
        assert driven.timeline("a")["finish_reason"] == "error"
        assert driven.engine.pages.counts().owned == 0
        await driven.run("b", 40)
        assert driven.timeline("b")["finish_reason"] == "length"


async def test_thread_that_fails_again_and_again_ends_with_its_readers_and_calls() -> None:
    async with driving() as driven:
        gate = await driven.hold()
        for _ in range(engine_thread._MOST_FAILURES):
            driven.thread._inbox.post(fail)
        calling = asyncio.create_task(driven.thread.call(lambda: None))
        await posted(driven.thread, engine_thread._MOST_FAILURES + 1)
        gate.set()
        with pytest.raises(RuntimeError, match="the replica has ended"):
            await calling
        await driven.reading
        driven.thread._thread.join()
        assert not driven.thread.is_alive
        with pytest.raises(RuntimeError, match="the replica has ended"):
            await driven.thread.submit("test", attempt(0))


async def test_call_that_raises_raises_at_its_caller() -> None:
    async with driving() as driven:
        with pytest.raises(LookupError):
            await driven.thread.call(fail)
        await driven.run("a", 40)


async def test_reader_too_far_behind_is_closed_and_its_requests_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ingress that is stopped for long must not fill the replica's memory. Other readers go on."""
    monkeypatch.setattr(channel, "_MOST_DELTAS", 20)

    async with driving() as driven:
        stopped = driven.thread.channel("stopped")
        work = replace(attempt(0), id="its")
        await driven.thread.submit("stopped", work)
        await driven.run("other", 40, max_tokens=10)
        while await progress(driven.thread, "its") is not None:
            await asyncio.sleep(0.001)
        assert "stopped" not in driven.thread.channels
        assert [message async for message in stopped.messages()] == []
        assert driven.engine.pages.counts().owned == 0


@pytest.mark.parametrize("is_alive", [True, False])
async def test_reader_without_a_sign_of_life_loses_its_requests(is_alive: bool) -> None:
    """An ingress that is stopped says nothing, and its connection stays open."""
    async with driving() as driven:
        reader = driven.thread.channel("other")
        work = replace(attempt(0), id="its")
        await driven.thread.submit("other", work)
        reader.heard_at -= 1.1 * channel.MOST_SILENCE_S
        if is_alive:
            driven.thread.heard("other")
        while await progress(driven.thread, "its") is not None:
            await asyncio.sleep(0.001)
        assert ("other" in driven.thread.channels) == is_alive
        deltas = list[TokenDelta]()
        async for message in reader.messages():
            deltas += message.deltas
            if any(delta.finish_reason is not None for delta in message.deltas):
                reader.close()  # the request is over before its last message is on its way
        assert (sum(len(delta.token_ids) for delta in deltas) == work.sampling.max_tokens) == is_alive
        assert driven.engine.pages.counts().owned == 0


async def test_stream_of_a_reader_without_a_sign_of_life_ends_though_the_replica_is_idle() -> None:
    """Serve counts the stream as a running request: this replica could not drain."""
    async with driving() as driven:
        messages = driven.thread.messages("quiet")
        await anext(messages)
        driven.thread.channels["quiet"].heard_at -= 1.1 * channel.MOST_SILENCE_S
        assert [message async for message in messages] == []
        assert "quiet" not in driven.thread.channels


def test_full_channel_refuses_and_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_MOST_DELTAS", 2)
    queue = channel.Channel()
    assert queue.put([TokenDelta("a", [1]), TokenDelta("a", [2])])
    assert not queue.put([TokenDelta("a", [3])])
