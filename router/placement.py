"""Which replicas serve a request: one, or one for its prompt and another for its tokens.

Replicas are compared in predicted seconds. Any can do all of a request; its role says what its pool is kept for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

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


Candidates: TypeAlias = Mapping[str, tuple[SchedulingProfile, Bookings]]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes. With a `prefill` replica, that one computes the prompt and ships its pages."""

    decode: str
    prefill: str | None = None
    reason: str = ""


def choose(candidates: Candidates, num_prompt_tokens: int, may_ship: bool = True) -> Placement:
    """The placement with the least predicted time to first token; ties go to the smallest id.

    Where there are pools for prompts and for tokens, a prompt of a page or more is shipped; it stays in one place
    where a pool has nobody up, where it is too short to be worth a message, and where `may_ship` is false: then the
    pools kept for tokens come first.
    """

    def seconds(replica_id: str, tokens: int = num_prompt_tokens) -> float:
        profile, bookings = candidates[replica_id]
        tokens += sum(bookings.prompt_tokens.values())
        return profile.cost.prefill_seconds(0, tokens, profile.max_num_batched_tokens) + profile.cost.decode_seconds(
            len(bookings.streams), 0
        )

    by_role: dict[str, list[str]] = {"prefill": [], "decode": [], "mixed": []}
    for replica_id in sorted(candidates):
        by_role[candidates[replica_id][0].role].append(replica_id)
    decoding = by_role["decode"] or by_role["mixed"]
    if by_role["prefill"] and decoding and may_ship:
        prefill = min(by_role["prefill"], key=seconds)
        if num_prompt_tokens >= candidates[prefill][0].page_size:
            return Placement(min(decoding, key=lambda it: seconds(it, 0)), prefill, "pools")
    for role in ("mixed", "decode", "prefill"):
        if by_role[role]:
            return Placement(min(by_role[role], key=seconds), None, f"{role} alone")
    raise ValueError("candidates must not be empty")
