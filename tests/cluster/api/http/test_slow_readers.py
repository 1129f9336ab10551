"""Clients that do not read their streams: over sockets, from the listener to the abort of the submission."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest

from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.http.listener import listen
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch import connections
from crossdock.cluster.dispatch.attempt import Attempt
from crossdock.cluster.dispatch.dispatcher import Dispatcher, SlowReader
from crossdock.cluster.dispatch.loop_clock import LoopClock
from crossdock.workers.schedule.request.request import TokenDelta, TokenLogprobs
from crossdock.workers.schedule.request.submission import SamplingParams, Submission
from tests.cluster.api.one_model import one_model_api
from tests.cluster.api.scripted_api import ScriptedDispatcher
from tests.cluster.api.unread import STREAM, unread
from tests.cluster.dispatch.in_process import InProcess, ready, tokens
from tests.cluster.ports import free_port
from tests.waiting import until


async def test_stream_that_is_not_read_is_aborted(engine: ScriptedDispatcher, tokenizer: ModelTokenizer) -> None:
    """The tokens that wait for this client are in the kernel's buffers alone: no more are taken from the engine."""
    taken = 0

    def endless(submission: Submission) -> Iterator[TokenDelta]:
        nonlocal taken
        for number in count():
            taken = number
            yield TokenDelta(submission.id, [5] * 1000)

    engine.script = endless  # type: ignore[assignment]
    port = free_port()
    app = one_model_api(engine, tokenizer, HttpConfig())  # type: ignore[arg-type]
    server = await listen(app, "127.0.0.1", port, write_timeout_s=0.5)
    with unread(port, STREAM):
        while not engine.aborted:
            await asyncio.sleep(0.01)
    assert engine.running == 0
    assert 0 < taken < 20_000
    await server.close(1)


async def test_owner_that_leaves_most_unread_in_all_loses_a_request_and_not_the_one_with_the_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "MOST_UNREAD", 220)
    checks, check = list[None](), connections.ReplicaConnections._end_slowest_readers
    monkeypatch.setattr(connections.ReplicaConnections, "_end_slowest_readers", lambda self: checks.append(check(self)))
    replica = InProcess()
    dispatcher = Dispatcher("tiny")
    dispatcher.join("a", replica, replica.profile)
    await ready(dispatcher)

    def begun(name: str, owner: str, logprobs: int | None) -> AsyncGenerator[TokenDelta, None]:
        sampling = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True, logprobs=logprobs)
        return dispatcher.generate(Submission(name, [3] * 30, sampling, key_owner=owner))  # type: ignore[return-value]

    streams = {name: begun(name, "many", None) for name in ("a", "b", "c")} | {"d": begun("d", "one", 1)}
    for stream in streams.values():
        await anext(stream)
    await until(lambda: not replica.engine_thread.engine.scheduler.table.requests())
    num_checks = len(checks)
    await until(lambda: len(checks) > num_checks + 1)  # by then all tokens have come
    ends = dict[str, bool]()
    for name, stream in streams.items():
        try:
            ends[name] = len([delta async for delta in stream]) > 0
        except SlowReader:
            ends[name] = False
    assert ends["d"], ends
    assert sum(ends.values()) < 4, ends
    await dispatcher.close()
    await replica.engine_thread.close()


@pytest.mark.parametrize(("most", "logprobs", "listed"), [(60, 1, 0), (1000, 0, 40)])
async def test_client_that_leaves_too_many_values_unread_loses_its_request_and_others_go_on(
    most: int, logprobs: int, listed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log-probabilities of listed tokens count, as those of the likeliest do."""
    monkeypatch.setattr(connections, "MOST_UNREAD", most)
    replica = InProcess()
    dispatcher = Dispatcher("tiny")
    dispatcher.join("a", replica, replica.profile)
    await ready(dispatcher)
    expected = await tokens(dispatcher, "alone", 150)
    sampling = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True, logprobs=logprobs)
    sampling = replace(sampling, logprob_token_ids=tuple(range(listed)))
    slow = dispatcher.generate(Submission("slow", [3] * 30, sampling))
    while not (await anext(slow)).token_ids:
        pass
    begun = asyncio.create_task(tokens(dispatcher, "beside", 150))
    while replica.engine_thread.engine.scheduler.table.requests():  # the abort of the one, the end of the other
        await asyncio.sleep(0.01)
    assert await begun == expected
    with pytest.raises(SlowReader):
        async for _ in slow:
            pass
    assert await replica.owned_pages() == 0
    await dispatcher.close()
    await replica.engine_thread.close()


def test_unread_delta_counts_its_tokens_and_every_log_probability_in_it() -> None:
    sampling = SamplingParams(max_tokens=9, logprobs=2, logprob_token_ids=(1, 2, 3), prompt_logprobs=4)
    attempt = Attempt(SimpleNamespace(submission=Submission("r", [3] * 30, sampling)), LoopClock())  # type: ignore[arg-type]
    each = TokenLogprobs(5, -1.0, 1)
    attempt.add("a", TokenDelta("r", [5]), 0.0)  # the next delta does not count
    attempt.add("a", TokenDelta("r", [5, 6], logprobs=[each] * 2, prompt_logprobs=[None, each, each]), 0.0)
    assert attempt.num_unread == 2 * (1 + 3) + 3 * (1 + 4)
