"""The last steps of a replica, for a person who watches it: how many decodes, and chunks of which prompt."""

import hashlib
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crossdock.workers.report.timeline import Chunk, Timeline
from crossdock.workers.schedule.request.batch import Batch

SHOWN = 512  # steps in one answer, which takes a few milliseconds to make
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

    def __init__(self, unix_at_zero: float, incarnation: str, keep: int = KEEP) -> None:
        """`unix_at_zero`: the Unix time at which the engine's clock read 0. `incarnation`: step numbers start again
        with a new one."""
        self.incarnation = incarnation
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
        self._last += 1
        self._steps.append(
            StepRecord(
                self._last, started, seconds, predicted, batch.num_decodes, batch.num_skipped, batch.limit, chunks
            )
        )

    def after(self, seen: Mapping[str, int], owner: str | None) -> dict[str, Any]:
        """Return, as JSON, the first steps after the last one that the reader has seen; without one, the newest steps.

        An owner sees the steps that computed chunks of its own, with these chunks alone. Figures that count the work of
        others are left out: sizes and predictions of steps. Microseconds take the place of step numbers.

        Args:
            seen: number of the last step seen, by incarnation.
            owner: who reads; None: one who may see all requests.
        """
        name = self.incarnation
        steps = list(self._steps)
        number_of = _number
        if owner is not None:
            # Another name: numbers seen with a key that may see all are not compared with microseconds.
            name = hashlib.blake2b(f"{name} {owner}".encode(), digest_size=16).hexdigest()
            steps = [step for step in steps if any(timeline.owner == owner for timeline, _ in step.chunks)]
            number_of = _microseconds
        last = seen.get(name, 0)
        steps = [step for step in steps if number_of(step) > last]
        steps = steps[:SHOWN] if last else steps[-SHOWN:]
        return {
            "incarnation": name,
            "last_step": number_of(steps[-1]) if steps else last,
            "steps": [self._shown(step, number_of(step), owner) for step in steps],
        }

    def _shown(self, step: StepRecord, number: int, owner: str | None) -> dict[str, Any]:
        sees_all = owner is None
        return {
            "number": number,
            "started": round(self._unix_at_zero + step.started, 4),
            "seconds": round(step.seconds, 6),
            "predicted_s": round(step.predicted, 6) if sees_all else None,
            "num_decodes": step.num_decodes if sees_all else None,
            "num_skipped": step.num_skipped if sees_all else None,
            "limit": step.limit if sees_all else None,
            "chunks": [
                {
                    "prompt": timeline.number if sees_all else zlib.crc32(timeline.id.encode()) % 10_000,
                    "request_id": timeline.request_id,
                    "slo_class": timeline.slo.name,
                    "start": chunk.start,
                    "num_tokens": chunk.num_tokens,
                    "num_prompt_tokens": timeline.num_prompt_tokens,
                    "reason": chunk.reason,
                }
                for timeline, chunk in step.chunks
                if sees_all or timeline.owner == owner
            ],
        }


def _number(step: StepRecord) -> int:
    return step.number


def _microseconds(step: StepRecord) -> int:
    """Return the begin of the step in microseconds: steps take longer, so these numbers are distinct and in order."""
    return int(step.started * 1e6)
