"""Seconds of steps and of kernels for replicas of tests: nothing is measured as they start.

A measurement takes some CPU seconds of each replica's start, and depends on what else the machine does. Replicas learn
from steps that run, here too. tests/workers/replica/engine and tests/kernels/cpu measure.

Replicas of tests take themselves for faster than they are. Thus each is given requests, and learns. If they took
themselves for slower, the first one that serves would learn how fast it is, and be given all requests from then on.
"""

import json
from typing import Any, TypeAlias

from crossdock.kernels.cpu import remembered_seconds
from crossdock.workers.replica.engine import calibrate
from crossdock.workers.schedule.cost.cost import StepWork

_CHUNKS = (16, 64, 256)  # tokens
_CONTEXTS = (0, 256, 2048)  # tokens
_STREAMS = (1, 4, 16)
_BASE_S = 4e-3  # of a step

_Step: TypeAlias = tuple[StepWork, float]  # and its seconds


def give_known_seconds() -> None:
    """Have engines of this process take these seconds for measured ones."""
    calibrate.remembered_sweep = hopeful_sweep
    calibrate.remembered_factor = lambda *_: 2.0
    remembered_seconds._remembered = _kept


def hopeful_sweep(*_: Any) -> list[_Step]:
    """Return the steps of `known_sweep` on a core that no machine has: one with AMX takes a sixth for a token."""
    return [(work, _BASE_S / 2 + (seconds - _BASE_S) / 10) for work, seconds in known_sweep()]


def known_sweep(*_: Any) -> list[_Step]:
    """Return steps of a small model on one slow core."""
    chunks = [StepWork.of([(start, tokens)]) for start in _CONTEXTS for tokens in _CHUNKS]
    decodes = [StepWork.of([], [context] * count) for context in _CONTEXTS for count in _STREAMS]
    return [(work, _seconds(work)) for work in chunks + decodes]


def _seconds(work: StepWork) -> float:
    return (
        _BASE_S
        + 2e-4 * work.prefill_tokens
        + 3e-4 * work.decodes
        + 2e-8 * work.attended
        + 1e-7 * (work.context + work.chunk_context)
    )


def _kept(key: str, *_: Any) -> remembered_seconds._Kept:
    """Return equal seconds for all kernels: the first of them is chosen."""
    asked = json.loads(key)
    seconds = {kernel: [1e-3] * len(asked["rows"]) for kernel in asked["kernels"]}
    return remembered_seconds._Kept(seconds=seconds, is_disturbed=False, measured_at=0.0)
