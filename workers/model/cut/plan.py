"""Tensor parallelism: apply a transformers model's own plan, which names a style for each module, to one rank.

Attention is cut by whole heads, everything else evenly. A module that the plan does not name is replicated.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from crossdock.workers.model.architecture import recurrent_layers
from crossdock.workers.model.cut.collectives import Collectives
from crossdock.workers.model.cut.expert_slots import ExpertSlots
from crossdock.workers.model.cut.mixers import MixerDivision, PackedPiece, division_of
from crossdock.workers.model.cut.own_plans import OF_LATENTS, own_plan
from crossdock.workers.model.cut.part import ModelPart, SliceRange, TensorSlice
from crossdock.workers.model.cut.position import CannotCut, HeadRanges, even_range
from crossdock.workers.model.cut.whole_experts import compute_in_slots, compute_own_experts, why_not_whole


@dataclass(slots=True)
class TensorPlan:
    """A model on the meta device, its tensor-parallel plan, and the part that is written while the plan is applied."""

    model: Any
    config: Any
    part: ModelPart
    collectives: Collectives | None  # None: the part is only measured

    def apply(self) -> None:
        """Shrink every parameter that the plan names, and hook the collectives into the modules.

        Raises:
            CannotCut: the plan has a style we do not know, or the heads cannot be divided.
        """
        modules = dict(self.model.named_modules())
        plan = self._plan(modules)
        for name in self._divide_mixers(modules):
            for below in modules:
                if below.startswith(f"{name}."):
                    plan[below] = ""  # goes before what the plan names by a pattern
        for name, module in modules.items():
            style = plan.get(name, plan.get(_pattern(name)))
            if not style:
                continue
            if style not in _STYLES:
                raise CannotCut(f"{self.config.model_type}: its tensor-parallel plan has the unknown style {style!r}")
            path = name.rpartition(".")[0]
            has_heads = _is_attention(modules[path]) and style in ("colwise", "rowwise")
            heads = self._heads(path, modules[path]) if has_heads else None
            _STYLES[style](self, name, module, heads)
        for name, parameter in list(self.model.named_parameters()):
            style = plan.get(_pattern(name))
            if name in self.part.experts:
                continue
            if style in _OF_PARAMETERS:
                dim = parameter.dim() + _OF_PARAMETERS[style][0]
                packed = _OF_PARAMETERS[style][1]
                self._shrink(name, dim, *[self._range(parameter.shape[dim] // packed)] * packed)
            elif style is not None:
                raise CannotCut(f"{self.config.model_type}: its tensor-parallel plan divides {name} by {style!r}")
        if self.part.position.has_whole_experts and not self.part.experts:
            self.part.why_experts_are_sliced = (
                self.part.why_experts_are_sliced or "the model has no experts that ranks divide"
            )

    def _plan(self, modules: Mapping[str, Any]) -> dict[str, str]:
        """Return the style of each module or parameter that is divided, by its name or its pattern."""
        plan: dict[str, str] = dict(self.model.tp_plan)
        decoder = next(name for name, module in modules.items() if module is self.model.get_decoder())
        plan |= {f"{decoder}.{name}": style for name, style in own_plan(self.config.model_type).items()}
        output = self.model.get_output_embeddings()
        for name in (name for name, module in modules.items() if module is output):
            plan.setdefault(name, "colwise_gather_output")  # transformers' plan of Nemotron-H leaves it whole
        for tied in self.model.all_tied_weights_keys.items():  # one matrix: what divides one use divides the other
            head, embedding = (name.removesuffix(".weight") for name in tied)
            if head in plan and isinstance(modules.get(embedding), nn.Embedding):
                plan.setdefault(embedding, "embedding_rowwise")
        for name in (name for name, module in modules.items() if hasattr(module, "expand_kv")):
            for linear, style in OF_LATENTS.items():
                if _pattern(f"{name}.{linear}") not in plan:  # recurrent layers may have linears of that pattern
                    plan[f"{name}.{linear}"] = style
        return plan

    def _divide_mixers(self, modules: Mapping[str, Any]) -> list[str]:
        """Divide the mixers of recurrent layers that can be divided, and return their names."""
        divided = []
        num_ranks = self.part.position.tensor_size
        recurrent = recurrent_layers(self.config)
        for name, mixer in modules.items():
            if getattr(mixer, "layer_idx", None) not in recurrent or (division := division_of(mixer)) is None:
                continue
            if division.num_units < num_ranks:
                self.part.why_states_are_whole = (
                    f"{division.num_units} {division.units} of {type(mixer).__name__} cannot be divided among "
                    f"{num_ranks} ranks"
                )
                continue
            self._divide_mixer(name, mixer, division)
            divided.append(name)
        return divided

    def _divide_mixer(self, name: str, mixer: Any, division: MixerDivision) -> None:
        units = division.num_units
        start, stop = self._even_range(units)

        def range_of(piece: PackedPiece) -> SliceRange:
            begin, end = (start, stop) if piece.is_divided else (0, units)
            return SliceRange(piece.size * begin // units, piece.size * end // units, piece.size)

        if division.multipliers:
            _narrow_multipliers(mixer, division.multipliers, [range_of(piece) for piece in division.tensors["in_proj"]])
        for below, parameter in list(mixer.named_parameters()):
            pieces = division.tensors.get(below.removesuffix(".weight").removesuffix(".bias"))
            if pieces is not None:
                dim = list(parameter.shape).index(sum(piece.size for piece in pieces))
                self._shrink(f"{name}.{below}", dim, *map(range_of, pieces))
        output = getattr(mixer, division.output)
        num_features = output.in_features
        self._rowwise(f"{name}.{division.output}", output, range_of(PackedPiece(num_features)))
        for count in division.counts:
            path, _, attribute = count.rpartition(".")
            owner = mixer.get_submodule(path)
            if hasattr(owner, attribute):
                setattr(owner, attribute, getattr(owner, attribute) * (stop - start) // units)
        convolution = getattr(mixer, division.convolution)
        convolution.in_channels = convolution.out_channels = convolution.groups = convolution.weight.shape[0]
        if hasattr(mixer, "conv_dim"):
            mixer.conv_dim = convolution.weight.shape[0]
        if division.norm:
            _sum_squares_of_ranks(getattr(mixer, division.norm), num_features, self.collectives)

    def colwise(self, name: str, module: Any, heads: HeadRanges | None) -> None:
        """Divide the outputs of a linear layer."""
        size = module.out_features
        range_ = self._range(size, heads.features(name, size) if heads else None)
        self._shrink(f"{name}.weight", 0, range_)
        if module.bias is not None:
            self._shrink(f"{name}.bias", 0, range_)
        module.out_features = module.weight.shape[0]

    def packed_colwise(self, name: str, module: Any, _: HeadRanges | None) -> None:
        """Divide both halves of the outputs of a linear layer."""
        self._shrink(f"{name}.weight", 0, *[self._range(module.out_features // 2)] * 2)
        module.out_features = module.weight.shape[0]

    def colwise_gather_output(self, name: str, module: Any, _: HeadRanges | None) -> None:
        """Divide the outputs of a linear layer, and gather them: logits on the driver, others on every rank."""
        size = module.out_features
        num_ranks = self.part.position.tensor_size
        self.colwise(name, module, None)
        sizes = [stop - start for start, stop in (even_range(size, num_ranks, rank) for rank in range(num_ranks))]
        collectives = self.collectives
        is_head = module is self.model.get_output_embeddings()

        def gather(_module: Any, _args: Any, out: Tensor) -> Tensor:
            links = _connected(collectives)
            return links.gather_logits(out, sizes) if is_head else links.gather(out, sizes)

        module.register_forward_hook(gather)

    def rowwise(self, name: str, module: Any, heads: HeadRanges | None) -> None:
        """Divide a linear layer whose inputs are divided already: the ranks' outputs are summed."""
        size = module.in_features
        self._rowwise(name, module, self._range(size, heads.features(name, size) if heads else None))

    def _rowwise(self, name: str, module: Any, range_: SliceRange) -> None:
        self._shrink(f"{name}.weight", 1, range_)
        module.in_features = module.weight.shape[1]
        if module.bias is not None and self.part.position.tensor_rank:
            module.bias = None  # else the sum would hold the bias once per rank
        self._reduce_output(module)

    def rowwise_split_input(self, name: str, module: Any, _: HeadRanges | None) -> None:
        """Divide a linear layer whose whole input every rank has: each rank takes its range."""
        start, stop = self._even_range(module.in_features)
        self.rowwise(name, module, None)
        module.register_forward_pre_hook(lambda _module, args: (args[0][..., start:stop], *args[1:]))

    def embedding_rowwise(self, name: str, module: Any, _: HeadRanges | None) -> None:
        """Divide a vocabulary: each rank looks up the token ids in its range, gives zeros for the rest, and sums."""
        start, stop = self._even_range(module.num_embeddings)
        self._shrink(f"{name}.weight", 0, self._range(module.num_embeddings))
        if module.padding_idx is not None:  # some models zero its row again after loading
            module.padding_idx = module.padding_idx - start if start <= module.padding_idx < stop else None
        collectives = self.collectives
        look_up = module.forward

        def forward(token_ids: Tensor) -> Tensor:
            is_here = (token_ids >= start) & (token_ids < stop)
            embedded = look_up(torch.where(is_here, token_ids - start, 0))
            return _connected(collectives).all_reduce(embedded * is_here[..., None])

        module.forward = forward

    def experts(self, name: str, module: Any, _: HeadRanges | None) -> None:
        """Divide the inner features of every expert, or the experts where whole ones are asked for."""
        if self.part.position.has_whole_experts:
            why_not = why_not_whole(module, self.part.position.tensor_size)
            if not why_not:
                self._whole_experts(name, module)
                return
            self.part.why_experts_are_sliced = why_not
        for name in ("intermediate_dim", "intermediate_size"):
            if hasattr(module, name):
                start, stop = self._even_range(getattr(module, name))
                setattr(module, name, stop - start)
        if self.part.position.tensor_rank and hasattr(module, "down_proj_bias"):
            _zero_at_first_run(module, "down_proj_bias")  # else the sum would hold the bias once per rank
        self._reduce_output(module)

    def _whole_experts(self, name: str, module: Any) -> None:
        range_ = self._range(module.num_experts)
        for below, _ in list(module.named_parameters()):
            self._shrink(f"{name}.{below}", 0, range_)
            self.part.experts[f"{name}.{below}"] = range(range_.start, range_.stop)
        if self.part.position.num_redundant_experts is None:
            compute_own_experts(module, range_.start, range_.stop)
        else:
            slots = ExpertSlots(name, module.num_experts, self.part.position)
            compute_in_slots(module, slots.num_slots, slots.slots_of)
            self.part.slots.append(slots)
        self._reduce_output(module)

    def identity_expert(self, _name: str, module: Any, _: HeadRanges | None) -> None:
        """Let one rank alone add the outputs of an expert without weights: all ranks' outputs are summed."""
        if self.part.position.tensor_rank:
            module.register_forward_hook(lambda _module, _args, out: torch.zeros_like(out))

    def replicate(self, _name: str, _module: Any, _: HeadRanges | None) -> None:
        """Leave the module whole: its input is whole, or the module works on single heads."""

    def _heads(self, name: str, attention: Any) -> HeadRanges:
        """Return this rank's heads of one attention layer, and write them to the module and to the part."""
        num_heads = self.config.num_attention_heads
        num_kv_heads = num_heads  # of fused projections, and of latents expanded to every head
        if getattr(attention, "k_proj", None) is not None:
            known = self.part.heads.get(attention.layer_idx)  # cut already: its k_proj is smaller than it was
            num_kv_heads = known[2] if known else attention.k_proj.out_features // attention.head_dim
        heads = HeadRanges.of_rank(num_heads, num_kv_heads, self.part.position)
        if attention.layer_idx not in self.part.heads:
            self.part.heads[attention.layer_idx] = (*heads.kv, num_kv_heads)
            num_local = heads.query[1] - heads.query[0]
            num_local_kv = heads.kv[1] - heads.kv[0]
            attention.num_key_value_groups = num_local // num_local_kv
            if isinstance(getattr(attention, "sinks", None), nn.Parameter):
                self._shrink(f"{name}.sinks", 0, SliceRange(*heads.query, num_heads))
            for name, value in (
                ("num_heads", num_local),
                ("num_attention_heads", num_local),
                ("num_key_value_heads", num_local_kv),
            ):
                if hasattr(attention, name):
                    setattr(attention, name, value)
        return heads

    def _reduce_output(self, module: Any) -> None:
        collectives = self.collectives
        module.register_forward_hook(lambda _module, _args, out: _connected(collectives).all_reduce(out))

    def _even_range(self, size: int) -> tuple[int, int]:
        return even_range(size, self.part.position.tensor_size, self.part.position.tensor_rank)

    def _range(self, whole: int, range_: tuple[int, int] | None = None) -> SliceRange:
        return SliceRange(*(range_ or self._even_range(whole)), whole)

    def _shrink(self, name: str, dim: int, *ranges: SliceRange) -> None:
        """Replace a parameter by this rank's slice."""
        kept = self.part.slices[name] = TensorSlice(dim, ranges)
        path, _, attribute = name.rpartition(".")
        module = self.model.get_submodule(path)
        old = getattr(module, attribute)
        new = torch.empty(kept.shape_of(old.shape), dtype=old.dtype, device="meta")
        setattr(module, attribute, nn.Parameter(new, requires_grad=False))


_STYLES: dict[str, Callable[[TensorPlan, str, Any, HeadRanges | None], None]] = {
    "colwise": TensorPlan.colwise,
    "colwise_gather_output": TensorPlan.colwise_gather_output,
    "packed_colwise": TensorPlan.packed_colwise,
    "rowwise": TensorPlan.rowwise,
    "rowwise_split_input": TensorPlan.rowwise_split_input,
    "embedding_rowwise": TensorPlan.embedding_rowwise,
    "moe_tp_experts": TensorPlan.experts,
    "moe_identity_expert": TensorPlan.identity_expert,
    "replicated_with_grad_allreduce": TensorPlan.replicate,
    "mla_kv_a_proj": TensorPlan.replicate,
}

_OF_PARAMETERS = {"packed_colwise": (-2, 2), "colwise": (-2, 1), "packed_rowwise": (-1, 2), "rowwise": (-1, 1)}
"""Which dimension of a parameter of its own, as experts have, is divided, and how many tensors lie along it."""


def _zero_at_first_run(module: Any, name: str) -> None:
    """Fill a parameter with zeros at the first run of `module`, after the load has filled it."""

    def zero(_module: nn.Module, _args: object) -> None:
        getattr(module, name).data.zero_()
        handle.remove()

    handle = module.register_forward_pre_hook(zero)


def _narrow_multipliers(mixer: Any, name: str, ranges: Sequence[SliceRange]) -> None:
    """Take this rank's part of a buffer at the first run of `mixer`: during the load, transformers fills the whole."""

    def narrow(_module: nn.Module, _args: object) -> None:
        whole = getattr(mixer, name)
        if whole.shape[-1] == sum(each.whole for each in ranges):
            tensors = whole.split([each.whole for each in ranges], -1)
            parts = [tensor[..., each.start : each.stop] for tensor, each in zip(tensors, ranges, strict=True)]
            setattr(mixer, name, torch.cat(parts, -1))

    mixer.register_forward_pre_hook(narrow)


def _sum_squares_of_ranks(norm: Any, num_features: int, collectives: Collectives | None) -> None:
    """Let the gated norm of a Mamba-2 mixer take its mean square over the features of all ranks."""
    is_gate_last = getattr(norm, "norm_before_gate", False)  # of Falcon-H1

    def forward(hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        x = hidden_states.float()
        gates = 1.0 if gate is None else nn.functional.silu(gate.float())
        x = x if is_gate_last else x * gates
        mean = _connected(collectives).all_reduce(x.pow(2).sum(-1, keepdim=True)) / num_features
        normed: Tensor = norm.weight * (x * torch.rsqrt(mean + norm.variance_epsilon)).to(hidden_states.dtype)
        return (normed * gates).to(hidden_states.dtype) if is_gate_last else normed

    norm.forward = forward


def _is_attention(module: Any) -> bool:
    return hasattr(module, "layer_idx") and hasattr(module, "scaling")


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _connected(collectives: Collectives | None) -> Collectives:
    assert collectives is not None, "this part was made to be measured, not to be run"
    return collectives
