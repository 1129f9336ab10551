"""The measured seconds of kernels, and what a later measurement changes in them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from crossdock.kernels.cpu.choice import CLEAR, KernelChoice, choose, is_clearly_slower, slowdowns
from crossdock.kernels.options import Kernel

Table: TypeAlias = dict[Kernel, list[float]]
"""Seconds of each kernel, one number for each number of rows."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds, and whether other work on the machine disturbed their measurement: then they are measured again."""

    seconds: Table
    is_disturbed: bool


def joined(earlier: Measured, now: Measured, rows: Sequence[int], max_kernels: int = 2) -> Measured:
    """Return what to remember after all kernels have been measured again.

    A disturbed measurement replaces no undisturbed one, but has the next start measure again. Of two disturbed ones the
    least seconds count, since load only adds to them. An undisturbed one replaces a disturbed one. Of two undisturbed
    ones, the earlier stays if they choose unlike kernels that are nearly as fast by the seconds of now: such kernels do
    not replace each other from start to start.
    """
    if now.is_disturbed:
        if not earlier.is_disturbed:
            return replace(earlier, is_disturbed=True)
        least = {kernel: list(map(min, seconds, now.seconds[kernel])) for kernel, seconds in earlier.seconds.items()}
        return Measured(least, is_disturbed=True)
    choice = choose(earlier.seconds, rows, max_kernels)
    if earlier.is_disturbed or choice == choose(now.seconds, rows, max_kernels):
        return now
    return now if is_clearly_slower(choice, now.seconds, rows, max_kernels) else earlier


def fits(sample: Table, sampled: Sequence[int], earlier: Table, rows: Sequence[int], choice: KernelChoice) -> bool:
    """Return whether a `sample`, of the `sampled` rows, has the chosen kernels as close to the fastest as `earlier`.

    Ratios alone count. A machine that is slower altogether has the same choice.
    """
    before = dict(zip(rows, slowdowns(choice, earlier, rows), strict=True))
    now = slowdowns(choice, sample, sampled)
    return all(ratio <= CLEAR * before[count] for count, ratio in zip(sampled, now, strict=True))
