"""How long outputs become: what those that have ended and those that still run say about the rest of one.

An output that runs has not ended so far, which is all that is known of its length: a censored sample. Kaplan's and
Meier's product-limit estimator takes in both kinds. Where only ended outputs counted, the short ones, which end first,
would make all expected outputs short after a start.
"""

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field
from typing import TypeAlias

from crossdock.workers.schedule.request.request import Request

RECENT = 256
"""Outputs that count beside twice as many as run. The longest must end while those that were begun with it count."""

_Ended: TypeAlias = tuple[int, bool]
"""How many tokens an output had when it ended here, and whether it had all its tokens then."""


@dataclass(slots=True)
class OutputLengths:
    """The outputs that a replica has begun most recently, and how many tokens more one of them is expected to make.

    The newest that were begun count, whether they have ended or not. The newest that have ended would not do: streams
    that run now are longer than outputs are on average.
    """

    _begun: dict[str, _Ended | None] = field(default_factory=dict)  # by owner, in order; None: it runs
    _running: dict[str, Request] = field(default_factory=dict)  # of `_begun`, by owner
    _ended: list[_Ended] = field(default_factory=list)  # of `_begun`, shortest first
    _is_known: bool = True  # whether the two below follow from what is known now
    _lengths: list[int] = field(default_factory=list)  # of outputs, shortest first
    _rests: list[float] = field(default_factory=list)  # tokens that an output of each length makes after these

    def begin(self, request: Request) -> None:
        """Note that an output begins, or goes on here."""
        if request.owner in self._begun or request.sampling.pooling is not None:
            return
        self._begun[request.owner] = None
        self._running[request.owner] = request
        while len(self._begun) > 2 * len(self._running) + RECENT:
            oldest = next(iter(self._begun))
            if (ended := self._begun.pop(oldest)) is None:
                del self._running[oldest]
            else:
                del self._ended[bisect_left(self._ended, ended)]

    def end(self, request: Request, *, is_whole: bool) -> None:
        """Note that an output ends. `is_whole`: it has all its tokens; else it might have gone on."""
        if self._running.pop(request.owner, None) is not None:
            ended = request.num_output_tokens, is_whole
            self._begun[request.owner] = ended
            insort(self._ended, ended)

    def grow(self) -> None:
        """Note that outputs have got tokens since they were looked at."""
        self._is_known = False

    def expected_rest(self, num_tokens: int) -> float:
        """Return how many tokens more an output is expected to make that has `num_tokens`, the mean of such outputs."""
        if not self._is_known:
            self._look()
        longer = bisect_right(self._lengths, num_tokens)
        if longer == len(self._lengths):  # as long as none before: it is about half way
            return num_tokens
        return self._lengths[longer] - num_tokens + self._rests[longer]

    @property
    def mean(self) -> float:
        """Return the expected tokens of a new output; 0 before one has ended."""
        has_end = any(is_whole for _, is_whole in self._ended)
        return self.expected_rest(0) if has_end else 0.0

    def _look(self) -> None:
        """Compute what outputs of each known length make after it, from the longest to the shortest."""
        self._is_known = True
        known = [*self._ended, *[(request.num_output_tokens, False) for request in self._running.values()]]
        known.sort()  # fast: most are in order
        rests = list[float]()
        longer = known[-1][0] if known else 0
        rest = float(longer)
        for num_others, (length, is_whole) in enumerate(reversed(known), start=1):
            rest += longer - length
            if is_whole:
                rest *= num_others / (num_others + 1)  # one more might be longer than all of them
            rests.append(rest)
            longer = length
        self._lengths = [length for length, _ in known]
        self._rests = rests[::-1]
