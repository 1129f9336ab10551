"""Drafts for the next step: which streams want some, what the drafter finds, and what grammars leave of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from crossdock.workers.draft.drafter import Drafter
from crossdock.workers.replica.step_sampler import StepSampler
from crossdock.workers.schedule.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Speculation:
    """Asks one drafter for the streams of one scheduler. The drafter knows every request of the engine."""

    drafter: Drafter
    scheduler: Scheduler
    sampler: StepSampler

    def drafts(self, now: float) -> dict[str, Sequence[int]]:
        """Return the drafts for the step that begins at `now`, by request."""
        wanted = self.scheduler.wanted_drafts(now)
        if not wanted:
            return {}
        found = self.drafter.propose(wanted)
        return {request_id: self.sampler.vetted(request_id, tokens) for request_id, tokens in found.items()}
