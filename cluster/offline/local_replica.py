"""The engine of this process in place of a fleet: generations get their tokens from its steps."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence

from crossdock.cluster.dispatch.dispatcher import DeltaReader, ModelCard
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.schedule.request.request import TokenDelta
from crossdock.workers.schedule.request.submission import Submission

logger = logging.getLogger(__name__)
_WAIT_S = 0.001  # until a step that computes nothing is tried again: pages are on their way into the pool


class LocalReplica:
    """Steps an engine between the turns of an event loop, for as long as requests wait for tokens.

    The steps block the loop: the readers of the tokens have nothing else to do, and no thread competes for the
    interpreter.
    """

    def __init__(self, engine: Engine, model_name: str) -> None:
        self.engine = engine
        executor = engine.executor
        least = 0 if executor.model is None else 1
        self.model = ModelCard(
            model_name, int(time.time()), executor.max_model_len, executor.vocab_size, least_output=least
        )
        self._deltas: dict[str, asyncio.Queue[TokenDelta]] = {}  # by request, those in flight
        self._stepping: asyncio.Task[None] | None = None

    async def generate(self, submission: Submission, reader: DeltaReader | None = None) -> AsyncIterator[TokenDelta]:
        """Yield all of the request's tokens, beginning with an empty delta: none is left to the reader.

        Raises:
            ValueError: the engine refuses the request; the message names the field.
        """
        self.engine.add(submission)
        deltas = self._deltas[submission.id] = asyncio.Queue[TokenDelta]()
        is_ended = False
        try:
            yield TokenDelta(submission.id, [])
            if self._stepping is None or self._stepping.done():
                self._stepping = asyncio.create_task(self._step())
            while not is_ended:
                delta = await deltas.get()
                is_ended = delta.finish_reason is not None
                yield delta
        finally:
            del self._deltas[submission.id]
            if not is_ended:
                self._abort(submission.id)

    async def _step(self) -> None:
        while self._deltas:
            try:
                step = self.engine.step()
                self._deliver(step.deltas)
            except Exception as error:
                logger.error("the engine failed; its requests end with an error", exc_info=error)
                self._deliver([delta for _, delta in self.engine.fail_all(f"{type(error).__name__}: {error}")])
                return
            await asyncio.sleep(0 if step.batch else _WAIT_S)

    def _deliver(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            if delta.request_id in self._deltas:
                self._deltas[delta.request_id].put_nowait(delta)

    def _abort(self, request_id: str) -> None:
        while self.engine.is_in_flight(request_id):
            self._deliver(self.engine.finish_step().deltas)
        self.engine.abort(request_id)
