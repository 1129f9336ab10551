"""`ReplicaClient`: submissions of one turn of the event loop share a call, and each gets its own answer."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID

from crossdock.cluster.dispatch.client import ReplicaClient
from crossdock.workers.schedule.submission import Grammar, Overloaded, SamplingParams, Submission


class Handle:
    """A Serve handle that answers calls of `submit` with a function of their submissions."""

    deployment_id = DeploymentID("mixed", "app")

    def __init__(self, answer: Any) -> None:
        self.calls: list[list[str]] = []
        self.submit = SimpleNamespace(remote=self._submit)
        self._answer = answer

    def options(self, **options: Any) -> "Handle":
        return self

    async def _submit(self, ingress: str, submissions: Sequence[Submission]) -> Any:
        self.calls.append([submission.id for submission in submissions])
        await asyncio.sleep(0)
        return self._answer(submissions)


def submission(name: str, num_tokens: int = 10, grammar: Grammar | None = None) -> Submission:
    return Submission(name, [5] * num_tokens, SamplingParams(grammar=grammar))


def submitted(handle: Handle, submissions: Sequence[Submission]) -> list[Any]:
    async def all_at_once() -> list[Any]:
        client = ReplicaClient(handle, "r0", "i0")  # type: ignore[arg-type]
        return await asyncio.gather(*map(client.submit, submissions), return_exceptions=True)

    return asyncio.run(all_at_once())


def test_submissions_of_one_turn_share_a_call_and_keep_their_answers() -> None:
    full = Overloaded("full", retry_after=2.0)
    handle = Handle(lambda asked: [full if each.id == "3" else int(each.id) for each in asked])
    assert submitted(handle, [submission(f"{number}") for number in range(6)]) == [0, 1, 2, full, 4, 5]
    assert handle.calls == [["0", "1", "2", "3", "4", "5"]]


def test_grammars_and_long_prompts_have_calls_of_their_own() -> None:
    handle = Handle(lambda asked: [0] * len(asked))
    works = [submission("a"), submission("b", grammar=Grammar("regex", "x")), submission("c", 16_000)]
    submitted(handle, [*works, submission("d", 1000)])
    assert sorted(handle.calls) == [["a", "c"], ["b"], ["d"]]


def test_error_of_a_call_reaches_every_submission() -> None:
    def fails(asked: Sequence[Submission]) -> Any:
        raise ConnectionError("gone")

    for error in submitted(Handle(fails), [submission("a"), submission("b")]):
        assert isinstance(error, ConnectionError)


async def test_submission_that_nobody_waits_for_does_not_stop_the_others() -> None:
    client = ReplicaClient(Handle(lambda asked: [0] * len(asked)), "r0", "i0")  # type: ignore[arg-type]
    left, stays = (asyncio.create_task(client.submit(submission(name))) for name in "ab")
    await asyncio.sleep(0)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    assert await stays == 0
