"""Tensor parallelism: apply a transformers model's own plan, which names a style for each module, to one rank.

Attention is cut by whole heads, everything else evenly. A module that the plan does not name is replicated.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from crossdock.workers.model.cut.collectives import Collectives
from crossdock.workers.model.cut.heads import HeadRanges, even_range
from crossdock.workers.model.cut.part import ModelPart, TensorSlice
from crossdock.workers.model.cut.position import CannotCut


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
        plan: dict[str, str] = dict(self.model.tp_plan)
        if self.config.model_type in _LIKE:
            decoder = next(name for name, module in modules.items() if module is self.model.get_decoder())
            like = CONFIG_MAPPING[_LIKE[self.config.model_type]]
            plan |= {f"{decoder}.{name}": style for name, style in like.base_model_tp_plan.items()}
        for tied in self.model.all_tied_weights_keys.items():  # one matrix: what divides one use divides the other
            head, embedding = (name.removesuffix(".weight") for name in tied)
            if head in plan and isinstance(modules.get(embedding), nn.Embedding):
                plan.setdefault(embedding, "embedding_rowwise")
        for name in (name for name, module in modules.items() if hasattr(module, "expand_kv")):
            for linear in _OF_LATENTS:
                plan.setdefault(_pattern(f"{name}.{linear}"), _OF_LATENTS[linear])
        for name, module in modules.items():
            style = plan.get(_pattern(name))
            if style is None:
                continue
            if style not in _STYLES:
                raise CannotCut(f"{self.config.model_type}: its tensor-parallel plan has the unknown style {style!r}")
            parent = modules[name.rpartition(".")[0]]
            heads = self._heads(parent) if _is_attention(parent) and style in ("colwise", "rowwise") else None
            _STYLES[style](self, name, module, heads)
        for name, parameter in list(self.model.named_parameters()):
            style = plan.get(_pattern(name))
            if style in _OF_PARAMETERS:
                dim, packed = parameter.dim() + _OF_PARAMETERS[style][0], _OF_PARAMETERS[style][1]
                self._shrink(name, dim, parameter.shape[dim] // packed, packed=packed)
            elif style is not None:
                raise CannotCut(f"{self.config.model_type}: its tensor-parallel plan divides {name} by {style!r}")

    def colwise(self, name: str, module: Any, heads: HeadRanges | None) -> None:
        """Divide the outputs of a linear layer."""
        range_ = heads.features(name, module.out_features) if heads else None
        self._shrink(f"{name}.weight", 0, module.out_features, range_)
        if module.bias is not None:
            self._shrink(f"{name}.bias", 0, module.out_features, range_)
        module.out_features = module.weight.shape[0]

    def colwise_gather_output(self, name: str, module: Any, _: HeadRanges | None) -> None:
        """Divide the outputs of a linear layer, and gather them on every rank."""
        size, num_ranks = module.out_features, self.part.position.tensor_size
        self.colwise(name, module, None)
        sizes = [stop - start for start, stop in (even_range(size, num_ranks, rank) for rank in range(num_ranks))]
        collectives = self.collectives
        module.register_forward_hook(lambda _module, _args, out: _connected(collectives).gather(out, sizes))

    def rowwise(self, name: str, module: Any, heads: HeadRanges | None) -> None:
        """Divide a linear layer whose inputs are divided already: the ranks' outputs are summed."""
        range_ = heads.features(name, module.in_features) if heads else None
        self._shrink(f"{name}.weight", 1, module.in_features, range_)
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
        self._shrink(f"{name}.weight", 0, module.num_embeddings)
        if module.padding_idx is not None:  # some models zero its row again after loading
            module.padding_idx = module.padding_idx - start if start <= module.padding_idx < stop else None
        collectives, look_up = self.collectives, module.forward

        def forward(token_ids: Tensor) -> Tensor:
            is_here = (token_ids >= start) & (token_ids < stop)
            embedded = look_up(torch.where(is_here, token_ids - start, 0))
            return _connected(collectives).all_reduce(embedded * is_here[..., None])

        module.forward = forward

    def experts(self, _name: str, module: Any, _: HeadRanges | None) -> None:
        """Divide the inner features of every expert."""
        for name in ("intermediate_dim", "intermediate_size"):
            if hasattr(module, name):
                start, stop = self._even_range(getattr(module, name))
                setattr(module, name, stop - start)
        self._reduce_output(module)

    def identity_expert(self, _name: str, module: Any, _: HeadRanges | None) -> None:
        """Let one rank alone add the outputs of an expert without weights: all ranks' outputs are summed."""
        if self.part.position.tensor_rank:
            module.register_forward_hook(lambda _module, _args, out: torch.zeros_like(out))

    def replicate(self, _name: str, _module: Any, _: HeadRanges | None) -> None:
        """Leave the module whole: its input is, or it works on single heads."""

    def _heads(self, attention: Any) -> HeadRanges:
        """Return this rank's heads of one attention layer, and write them to the module and to the part."""
        num_heads = self.config.num_attention_heads
        num_kv_heads = num_heads  # of fused projections, and of latents expanded to every head
        if getattr(attention, "k_proj", None) is not None:
            known = self.part.heads.get(attention.layer_idx)  # cut already: its k_proj is smaller than it was
            num_kv_heads = known[2] if known else attention.k_proj.out_features // attention.head_dim
        heads = HeadRanges.of_rank(num_heads, num_kv_heads, self.part.position)
        if attention.layer_idx not in self.part.heads:
            self.part.heads[attention.layer_idx] = (*heads.kv, num_kv_heads)
            num_local, num_local_kv = heads.query[1] - heads.query[0], heads.kv[1] - heads.kv[0]
            attention.num_key_value_groups = num_local // num_local_kv
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

    def _shrink(self, name: str, dim: int, whole: int, range_: tuple[int, int] | None = None, packed: int = 1) -> None:
        """Replace a parameter by this rank's slice."""
        start, stop = range_ or self._even_range(whole)
        kept = self.part.slices[name] = TensorSlice(dim, start, stop, whole, packed)
        path, _, attribute = name.rpartition(".")
        module = self.model.get_submodule(path)
        old = getattr(module, attribute)
        new = torch.empty(kept.shape_of(old.shape), dtype=old.dtype, device="meta")
        setattr(module, attribute, nn.Parameter(new, requires_grad=False))


_STYLES: dict[str, Callable[[TensorPlan, str, Any, HeadRanges | None], None]] = {
    "colwise": TensorPlan.colwise,
    "colwise_gather_output": TensorPlan.colwise_gather_output,
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

_LIKE = {"qwen3_vl_text": "qwen3"}
"""Decoders without a plan of their own, and those with the same modules whose plan they follow."""

_OF_LATENTS = {"q_proj": "colwise", "q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"}
"""What divides the heads of latent attention, which the plans of some models replicate."""


def _is_attention(module: Any) -> bool:
    return hasattr(module, "layer_idx") and hasattr(module, "scaling")


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _connected(collectives: Collectives | None) -> Collectives:
    assert collectives is not None, "this part was made to be measured, not to be run"
    return collectives
