"""Describe a request to a router: the properties that decide where the request goes."""

from collections.abc import Sequence

from msgspec import Struct

from crossdock.workers.schedule.request.page_hashes import PageHash
from crossdock.workers.schedule.request.slo import DEFAULT_CLASS

EXPECTED_OUTPUT_TOKENS = 128
"""Tokens that an output is assumed to have, unless the request allows fewer: `max_tokens` is a bound that few outputs
reach. Weighs a replica's speed of decoding against its TTFT, and sets when booked streams free their room. Commands in
placement.py: with 16, good requests fall from 97.1 to 96.7 % in loaded and from 95.4 to 95.1 % in knee."""


class Query(Struct, frozen=True):
    """The properties of a request that decide where the request goes.

    A struct, as a placement and a live profile are: frozen data that is made for each request, in an eighth of the time
    of a frozen dataclass (0.4 in place of 3.2 µs, Zen 3, 2026-11-30).
    """

    request_id: str
    num_tokens: int  # of its prompt, and of the output another replica has made so far
    page_hashes: Sequence[PageHash] = ()  # of its full pages that may be shared
    slo_class: str = DEFAULT_CLASS
    max_tokens: int = EXPECTED_OUTPUT_TOKENS  # of its output
    tenant: str = ""  # the tenant whose share it uses; empty: tenants are not told apart
    weight: float = 1.0  # of that tenant
    may_ship: bool = True  # whether one replica may compute the prompt for another
    may_refuse: bool = True  # False: its client named no class, or a replica has accepted the request
    is_prompt_alone: bool = False  # it has no output, so that prefill replicas compute all of it
    # Weight version that made the output so far; only replicas with this version may continue. Empty: any.
    weights: str = ""
    adapter: str = ""  # fingerprint of the adapter that it needs; empty: none
    adapter_weights: int = 0  # numbers in the adapter's matrices
    items: Sequence[tuple[int, int, int]] = ()  # (end, rows, parts: 1 for a picture) of each unlike item, in order

    @property
    def expected_output(self) -> int:
        """Tokens that it is expected to make, which need room beside its prompt."""
        return min(self.max_tokens, EXPECTED_OUTPUT_TOKENS)
