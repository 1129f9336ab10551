"""Check a configuration against the files and the devices of this machine, before any replica starts."""

import json
import os
from pathlib import Path

from crossdock.cluster.config import ClusterConfig, PoolConfig
from crossdock.cluster.serve.checkpoint_check import check_checkpoint, describe_weights, require_same_model
from crossdock.cluster.serve.gpus import check_cores_suffice, check_gpus_suffice, check_memory_suffices, with_num_gpus
from crossdock.cluster.serve.model_check import check_model
from crossdock.workers.model.architecture import decoder_fields
from crossdock.workers.model.loaders.objects import bytes_of_weights
from crossdock.workers.model.memory.host_memory import free_on_host
from crossdock.workers.model.text_files import text_answer
from crossdock.workers.model.weights.scheme import Scheme
from crossdock.workers.model.weights.untrusted import read_config_file
from crossdock.workers.report.presets import HOW_FAR_OFF


def prepare(config: ClusterConfig, *, has_gpus: bool) -> list[str]:
    """Fetch or convert a model, and check its files. Return a line about each checkpoint.

    `has_gpus`: whether pools that leave `num_gpus` open run on GPUs.

    Raises:
        ValueError: a file is missing or cannot be served; the message names the file or the setting.
    """
    from crossdock.cluster.api.body.generation_defaults import GenerationDefaults
    from crossdock.cluster.api.body.pooler_config import EmbeddingDefaults

    path = config.model.folder(needs_weights=not config.is_emulated)
    is_tokenizer_beside = config.model.tokenizer is None
    scheme = check_checkpoint(path, needs_tokenizer=is_tokenizer_beside, quantization=config.engine.quantization)
    check_model(config, path, has_gpus=has_gpus)
    GenerationDefaults.read(path, config.model.generation_config, config.model.override_generation_config)
    EmbeddingDefaults.read(path, config.model.pooler_config)
    if config.model.tokenizer is not None or config.model.chat_template is not None:
        from crossdock.cluster.serve.tokenizer import load_tokenizer

        load_tokenizer(path, config.model)
    weights = "no weights: its devices are emulated" if config.is_emulated else describe_weights(path, scheme)
    lines = [f"Model: {path}: {weights}"]
    if replaced := config.model.hf_overrides:
        lines.append(f"In place of values of its config.json (hf_overrides): {json.dumps(replaced)}")
    for pool in config.pools:
        if (device := config.emulated_device(pool)) is not None and device.profile.is_estimate:
            lines.append(f"Pool {pool.name}: {pool.emulated}: {HOW_FAR_OFF}")
        folder = path
        if pool.checkpoint is not None:
            folder, own = _checkpoint_of(pool, path, config)
            lines.append(f"Pool {pool.name}: {folder}: {describe_weights(folder, own)}")
        if (speculative := (pool.engine or config.engine).speculative_config) is not None:
            kind = str(decoder_fields(read_config_file(folder)).get("model_type"))
            if why := speculative.why_no_drafts(kind):
                lines.append(f"Pool {pool.name}: speculative_config is left out: {why}")
            elif speculative.method == "mtp" and not config.is_emulated:
                from crossdock.workers.draft.mtp_weights import check_mtp

                try:
                    check_mtp(speculative.model, folder)
                except ValueError as error:
                    raise ValueError(f"pools: speculative_config of {pool.name!r}: {error}") from None
        lines += _of_ranks(pool, folder)
    return lines


def _of_ranks(pool: PoolConfig, folder: Path) -> list[str]:
    """Check that a pool's ranks can divide the model in `folder`. Return a line for each setting without effect.

    Raises:
        CannotCut: they cannot; the message gives the reason.
    """
    lines = []
    asked = "enable_expert_parallel" if pool.enable_expert_parallel else "enable_eplb"
    if pool.num_ranks > 1:
        from crossdock.workers.model.cut.position import RankPosition
        from crossdock.workers.model.weights.weights import check_division

        moving = pool.moving_experts
        copies = None if moving is None else moving.num_redundant_experts
        sizes = pool.tensor_parallel_size, pool.pipeline_parallel_size
        # Whole experts can be divided wherever slices can: a replica that chooses has one way at least.
        position = RankPosition(0, *sizes, pool.has_whole_experts is not False, copies)
        why = check_division(folder, position)
        if why and pool.has_whole_experts:
            lines.append(f"Pool {pool.name}: {asked} changes nothing: {why}")
    if (pool.enable_eplb or pool.eplb_config.num_redundant_experts) and pool.moving_experts is None:
        needed = "enable_eplb, and enable_expert_parallel true or null"
        lines.append(f"Pool {pool.name}: no expert moves or gets a copy: that needs {needed}")
    if pool.has_whole_experts and pool.tensor_parallel_size == 1:
        lines.append(f"Pool {pool.name}: {asked} changes nothing: one rank has all experts of a layer")
    return lines


def _checkpoint_of(pool: PoolConfig, path: Path, config: ClusterConfig) -> tuple[Path, Scheme]:
    """Return the directory of a pool's own weights, and how they are stored.

    Raises:
        ValueError: they are not of the model in `path`, or not read; the message names the pool.
    """

    quantization = (pool.engine or config.engine).quantization
    try:
        folder = config.replica_spec(pool).model.folder()
        scheme = check_checkpoint(folder, needs_tokenizer=False, quantization=quantization)
        require_same_model(path, folder)
    except ValueError as error:
        raise ValueError(f"pools: checkpoint of {pool.name!r}: {error}") from None
    return folder, scheme


def require_devices(config: ClusterConfig, num_gpus: float) -> None:
    """Check that this machine has the GPUs, and for several models the cores and the memory. Raises ValueError."""

    models = [with_num_gpus(each, num_gpus > 0) for each in config.each_model]
    if config.models:
        check_cores_suffice(models, os.cpu_count() or 1)
        check_memory_suffices(
            models,
            lambda model: bytes_of_weights(model.folder()),
            free_on_host(),
            lambda model: text_answer(model.folder()) is None,
        )
    check_gpus_suffice(models, num_gpus)
