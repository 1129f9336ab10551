"""Run the cases of sections one after the other, each within the time that its section and the call have left."""

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gpu.device import Device
from gpu.rows import Figures, Rows
from gpu.sizes import Sizes

GRACE_S = 20.0
"""Seconds that a case may take beyond what its section has left: it is ended when it hangs, not when it is slow."""


class UnavailableError(Exception):
    """Something that the case needs is not on this machine; the message names it."""


class DeviceLostError(Exception):
    """The device reports errors of an earlier kernel: this process can measure nothing more."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Everything that sections measure with."""

    device: Device
    sizes: Sizes
    rows: Rows

    @property
    def bandwidth(self) -> float:
        """Return the bytes per second of a copy, read and written; NaN before they are measured."""
        return 1e12 * float(self.rows.figures("ceilings", "copy").get("tb_per_s", "nan"))

    @property
    def peak(self) -> float:
        """Return the FLOP per second of a large product in bfloat16; NaN before they are measured."""
        return 1e12 * float(self.rows.figures("ceilings", "product").get("tflop_per_s", "nan"))


@dataclass(frozen=True, slots=True)
class Case:
    """One row: a name, and the function that measures its figures."""

    name: str
    measure: Callable[[], Figures]


@dataclass(frozen=True, slots=True)
class Section:
    """Cases that share a time budget, in the order of their worth. `cases` prepares nothing before a case needs it."""

    name: str
    seconds: float
    cases: Callable[[Bench], Iterator[Case]]


class Once:
    """A value that is made when the first case needs it. A failure is not repeated: it is raised again."""

    def __init__(self, make: Callable[[], object]) -> None:
        self._make, self._value, self._error = make, None, None

    def __call__(self) -> object:
        if self._error is not None:
            raise RuntimeError(f"not prepared: {self._error}")
        if self._value is None:
            try:
                self._value = self._make()
            except Exception as error:
                self._error = f"{type(error).__name__}: {error}"
                raise
        return self._value

    def free(self) -> None:
        """Drop the value; the next call makes another."""
        self._value = None


def work(sections: Sequence[Section], bench: Bench, deadline: float) -> None:
    """Measure every case that has no row yet. `deadline` is on the clock of `time.time`.

    Raises:
        DeviceLostError: the case that failed left the device unusable; a new process goes on after it.
    """
    for section in sections:
        print(f"{section.name}:", flush=True)
        for case in section.cases(bench):
            _run(section, case, bench, deadline)
        bench.device.collect()


def _run(section: Section, case: Case, bench: Bench, deadline: float) -> None:
    rows = bench.rows
    if rows.is_done(section.name, case.name):
        return
    left = min(section.seconds - rows.seconds_of(section.name), deadline - time.time())
    if left <= 0:
        rows.end(section.name, case.name, 0.0, skipped="no time was left")
        print(f"  {case.name}: no time was left", flush=True)
        return
    rows.begin(section.name, case.name, min(left + GRACE_S, max(deadline - time.time(), 0.0)))
    started = time.monotonic()
    result: Figures
    try:
        result = {"figures": case.measure()}
    except UnavailableError as error:
        result = {"skipped": str(error)}
    except Exception as error:  # the other cases are still measured
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"[:500]}
    seconds = time.monotonic() - started
    rows.end(section.name, case.name, seconds, **result)
    print(f"  {case.name} ({seconds:.1f} s): {shown(result)}", flush=True)
    if "error" in result:
        bench.device.collect()
        if not bench.device.works():
            raise DeviceLostError(case.name)


def shown(result: Figures) -> str:
    """Return the result of a case in one line."""
    figures = result.get("figures")
    if figures is None:
        return str(result.get("error") or result.get("skipped"))
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in figures.items()
    )
