"""The last steps of a replica, for a person who watches it: how many decodes, and chunks of which prompt."""

import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crossdock.workers.report.timeline import Chunk, Timeline
from crossdock.workers.schedule.batch import Batch

KEEP = 2048  # steps, 20 s of 10 ms each; 1 to 3 MiB with two chunks in each


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step and what it computed."""

    number: int  # from 1
    started: float  # on the engine's clock
    seconds: float
    predicted: float  # seconds; 0 before the engine is warm
    num_decodes: int
    num_skipped: int
    limit: str  # why its chunks were not larger
    chunks: Sequence[tuple[Timeline, Chunk]]


class RecentSteps:
    """The last `KEEP` steps. The engine's thread records; any thread may read, by a copy in one operation."""

    def __init__(self, unix_at_zero: float, keep: int = KEEP) -> None:
        """`unix_at_zero`: the Unix time at which the engine's clock read 0."""
        self.incarnation = uuid.uuid4().hex  # step numbers start again with a new one
        self._unix_at_zero = unix_at_zero
        self._steps: deque[StepRecord] = deque(maxlen=keep)
        self._last = 0

    def record(
        self,
        batch: Batch,
        chunks: Sequence[tuple[Timeline, Chunk]],
        started: float,
        seconds: float,
        predicted: float,
    ) -> None:
        """Record a step that began at `started` and took `seconds`."""
        self._last += 1
        self._steps.append(
            StepRecord(
                self._last, started, seconds, predicted, batch.num_decodes, batch.num_skipped, batch.limit, chunks
            )
        )

    def after(self, seen: Mapping[str, int], tenant: str | None) -> dict[str, Any]:
        """Return, as JSON, the steps after the last one that the reader has seen; without one, all recorded steps.

        Args:
            seen: number of the last step seen, by incarnation.
            tenant: whose requests are shown by name; None: all.
        """
        number = seen.get(self.incarnation, 0)
        steps = [step for step in list(self._steps) if step.number > number]
        return {
            "incarnation": self.incarnation,
            "last_step": steps[-1].number if steps else number,
            "steps": [self._shown(step, tenant) for step in steps],
        }

    def _shown(self, step: StepRecord, tenant: str | None) -> dict[str, Any]:
        return {
            "number": step.number,
            "started": round(self._unix_at_zero + step.started, 4),
            "seconds": round(step.seconds, 6),
            "predicted_s": round(step.predicted, 6),
            "num_decodes": step.num_decodes,
            "num_skipped": step.num_skipped,
            "limit": step.limit,
            "chunks": [
                {
                    "prompt": timeline.number,  # identifies prompts for readers that may not see their names
                    "request_id": timeline.request_id if tenant in (None, timeline.tenant) else None,
                    "slo_class": timeline.slo.name,
                    "start": chunk.start,
                    "num_tokens": chunk.num_tokens,
                    "num_prompt_tokens": timeline.num_prompt_tokens,
                    "reason": chunk.reason,
                }
                for timeline, chunk in step.chunks
            ],
        }
