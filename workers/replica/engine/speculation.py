"""Drafts for the next step: tokens that grammars dictate, then the drafter's tokens as far as grammars allow them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from crossdock.workers.draft.drafter import Drafter
from crossdock.workers.replica.engine.step_sampler import StepSampler
from crossdock.workers.schedule.drafts.drafting import DraftPolicy
from crossdock.workers.schedule.drafts.speculative_config import SpeculativeConfig
from crossdock.workers.schedule.request.request import Request


@dataclass(slots=True)
class Speculation:
    """Asks the grammars and one drafter for streams: the policy's `DraftSource`.

    The drafter knows every request of the engine.
    """

    config: SpeculativeConfig
    drafter: Drafter
    sampler: StepSampler
    policy: DraftPolicy = field(init=False)
    _forced: Mapping[str, Sequence[int]] = field(default_factory=dict)  # tokens at the newest step, by request

    def __post_init__(self) -> None:
        self.policy = DraftPolicy(self.config, self)

    def add(self, request: Request) -> None:
        """Draft for a request from now on."""
        self.drafter.add(request.id, request.token_ids)

    def remove(self, request_id: str) -> None:
        """Forget a request."""
        self.drafter.remove(request_id)

    def seconds(self, num_streams: int, num_tokens: int) -> float:
        """Return the predicted seconds to draft for `num_streams`, the longest draft having `num_tokens`."""
        return self.drafter.seconds(num_streams, num_tokens)

    def forced(self, request_ids: Sequence[str]) -> Mapping[str, int]:
        """Return how many tokens the grammar of each request dictates next; requests without any are left out."""
        self._forced = self.sampler.forced(request_ids)
        return {request_id: len(tokens) for request_id, tokens in self._forced.items()}

    def match_length(self, request_id: str) -> int:
        """Return how many of the request's last tokens support its drafts after forced ones."""
        return self.drafter.match_length(request_id, self._forced.get(request_id, ()))

    def drafts(self, wanted: Mapping[str, int]) -> dict[str, Sequence[int]]:
        """Return at most so many drafts for each request, with those that its grammar dictates."""
        if not wanted:
            return {}
        drafts: dict[str, Sequence[int]] = {}
        further = dict[str, int]()
        for request_id, most in wanted.items():
            forced = self._forced.get(request_id, ())
            if forced:
                drafts[request_id] = forced[:most]
            if most > len(forced):
                further[request_id] = most - len(forced)
        for request_id, tokens in self.drafter.propose(further, self._forced).items():
            drafts[request_id] = self.sampler.vetted(request_id, [*drafts.get(request_id, ()), *tokens])
        return drafts
