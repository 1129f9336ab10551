"""Remember the seconds of steps on this CPU: a later start of the same model checks two steps and measures no others.

The files lie in the cache directory. Steps that are faster now were measured on a busy machine: all are scaled to what
the two take now, or measured again where they take less than half. Where steps are slower the machine is busy now: to
measure would take long and say little, and the engine learns from the steps of requests.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from statistics import geometric_mean
from typing import TypeAlias

import torch

from crossdock.kernels.cache import cache_dir, read_cached, write_cached
from crossdock.kernels.cpu.remembered_seconds import kernels_and_cpu
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.schedule.cost.cost import StepWork
from crossdock.workers.schedule.cost.cost_fit import StepCostFit

logger = logging.getLogger(__name__)

Sweep: TypeAlias = list[tuple[StepWork, float]]
"""Steps and their seconds."""

_LEAST_RATIO = 1 / 1.3  # of a step's seconds now to those predicted from the file: from there they are kept as they are
_LEAST_SCALED = 1 / 2  # … and from there scaled: below, the machine was too busy for the file to say what costs more


def remembered_sweep(
    engine: Engine, measure: Callable[[], Sweep], check: Callable[[], Sequence[tuple[StepWork, float]]]
) -> Sweep:
    """Return the sweep of an earlier start, scaled if a step of `check` is faster now, or that of `measure`.

    Only CPUs and replicas of one rank remember: elsewhere the sweep is short, or all ranks would have to agree.
    """
    if not _remembers(engine):
        return measure()
    path, key = _file("sweep", engine)
    if (sweep := _read(path, key)) is not None:
        cost = StepCostFit(sweep, most_context=engine.model.most_context).cost
        ratios = [seconds / max(cost.seconds(work), 1e-9) for work, seconds in check()]
        shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        least = min(ratios, default=1.0)
        if least >= _LEAST_RATIO:
            logger.info("steps are not measured again: two take %s times what they took at an earlier start", shown)
            return sweep
        if least >= _LEAST_SCALED:
            logger.info("steps are scaled, not measured: two take %s times what they took at an earlier start", shown)
            return _kept(path, key, [(work, seconds * geometric_mean(ratios)) for work, seconds in sweep])
        logger.info("steps are measured again: two of them take %s times what they took at an earlier start", shown)
    return _kept(path, key, measure())


def _kept(path: Path, key: str, sweep: Sweep) -> Sweep:
    with suppress(OSError):  # without a cache directory each start measures
        write_cached(path, key, sweep)
    return sweep


def remembered_factor(engine: Engine, measure: Callable[[], float]) -> float:
    """Return the factor that `measure` returned at an earlier start, or now. Where steps take longer, it stays."""
    if not _remembers(engine):
        return measure()
    path, key = _file("factor", engine)
    factor = read_cached(path, key)
    if not isinstance(factor, float):
        factor = measure()
        with suppress(OSError):
            write_cached(path, key, factor)
    return factor


def _remembers(engine: Engine) -> bool:
    return engine.model.device.type == "cpu" and engine.worker_group is None


def _file(name: str, engine: Engine) -> tuple[Path, str]:
    """Return the file of an engine's seconds, and the key under which they stand in it."""
    key = _key(engine)
    return cache_dir() / "steps" / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json", key


def _key(engine: Engine) -> str:
    """Return as text everything that the seconds of steps depend on."""
    model = engine.model
    return json.dumps(
        {
            **kernels_and_cpu(),
            "model": json.loads(model.config.to_json_string(use_diff=False)),
            "layers": [astuple(layer) for layer in model.layers],
            "dtypes": [str(model.dtype), str(model.kv_dtype)],
            "kernels": [model.attention.name, model.kernels],
            "engine": engine.config.model_dump(mode="json"),
            "sizes": [model.max_model_len, engine.pages.num_pages, torch.get_num_threads()],
            "sweep": Path(__file__).with_name("calibrate.py").read_text(),
        },
        sort_keys=True,
        default=str,
    )


def _read(path: Path, key: str) -> Sweep | None:
    """Return the sweep in a file; None: there is no file, or no whole sweep in it."""
    try:
        sweep = [(StepWork(*work), float(seconds)) for work, seconds in read_cached(path, key)]
    except (ValueError, TypeError):
        return None
    return sweep if sweep and all(seconds > 0 for _, seconds in sweep) else None
