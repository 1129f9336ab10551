"""Choose how ranks divide experts where the configuration leaves this open, once for all ranks of a replica."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from crossdock.workers.model.architecture import text_config
from crossdock.workers.model.context_length import longest_request
from crossdock.workers.model.cut.position import CannotCut, RankPosition
from crossdock.workers.model.load import dtype_of
from crossdock.workers.model.memory.memory_fit import size_of
from crossdock.workers.model.weights.checkpoint import resolve_model
from crossdock.workers.model.weights.formats import format_of
from crossdock.workers.model.weights.packed_layers import count_numbers, panel_bytes
from crossdock.workers.model.weights.scheme import scheme_of
from crossdock.workers.model.weights.weights import part_bytes, part_on_meta, read_config
from crossdock.workers.replica.config import Device, ReplicaSpec
from crossdock.workers.replica.ranks.cpu_rates import measure_rates
from crossdock.workers.replica.ranks.device import device_of
from crossdock.workers.replica.step_sizes import sized_for
from crossdock.workers.report.expert_division import (
    ExpertSizes,
    ProductRates,
    StepSeconds,
    division_seconds,
    is_whole_faster,
)
from crossdock.workers.report.model_figures import CHOSEN_EXPERTS
from crossdock.workers.report.presets import product_rates

logger = logging.getLogger("ray.serve")


def with_experts_divided(spec: ReplicaSpec) -> tuple[ReplicaSpec, list[str]]:
    """Return the spec with a division of experts, and a line about each division; no line: there was no choice.

    For the driver's process, before any rank loads. On a CPU it measures products for 0.1 s.

    Raises:
        ValueError: the model's files cannot be read.
    """
    if spec.enable_expert_parallel is not None:
        return spec, []
    if spec.tensor_parallel_size == 1:
        return _chosen(spec, False, [])
    device = device_of(spec)
    config = read_config(resolve_model(spec.model.path))
    if not _experts_of_a_token(config):
        return _chosen(spec, False, [])
    try:
        whole = division_of(spec, config, device, is_whole=True)
    except CannotCut:  # other layers cannot be divided either: the load says why
        return _chosen(spec, False, [])
    if whole.why_sliced:
        return _chosen(spec, False, [])
    try:
        slices = division_of(spec, config, device, is_whole=False)
    except CannotCut as error:
        return _chosen(spec, True, [f"slices: not possible: {error}", f"whole: {whole}: chosen"])
    rates = _rates(spec, config, device)
    if rates is None:
        why = f"chosen, as there is no data sheet of {torch.cuda.get_device_name()} from which to predict seconds"
        return _chosen(spec, False, [f"slices: {slices}: {why}", f"whole: {whole}"])
    engine = sized_for(spec.engine, torch.device(device), longest_request(config, spec.model.max_model_len))
    steps = engine.max_num_seqs, engine.max_num_batched_tokens
    sliced_s, whole_s = division_seconds(sizes_of(config, whole), rates, spec.tensor_parallel_size, *steps)
    is_whole = is_whole_faster(sliced_s, whole_s, spec.role)
    lines = [
        f"slices: {slices}; {_described(sliced_s, *steps)}{': chosen' * (not is_whole)}",
        f"whole: {whole}; {_described(whole_s, *steps)}{': chosen' * is_whole}",
    ]
    return _chosen(spec, is_whole, lines)


class Division(NamedTuple):
    """Holds what the last rank of each stage has, the one with most experts. Modules are on the meta device."""

    device: Device
    modules: Sequence[Any]  # of each stage
    experts: Sequence[Any]  # modules of whole experts, in all stages
    num_own: int  # experts in each of these
    num_experts: int  # of the model in a layer
    why_sliced: str  # although whole experts were asked for

    def bytes_of(self, module: nn.Module) -> int:
        """Return the bytes of a module's weights."""
        return part_bytes(module) + (panel_bytes(module) if self.device == "cpu" else 0)

    def __str__(self) -> str:
        return f"{size_of(max(map(self.bytes_of, self.modules)))} a rank"


def division_of(spec: ReplicaSpec, config: Any, device: Device, *, is_whole: bool) -> Division:
    """Return the division of a model among the ranks of `spec`. CannotCut: there is none."""
    scheme = format_of(spec.model.quantization, scheme_of(config.to_dict())).scheme
    dtype = dtype_of(spec.model, config, device)
    modules: list[Any] = []
    experts: dict[int, Any] = {}
    num_own = num_experts = 0
    why_sliced = ""
    for stage in range(spec.pipeline_parallel_size):
        rank = (stage + 1) * spec.tensor_parallel_size - 1
        position = RankPosition(rank, spec.tensor_parallel_size, spec.pipeline_parallel_size, is_whole)
        module, part = part_on_meta(config, position, dtype, scheme)
        modules.append(module)
        why_sliced = why_sliced or part.why_experts_are_sliced
        held = dict(module.named_modules())
        for name, own in part.experts.items():
            owner = held.get(name.rpartition(".")[0])  # None: of another stage
            if owner is not None and name in part.slices:
                experts[id(owner)] = owner
                num_own = len(own)
                num_experts = part.slices[name].ranges[0].whole
    return Division(device, modules, list(experts.values()), num_own, num_experts, why_sliced)


def sizes_of(config: Any, whole: Division) -> ExpertSizes:
    """Return the sizes of a model of which a rank has whole experts."""
    decoder = text_config(config)
    numbers = sum(map(count_numbers, whole.experts))
    num_bytes = sum(map(whole.bytes_of, whole.experts))
    held = len(whole.experts) * whole.num_own
    embedding = whole.modules[0].get_input_embeddings()
    head = whole.modules[-1].get_output_embeddings()
    num_rows = count_numbers(embedding)
    num_logits = count_numbers(head)
    is_one = getattr(head, "weight", None) is embedding.weight  # packed heads have none
    is_counted_once = any(module.all_tied_weights_keys for module in whole.modules)  # by `part_bytes`
    return ExpertSizes(
        layers=len(whole.experts),
        count=whole.num_experts,
        chosen=_experts_of_a_token(config),
        inner=next(getattr(whole.experts[0], name) for name in _INNER if hasattr(whole.experts[0], name)),
        numbers=numbers / held,
        num_bytes=num_bytes / held,
        row_bytes=decoder.hidden_size * embedding.weight.itemsize,
        rest_numbers=sum(map(count_numbers, whole.modules)) - numbers - num_rows - (0 if is_one else num_logits),
        rest_bytes=sum(map(whole.bytes_of, whole.modules))
        - num_bytes
        - whole.bytes_of(embedding)
        + (whole.bytes_of(head) if is_counted_once else 0),
        head_numbers=num_logits,
    )


def _experts_of_a_token(config: Any) -> int:
    """Return how many experts of a layer a token is sent to; 0: there are none."""
    decoder = text_config(config)
    return next((found for name in CHOSEN_EXPERTS if (found := getattr(decoder, name, None))), 0)


_INNER = ("intermediate_dim", "intermediate_size")
"""Names that transformers' modules of experts give to the number of their inner features."""


def _rates(spec: ReplicaSpec, config: Any, device: Device) -> ProductRates | None:
    """Return how fast a rank computes products; None: on a GPU without a data sheet."""
    if device == "cpu":
        return measure_rates(dtype_of(spec.model, config, device), spec.num_threads)
    return product_rates(torch.cuda.get_device_name())


def _described(seconds: StepSeconds, num_streams: int, num_tokens: int) -> str:
    one, streams, chunk = (f"{1000 * each:.3g} ms" for each in seconds)
    return f"predicted {one} for 1 stream, {streams} for {num_streams}, {chunk} for a chunk of {num_tokens:,} tokens"


def _chosen(spec: ReplicaSpec, is_whole: bool, lines: list[str]) -> tuple[ReplicaSpec, list[str]]:
    for line in lines:
        logger.info("experts as %s", line)
    return replace(spec, enable_expert_parallel=is_whole), lines
