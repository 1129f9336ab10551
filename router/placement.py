"""Which replica serves a request: the one that is predicted to be done with its backlog soonest."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from crossdock.workers.profile import SchedulingProfile


@dataclass(slots=True)
class Bookings:
    """The work this ingress has given a replica and that it has not finished, in tokens."""

    prompt_tokens: dict[str, int] = field(default_factory=dict)  # by request, until its first token
    streams: set[str] = field(default_factory=set)  # requests that decode

    def book(self, request_id: str, num_prompt_tokens: int) -> None:
        self.prompt_tokens[request_id] = num_prompt_tokens

    def first_token(self, request_id: str) -> None:
        if self.prompt_tokens.pop(request_id, None) is not None:
            self.streams.add(request_id)

    def settle(self, request_id: str) -> None:
        self.prompt_tokens.pop(request_id, None)
        self.streams.discard(request_id)


def choose(candidates: Mapping[str, tuple[SchedulingProfile, Bookings]], num_prompt_tokens: int) -> str:
    """The candidate with the least predicted time to first token; ties go to the smallest id."""

    def seconds(replica_id: str) -> float:
        profile, bookings = candidates[replica_id]
        tokens = num_prompt_tokens + sum(bookings.prompt_tokens.values())
        return profile.cost.prefill_seconds(0, tokens, profile.max_num_batched_tokens) + profile.cost.decode_seconds(
            len(bookings.streams), 0
        )

    return min(sorted(candidates), key=seconds)
