"""Replicas in this process: real engines, no Ray; and clients of a dispatcher over them."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import cache, partial
from typing import Any, cast
from unittest.mock import patch

from pydantic import ByteSize

from crossdock.cluster.dispatch.dispatcher import Dispatcher
from crossdock.cluster.dispatch.engine_client import RemoteMethod
from crossdock.router.fleet import RouterConfig
from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.replica.config import EngineConfig, TransferConfig
from crossdock.workers.replica.engine import calibrate
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.serving.controls import Controls
from crossdock.workers.replica.serving.engine_thread import EngineThread
from crossdock.workers.replica.serving.readers import AttemptKey
from crossdock.workers.replica.transfer.handover import connect
from crossdock.workers.report.advertise import Message
from crossdock.workers.report.profile import Role
from crossdock.workers.schedule.cost import cost_fit
from crossdock.workers.schedule.cost.cost import StepWork
from crossdock.workers.schedule.request.submission import Overloaded, SamplingParams, Submission
from tests.known_seconds import known_sweep
from tests.waiting import until
from tests.workers.architectures import build

IN_TURN = RouterConfig(policy="round-robin")
fit_of_sweep = cost_fit._of_sweep


@cache
def fitted_once(sweep: tuple[tuple[StepWork, float], ...], most_context: float) -> Any:
    return fit_of_sweep(sweep, most_context)


class InProcess:
    """An `EngineClient` without a process between: `replica.py` does the same behind a Serve handle."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        role: Role = "mixed",
        *,
        engine: Engine | None = None,
    ) -> None:
        """`engine`: None makes one with `config` on a small random model. None: it refuses no request."""
        config = config or EngineConfig(kv_cache_memory=ByteSize(4 << 20), admission="queue")
        if engine is None:
            rank = config.max_lora_rank if config.enable_lora else 0
            engine = new_engine(wrap_module(build("llama", {}), LoadOptions(max_lora_rank=rank)), config)
        with (  # nothing is measured
            patch.object(calibrate, "remembered_sweep", known_sweep),
            patch.object(calibrate, "remembered_factor", lambda *_: 2.0),
            patch.object(cost_fit, "_of_sweep", lambda sweep, most: fitted_once(tuple(sweep), most)),
        ):
            self.profile = calibrate.warm_up(engine)
        arguments = engine, "tiny", role, TransferConfig(transport="tcp")
        self.engine_thread = EngineThread(engine, partial(connect, *arguments) if role != "mixed" else None)
        self.controls = Controls(self.engine_thread)
        self.pause, self.resume = self.controls.pause, self.controls.resume
        self.profile = self.profile.model_copy(update={"role": role, **self.engine_thread.addresses})
        self.is_killed = False

    async def messages(self) -> AsyncIterator[Message]:
        if self.is_killed:
            raise ConnectionError("killed")
        async with aclosing(cast(AsyncGenerator[Message, None], self.engine_thread.messages("test"))) as messages:
            yield await anext(messages)
            async for message in messages:
                if self.is_killed:
                    raise ConnectionError("killed")
                yield message

    async def submit(self, submission: Submission) -> int:
        return await self.engine_thread.submit("test", submission)

    async def close(self) -> None:
        if (channel := self.engine_thread.channels.get("test")) is not None:
            channel.close()

    def still_reads(self) -> None:
        self.engine_thread.heard("test")

    async def is_dead(self) -> bool:
        return self.is_killed

    async def call(self, method: RemoteMethod, *arguments: Any) -> Any:
        """Call a method of this class, or else the engine thread's or the controls' of that name."""
        owner = next(each for each in (self, self.engine_thread, self.controls) if hasattr(each, method))
        return await getattr(owner, method)(*arguments)

    async def timelines(self, request_id: str, owner: str | None) -> list[dict[str, Any]]:
        return await self.engine_thread.find_timelines(request_id, owner)

    async def watched(self, seen: Mapping[str, int], owner: str | None) -> dict[str, Any]:
        profile = self.profile.model_dump(exclude={"peer"}, mode="json")
        return {"pool": "mixed", "profile": profile, **self.engine_thread.watched(seen, owner)}

    async def owns_nothing(self) -> bool:
        """Return whether no request is here and none owns a page."""
        return not self.engine_thread.engine.scheduler.table.requests() and not await self.owned_pages()

    async def owned_pages(self) -> int:
        counts = []
        await self.engine_thread.call(lambda: counts.append(self.engine_thread.engine.pages.counts().owned))
        return counts[0]


class Refusing(InProcess):
    """An overloaded replica: it refuses all requests, and asks for a wait of `retry_after` seconds."""

    def __init__(self, retry_after: float) -> None:
        super().__init__()
        self.retry_after = retry_after
        self.num_refused = 0

    async def submit(self, submission: Submission) -> int:
        self.num_refused += 1
        raise Overloaded(f"retry in {self.retry_after} s", self.retry_after)


class Forgetful(InProcess):
    """A replica that takes requests and forgets every other one, as if a message had been lost."""

    num_taken = 0

    async def submit(self, submission: Submission) -> int:
        sequence = await super().submit(submission)
        self.num_taken += 1
        if self.num_taken % 2:
            await self.engine_thread.abort([(submission.id, submission.epoch)])
        return sequence


class Hung(InProcess):
    """A replica whose engine is stuck: it reports that it has the request, which never moves."""

    async def submit(self, submission: Submission) -> int:
        return 0

    async def progress(self, attempts: Sequence[AttemptKey]) -> list[list[int | str] | None]:
        return [["waiting", 7] for _ in attempts]


async def ready(dispatcher: Dispatcher, num_replicas: int = 1) -> None:
    """Wait until so many replicas are up."""
    await until(lambda: len(dispatcher.fleet) >= num_replicas)


@asynccontextmanager
async def serving(dispatcher: Dispatcher, **replicas: InProcess) -> AsyncIterator[Dispatcher]:
    """Yield the dispatcher once all replicas are up. Close it in the end, and all replicas that have joined."""
    with patch.object(dispatcher, "join", wraps=dispatcher.join) as join:
        for name, replica in replicas.items():
            dispatcher.join(name, replica, replica.profile)
        await ready(dispatcher, len(replicas))
        try:
            yield dispatcher
        finally:
            await dispatcher.close()
            for joined in {call.args[1] for call in join.call_args_list}:
                await joined.engine_thread.close()


async def tokens(dispatcher: Dispatcher, name: str, max_tokens: int = 20, prompt: int = 30) -> list[int]:
    """Return the whole output of a greedy request."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    output: list[int] = []
    prompt_ids = [3 + i % 100 for i in range(prompt)]
    async for delta in dispatcher.generate(Submission(name, prompt_ids, params, is_promised=False)):
        output += delta.token_ids
    return output
