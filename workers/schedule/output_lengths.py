"""How long outputs become: what those that have ended and those that still run say about the rest of one.

An output that runs has not ended so far, which is all that is known of its length: a censored sample. Kaplan's and
Meier's product-limit estimator takes in both kinds. Where only ended outputs counted, the short ones, which end first,
would make all expected outputs short after a start.
"""

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

from crossdock.workers.schedule.request.request import Request

RECENT = 256
"""Outputs that count beside twice as many as run. The longest must end while those that were begun with it count."""

_Ended: TypeAlias = tuple[int, bool]
"""How many tokens an output had when it ended here, and whether it had all its tokens then."""

_Longer: TypeAlias = tuple[int, float, int]
"""The outputs that are longer than one length, and one that is longer than all: how many, their tokens, and how many
outputs that had all their tokens are shorter. One that runs or was cut counts as the mean of those that are longer."""


@dataclass(slots=True)
class OutputLengths:
    """The outputs that a replica has begun most recently, and how many tokens more one of them is expected to make.

    The newest that were begun count, whether they have ended or not. The newest that have ended would not do: streams
    that run now are longer than outputs are on average.
    """

    _begun: dict[str, _Ended | None] = field(default_factory=dict)  # by owner, in order; None: it runs
    _running: dict[str, Request] = field(default_factory=dict)  # of `_begun`, by owner
    _whole: list[int] = field(default_factory=list)  # lengths of those in `_begun` that had all tokens, shortest first
    _cut: list[int] = field(default_factory=list)  # likewise of those that ended before
    _is_known: bool = True  # whether those below follow from what is known now
    _sums: list[int] = field(default_factory=list)  # of the first lengths in `_whole`; empty: to be computed again
    _censored: list[int] = field(default_factory=list)  # lengths of outputs that run or were cut, shortest first
    _longer: list[_Longer] = field(default_factory=list)  # without any of `_censored`, from its last one on, and so on
    _longest: int = 0

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
                lengths = self._lengths_like(ended[1])
                del lengths[bisect_left(lengths, ended[0])]

    def end(self, request: Request, *, is_whole: bool) -> None:
        """Note that an output ends. `is_whole`: it has all its tokens; else it might have gone on."""
        if self._running.pop(request.owner, None) is not None:
            ended = request.num_output_tokens, is_whole
            self._begun[request.owner] = ended
            insort(self._lengths_like(ended[1]), request.num_output_tokens)

    def grow(self) -> None:
        """Note that outputs have got tokens since they were looked at."""
        self._is_known = False

    def expected_rest(self, num_tokens: int) -> float:
        """Return how many tokens more an output is expected to make that has `num_tokens`, the mean of such outputs."""
        if not self._is_known:
            self._look()
        if num_tokens >= self._longest:  # as long as none before: it is about half way
            return num_tokens
        count, tokens, num_left = self._longer[len(self._censored) - bisect_right(self._censored, num_tokens)]
        num_shorter = bisect_right(self._whole, num_tokens)
        tokens += self._sums[num_left] - self._sums[num_shorter]
        return tokens / (count + num_left - num_shorter) - num_tokens

    @property
    def mean(self) -> float:
        """Return the expected tokens of a new output; 0 before one has ended."""
        return self.expected_rest(0) if self._whole else 0.0

    def _lengths_like(self, is_whole: bool) -> list[int]:
        """Return the lengths of all outputs that have ended like one, to be changed."""
        self._is_known = False
        if is_whole:
            self._sums.clear()
        return self._whole if is_whole else self._cut

    def _look(self) -> None:
        """Sum up the outputs that are longer than each that runs or was cut, from the longest to the shortest."""
        self._is_known = True
        if not self._sums:
            self._sums.extend(accumulate(self._whole, initial=0))
        self._censored = sorted([*self._cut, *[request.num_output_tokens for request in self._running.values()]])
        self._longest = max([*self._whole[-1:], *self._censored[-1:]], default=0)
        count, tokens, num_left = 1, 2.0 * self._longest, len(self._whole)
        self._longer = [(count, tokens, num_left)]
        for length in reversed(self._censored):  # short: a replica may have hundreds
            num_shorter = bisect_left(self._whole, length)
            tokens += self._sums[num_left] - self._sums[num_shorter]
            count += num_left - num_shorter
            num_left = num_shorter
            tokens *= (count + 1) / count
            count += 1
            self._longer.append((count, tokens, num_left))
