"""Choose CPU kernels: of plain weights by a rule, of others by measured seconds. Pure: a table of seconds comes in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from crossdock.kernels.options import Kernel

PREFERENCE: tuple[Kernel, ...] = ("native", "int8", "amx", "onednn", "torch")
"""Which kernel is taken first of those that run. Rows of `native` never depend on the batch, on any machine."""

MARGIN = 1.1
"""A kernel this many times slower than the fastest counts as equal: so much other work on the machine may change."""


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
        """Return the kernels in use."""
        return (self.few,) if self.few == self.many else (self.few, self.many)

    def __str__(self) -> str:
        if self.few == self.many:
            return self.few
        return f"{self.few} below {self.many_from} rows, {self.many} from there"


def only(kernel: Kernel) -> KernelChoice:
    """Return the choice of one kernel for all rows."""
    return KernelChoice(kernel, kernel)


def of_plain_weights(kernels: Sequence[Kernel]) -> KernelChoice:
    """Return the choice between `kernels`, in the order of `PREFERENCE`, for plain weights: the first, for all rows.

    On each kind of CPU in benchmarks/records/cpu-kernels.md it is the fastest for each number of rows. A measurement
    as a server starts finds that on a quiet machine alone, and a second kernel takes a second copy of the weights.
    """
    return only(kernels[0])


def choose(seconds: Mapping[Kernel, Sequence[float]], rows: Sequence[int]) -> KernelChoice:
    """Return the choice with the fewest kernels that is within `MARGIN` of the fastest everywhere.

    If there is none, return the choice whose worst ratio to the fastest is the smallest. At most one kernel for few
    rows and one for many: so one disturbed measurement cannot make a choice that alternates.

    Args:
        seconds: of each kernel, one number for each of `rows`.
        rows: ascending.
    """
    kernels = [kernel for kernel in PREFERENCE if kernel in seconds]
    choices = [only(kernel) for kernel in kernels]
    choices += [KernelChoice(few, many, count) for few, many in permutations(kernels, 2) for count in rows[1:]]
    ratios = {choice: _slowdowns(choice, seconds, rows) for choice in choices}
    close = [choice for choice in choices if max(ratios[choice]) <= MARGIN]
    for choice in close:
        if choice.few == choice.many:
            return choice
    if close:
        return min(close, key=lambda choice: sum(ratios[choice]))
    return min(choices, key=lambda choice: max(ratios[choice]))


def _slowdowns(choice: KernelChoice, seconds: Mapping[Kernel, Sequence[float]], rows: Sequence[int]) -> list[float]:
    """Return how many times as long as the fastest kernel the chosen one takes, for each of `rows`."""
    fastest = [min(column) for column in zip(*seconds.values(), strict=True)]
    return [seconds[choice.at(count)][i] / fastest[i] for i, count in enumerate(rows)]
