"""Choose how ranks divide experts where the configuration leaves this open, once for all ranks of a replica."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from crossdock.workers.model.architecture import text_config
from crossdock.workers.model.context_length import longest_request
from crossdock.workers.model.cut.part import ModelPart
from crossdock.workers.model.cut.position import CannotCut, RankPosition
from crossdock.workers.model.load import dtype_of
from crossdock.workers.model.memory.memory_fit import size_of
from crossdock.workers.model.weights.formats import format_of
from crossdock.workers.model.weights.packed_layers import count_numbers, packed_tensors, panel_bytes
from crossdock.workers.model.weights.scheme import scheme_of
from crossdock.workers.model.weights.weights import part_bytes, part_on_meta, read_config
from crossdock.workers.replica.config import Device, ReplicaSpec
from crossdock.workers.replica.ranks.device import device_of
from crossdock.workers.replica.ranks.expert_seconds import MEASURED_BYTES, MeasuredExperts, layer_seconds
from crossdock.workers.replica.step_sizes import sized_for
from crossdock.workers.report.expert_division import ExpertSizes, StepSeconds, division_seconds, is_whole_faster
from crossdock.workers.report.model_figures import CHOSEN_EXPERTS
from crossdock.workers.report.presets import product_rates

logger = logging.getLogger("ray.serve")


def with_experts_divided(spec: ReplicaSpec, rank: int, driver: int) -> tuple[ReplicaSpec, list[str]]:
    """Return the spec with a division of experts, and a line about each division; no line: there was no choice.

    Before the rank loads. On CPUs experts are measured for some seconds. Collective: every rank must call it, in a
    torch.distributed world of theirs by gloo. All get what the driver chooses.

    Raises:
        ValueError: the model's files cannot be read.
    """
    if spec.enable_expert_parallel is not None:
        return spec, []
    if spec.tensor_parallel_size == 1:
        return replace(spec, enable_expert_parallel=False), []
    answer: list[Any] = list(_choose(spec, rank))
    dist.broadcast_object_list(answer, driver)
    is_whole, lines = answer
    if rank == driver:
        for line in lines:
            logger.info("experts as %s", line)
    return replace(spec, enable_expert_parallel=is_whole), lines


def _choose(spec: ReplicaSpec, rank: int) -> tuple[bool, list[str]]:
    """Return whether experts are whole, and a line about each division. Collective."""
    device = device_of(spec)
    config = read_config(spec.model.folder())
    if not _experts_of_a_token(config):
        return False, []
    whole = whole_experts(spec, config, rank, device)
    if whole.why_not:  # other layers cannot be divided either: the load says why; or the model keeps slices
        return False, []
    slices = sliced_experts(spec, config, rank, device, whole)
    if slices.why_not:
        return True, [f"slices: not possible: {slices.why_not}", f"whole: {whole}: chosen"]
    engine = sized_for(spec.engine, torch.device(device), longest_request(config, spec.model.max_model_len))
    rows = 1, engine.max_num_seqs, engine.max_num_batched_tokens
    sizes = sizes_of(spec, config, device, whole)
    if device == "cpu":
        found = measured_seconds(spec, (slices, whole), sizes, dtype_of(spec.model, config, device), rows)
        sliced_s, whole_s = (StepSeconds(*each) for each in found)
        how = "measured"
    elif (rates := product_rates(torch.cuda.get_device_name())) is not None:
        sliced_s, whole_s = division_seconds(sizes, rates, spec.tensor_parallel_size, rows)
        how = "predicted"
    else:
        why = f"chosen, as there is no data sheet of {torch.cuda.get_device_name()} from which to predict seconds"
        return False, [f"slices: {slices}: {why}", f"whole: {whole}"]
    is_whole = is_whole_faster(sliced_s, whole_s, spec.role)
    return is_whole, [
        f"slices: {slices}; {how} {_described(sliced_s, *rows[1:])}{': chosen' * (not is_whole)}",
        f"whole: {whole}; {how} {_described(whole_s, *rows[1:])}{': chosen' * is_whole}",
    ]


class _RankPart(NamedTuple):
    """Tells the other ranks what a rank would hold. `width` to `expert_bytes` are of its whole experts."""

    why_not: str = ""  # there is no such division; empty: there is
    num_bytes: int = 0  # of weights
    layers: int = 0  # of its stage, with experts that ranks divide
    width: int = 0  # features of a row
    inner: int = 0  # inner features of an expert
    num_experts: int = 0  # of a layer, on all ranks
    numbers: int = 0  # by which all its experts multiply a row
    expert_bytes: int = 0  # of all its experts


class Division(NamedTuple):
    """A division of a model among the ranks of a replica."""

    experts: Mapping[str, Any]  # modules of this rank's layers that have some, on the meta device, by name
    ranks: Sequence[_RankPart]

    @property
    def why_not(self) -> str:
        """Say why the ranks cannot divide the model so; empty: they can."""
        return next((each.why_not for each in self.ranks if each.why_not), "")

    def __str__(self) -> str:
        return f"{size_of(max(each.num_bytes for each in self.ranks))} a rank"


def whole_experts(spec: ReplicaSpec, config: Any, rank: int, device: Device) -> Division:
    """Return the division of a model in which each rank has whole experts. Collective."""
    try:
        module, part = _part_of(spec, config, rank, device, is_whole=True)
    except CannotCut as error:
        return _exchanged({}, _RankPart(f"{error}"))
    names = {name.rpartition(".")[0]: name for name in part.experts if name in part.slices}  # others: of other stages
    experts = {name: module.get_submodule(name) for name in names}
    own = _RankPart(part.why_experts_are_sliced, _bytes_of(module, device), len(experts))
    for each, name in zip(experts.values(), names.values(), strict=True):
        inner = next(getattr(each, attribute) for attribute in _INNER if hasattr(each, attribute))
        down = each.down_proj.numel() if isinstance(each.down_proj, Tensor) else count_numbers(each.down_proj)
        own = own._replace(
            width=down // (inner * len(part.experts[name])),
            inner=inner,
            num_experts=part.slices[name].ranges[0].whole,
            numbers=own.numbers + count_numbers(each),
            expert_bytes=own.expert_bytes + _bytes_of(each, device),
        )
    return _exchanged(experts, own)


def sliced_experts(spec: ReplicaSpec, config: Any, rank: int, device: Device, whole: Division) -> Division:
    """Return the division in which each rank has slices of the experts that `whole` names. Collective."""
    try:
        module, _ = _part_of(spec, config, rank, device, is_whole=False)
    except CannotCut as error:
        return _exchanged({}, _RankPart(f"{error}"))
    experts = {name: module.get_submodule(name) for name in whole.experts}
    return _exchanged(experts, _RankPart(num_bytes=_bytes_of(module, device)))


def _part_of(spec: ReplicaSpec, config: Any, rank: int, device: Device, *, is_whole: bool) -> tuple[Any, ModelPart]:
    """Return the part that a rank would hold, on the meta device. CannotCut: there is no such division."""
    scheme = format_of(spec.model.quantization, scheme_of(config.to_dict())).scheme
    position = RankPosition(rank, spec.tensor_parallel_size, spec.pipeline_parallel_size, is_whole)
    module, part = part_on_meta(config, position, dtype_of(spec.model, config, device), scheme)
    if packed_tensors(module):
        module.set_experts_implementation("eager")  # one at a time, as the load has it
    return module, part


def _exchanged(experts: Mapping[str, Any], own: _RankPart) -> Division:
    """Return the division of which this rank has `own`. Collective."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    return Division(experts, ranks)


def _bytes_of(module: nn.Module, device: Device) -> int:
    """Return the bytes of a module's weights on a device."""
    return part_bytes(module) + (panel_bytes(module) if device == "cpu" else 0)


def sizes_of(spec: ReplicaSpec, config: Any, device: Device, whole: Division) -> ExpertSizes:
    """Return the sizes of the experts of a model. `whole`: the division in which each is on one rank."""
    largest = max(whole.ranks, key=lambda each: each.numbers)
    layers = sum(each.layers for each in whole.ranks) // spec.tensor_parallel_size
    return ExpertSizes(
        layers=layers,
        count=largest.num_experts,
        chosen=_experts_of_a_token(config),
        inner=largest.inner,
        numbers=sum(each.numbers for each in whole.ranks) / (layers * largest.num_experts),
        num_bytes=sum(each.expert_bytes for each in whole.ranks) / (layers * largest.num_experts),
        row_bytes=largest.width * dtype_of(spec.model, config, device).itemsize,
    )


def _experts_of_a_token(config: Any) -> int:
    """Return how many experts of a layer a token is sent to; 0: there are none."""
    decoder = text_config(config)
    return next((found for name in CHOSEN_EXPERTS if (found := getattr(decoder, name, None))), 0)


_INNER = ("intermediate_dim", "intermediate_size")
"""Names that transformers' modules of experts give to the number of their inner features."""


def measured_seconds(
    spec: ReplicaSpec, divisions: Sequence[Division], sizes: ExpertSizes, dtype: torch.dtype, rows: Sequence[int]
) -> list[list[float]]:
    """Return the seconds of experts in each division, in steps of so many rows, as CPUs take them. Collective."""
    ways = [MeasuredExperts(_measured_layers(each), dtype, spec.model.cpu_kernels) for each in divisions]
    steps = [layer_seconds(ways, sizes, spec.tensor_parallel_size, each) for each in rows]
    return [[sizes.layers * seconds for seconds in way] for way in zip(*steps, strict=True)]


def _measured_layers(division: Division) -> list[Any]:
    """Return a rank's first layers with experts, which are enough to tell the seconds of all."""
    layers = list(division.experts.values())
    return layers[: -(-MEASURED_BYTES // max(_bytes_of(layers[0], "cpu"), 1))] if layers else []


def _described(seconds: StepSeconds, num_streams: int, num_tokens: int) -> str:
    one, streams, chunk = (f"{1000 * each:.3g} ms" for each in seconds)
    return f"{one} for 1 stream, {streams} for {num_streams}, {chunk} for a chunk of {num_tokens:,} tokens"
