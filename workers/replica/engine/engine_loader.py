"""Loads the engine of a replica, on one rank or on several."""

from collections.abc import Callable
from pathlib import Path

import torch

from crossdock.workers.model.load import load_model
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.text_encoder import TextEncoder, load_text_encoder
from crossdock.workers.model.text_files import text_answer
from crossdock.workers.model.weights.checkpoint import resolve_tokenizer
from crossdock.workers.model.weights.fingerprint import fingerprint
from crossdock.workers.replica.config import ReplicaSpec
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.engine.text_engine import text_engine
from crossdock.workers.replica.ranks.device import device_of
from crossdock.workers.replica.ranks.step_deadline import StepDeadline
from crossdock.workers.replica.ranks.worker_group import WorkerGroup
from crossdock.workers.replica.text_settings import check_text_settings


def load_engine(
    spec: ReplicaSpec,
    loaded: Callable[[], None] = lambda: None,
    step_deadline: Callable[[], StepDeadline] | None = None,
) -> Engine:
    """Load the model of a replica of one rank, and return its engine, not calibrated yet.

    `loaded` is called when the weights are in memory. `step_deadline`: of steps on a GPU; None: none is kept.

    Raises:
        ValueError: the model or its settings cannot be served; the message names the field.
    """
    if spec.emulated is not None:
        raise ValueError("pools: emulated: only crossdock serve has emulated devices; leave it out")
    folder = spec.model.folder()
    if text_answer(folder) is not None:
        engine, _ = load_text_engine(spec)
        loaded()
        return engine
    torch.set_num_threads(spec.num_threads)  # Ray sets OMP_NUM_THREADS by its own accounting
    device = device_of(spec)
    kv_bytes = spec.engine.budget.known(device) or 0
    model = load_model(spec.model, device, kv_bytes=kv_bytes, loaded=loaded)
    tokenizer = resolve_tokenizer(spec.tokenizer, folder)
    weights = _kept_name(spec, model)
    return new_engine(
        model,
        spec.engine,
        tokenizer,
        weights=weights,
        step_deadline=step_deadline,
        fits_memory=spec.model.fits_memory,
    )


def load_text_engine(spec: ReplicaSpec) -> tuple[Engine, TextEncoder]:
    """Load the text encoder of a replica. Returns its engine, not calibrated yet, and the encoder.

    Raises:
        ValueError: the encoder or a setting cannot be served; the message names the field.
    """
    check_text_settings(spec)
    torch.set_num_threads(spec.num_threads)
    encoder = load_text_encoder(spec.model, device_of(spec))
    return text_engine(encoder, spec.engine), encoder


def engine_of_ranks(model: LoadedModel, worker_group: WorkerGroup, tokenizer: Path | None) -> Engine:
    """Return the engine of a replica of several ranks, not calibrated yet. `model`: the part of the driver.

    Raises:
        ValueError, RankFailed: as `load_engine`, of any rank.
    """
    spec = worker_group.spec
    weights = _kept_name(spec, model)
    return new_engine(
        model,
        spec.engine,
        tokenizer,
        worker_group=worker_group,
        weights=weights,
        fits_memory=spec.model.fits_memory,
    )


def _kept_name(spec: ReplicaSpec, model: LoadedModel) -> str:
    """Return the name of the weights for pages in files; empty: there are no files."""
    if not spec.engine.kv_cache_files:
        return ""
    return spec.name_of_kept_pages(model.checkpoint or fingerprint(spec.model.folder()))
