"""Choose between CPU kernels by measured seconds. Pure: a table of seconds comes in, a choice by rows goes out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from crossdock.kernels.options import Kernel

PREFERENCE: tuple[Kernel, ...] = ("own", "onednn", "torch")
"""Which kernel is taken where several are as fast. Rows of `own` never depend on the batch, on any machine."""

MARGIN = 1.1
"""A kernel this many times slower than the fastest counts as equal.

A second kernel needs a second copy of the weights, so it must be faster than the first by more than this for some
number of rows.
"""

CLEAR = 1.3
"""So many times slower than before, or than another choice, is more than noise.

A kernel may be `MARGIN` slower by intent, and ratios of two measurements on an idle machine differ by up to a tenth.
More than both together shows a choice that was wrong, and equal kernels never replace each other from start to start.
"""


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """One kernel for few rows, one for many."""

    few: Kernel
    many: Kernel
    many_from: int = 1  # rows from which `many` runs

    def at(self, rows: int) -> Kernel:
        """Return the kernel for a number of rows."""
        return self.many if rows >= self.many_from else self.few

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Return the kernels in use: each needs the weights in its own format."""
        return (self.few,) if self.few == self.many else (self.few, self.many)

    def __str__(self) -> str:
        if self.few == self.many:
            return self.few
        return f"{self.few} below {self.many_from} rows, {self.many} from there"


def only(kernel: Kernel) -> KernelChoice:
    """Return the choice of one kernel for all rows."""
    return KernelChoice(kernel, kernel)


def choose(seconds: Mapping[Kernel, Sequence[float]], rows: Sequence[int], max_kernels: int = 2) -> KernelChoice:
    """Return the choice with the fewest kernels that is within `MARGIN` of the fastest everywhere.

    If there is none, return the choice whose worst ratio to the fastest is the smallest. At most one kernel for few
    rows and one for many: so one disturbed measurement cannot make a choice that alternates.

    Args:
        seconds: of each kernel, one number for each of `rows`.
        rows: ascending.
        max_kernels: 1 where there is no memory for two copies of the weights.
    """
    kernels = [kernel for kernel in PREFERENCE if kernel in seconds]
    choices = [only(kernel) for kernel in kernels]
    if max_kernels > 1:
        choices += [KernelChoice(few, many, count) for few, many in permutations(kernels, 2) for count in rows[1:]]
    ratios = {choice: slowdowns(choice, seconds, rows) for choice in choices}
    close = [choice for choice in choices if max(ratios[choice]) <= MARGIN]
    for choice in close:
        if choice.few == choice.many:
            return choice
    if close:
        return min(close, key=lambda choice: sum(ratios[choice]))
    return min(choices, key=lambda choice: max(ratios[choice]))


def is_clearly_slower(
    choice: KernelChoice, seconds: Mapping[Kernel, Sequence[float]], rows: Sequence[int], max_kernels: int = 2
) -> bool:
    """Return whether these seconds call for another choice, by more than noise: see `CLEAR`."""
    best = choose(seconds, rows, max_kernels)
    return max(slowdowns(choice, seconds, rows)) > CLEAR * max(slowdowns(best, seconds, rows))


def sampled_rows(choice: KernelChoice, rows: Sequence[int]) -> tuple[int, ...]:
    """Return the few of `rows` that show whether a choice still holds: the fewest, many, and one between.

    The most take longer than all others together, and show what the next fewer do. The one between is where the second
    kernel begins, or the middle if there is only one.
    """
    between = rows[len(rows) // 2] if choice.few == choice.many else choice.many_from
    return tuple(count for count in rows if count in (rows[0], between, rows[-2]))


def slowdowns(choice: KernelChoice, seconds: Mapping[Kernel, Sequence[float]], rows: Sequence[int]) -> list[float]:
    """Return how many times as long as the fastest kernel the chosen one takes, for each of `rows`."""
    fastest = [min(column) for column in zip(*seconds.values(), strict=True)]
    return [seconds[choice.at(count)][i] / fastest[i] for i, count in enumerate(rows)]
