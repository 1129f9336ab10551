"""One rank's part of a model: cut by the model's own tensor-parallel plan and by ranges of layers, and the collectives
that make the parts one model again.

A module is cut while it is on the meta device, so that no rank ever holds more than its share. Attention is cut by
whole heads, everything else evenly; what the plan does not name is replicated.
"""

import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from crossdock.kvtransfer.layout import head_range, layer_range


@dataclass(frozen=True, slots=True)
class RankPosition:
    """Where a rank stands in its gang. Ranks are numbered stage by stage, as in `kvtransfer.layout.shard_model`."""

    rank: int = 0
    tensor_size: int = 1  # ranks that share every layer
    num_stages: int = 1  # groups of layers, one after the other

    @property
    def size(self) -> int:
        return self.tensor_size * self.num_stages

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor_size

    @property
    def stage(self) -> int:
        return self.rank // self.tensor_size

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def driver(self) -> int:
        """The rank that schedules and samples: one that has the logits, so that they need not travel."""
        return (self.num_stages - 1) * self.tensor_size

    @property
    def is_driver(self) -> bool:
        return self.rank == self.driver

    def __str__(self) -> str:
        return f"rank {self.rank} (tensor {self.tensor_rank} of {self.tensor_size}, stage {self.stage} of " + (
            f"{self.num_stages})"
        )


class Links:
    """A rank's connections to the others: all-reduce and gather within its stage, activations between stages.

    A rank that does not take part within `deadline_s` fails the call on every other one.
    """

    def __init__(self, place: RankPosition, deadline_s: float, backend: str = "gloo") -> None:
        """In an initialised torch.distributed world, by gloo, of just this gang; all its ranks must come here."""
        self.place = place
        timeout = timedelta(seconds=deadline_s)
        stages = [
            range(place.size)[stage * place.tensor_size :][: place.tensor_size] for stage in range(place.num_stages)
        ]
        groups = [dist.new_group(list(ranks), timeout, backend) for ranks in stages]
        self._stage = groups[place.stage]
        self._gang = dist.new_group(timeout=timeout, backend=backend)
        self._sending: tuple[Any, Tensor] | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks of this stage, in place where `x` is contiguous."""
        x = x.contiguous()
        dist.all_reduce(x, group=self._stage)
        return x

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """[..., sizes[r]] of each rank r of this stage, side by side."""
        widest = max(sizes)
        padded = nn.functional.pad(x, (0, widest - x.shape[-1])).contiguous()  # gloo gathers equal shapes only
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self._stage)
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)

    def send(self, hidden: Tensor) -> None:
        """To the same tensor rank of the next stage. Waits for the transfer before, not for this one: the next batch
        may begin meanwhile."""
        self._finish_sending()
        hidden = hidden.contiguous()
        to = self.place.rank + self.place.tensor_size
        self._sending = dist.isend(hidden, to, group=self._gang), hidden

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """What the same tensor rank of the stage before has sent."""
        hidden = torch.empty(*shape, dtype=dtype, device=device)
        dist.recv(hidden, self.place.rank - self.place.tensor_size, group=self._gang)
        return hidden

    def wait_for_all(self) -> None:
        """Returns when every rank has come here: within the world's own, longer deadline."""
        dist.all_reduce(torch.zeros(1))

    def ranks_on_this_host(self) -> int:
        """How many ranks share this host's memory, this one among them."""
        name = socket.gethostname()
        names: list[Any] = [None] * self.place.size
        dist.all_gather_object(names, name)
        return names.count(name)

    def _finish_sending(self) -> None:
        if self._sending is not None:
            self._sending[0].wait()
            self._sending = None


@dataclass(frozen=True, slots=True)
class Cut:
    """`[start, stop)` of `whole` indices along `dim`; where the tensor is `packed` of such parts, of each of them."""

    dim: int
    start: int
    stop: int
    whole: int
    packed: int = 1

    def read(self, source: Any, num_dims: int) -> Tensor:
        """This part of `source`: a tensor, or a safetensors slice, which is read no further. `num_dims`: of the
        parameter. Of a packed or stacked one, checkpoints may hold the single parts."""
        shape = source.get_shape() if hasattr(source, "get_shape") else list(source.shape)
        dim = self.dim - (num_dims - len(shape))
        before = (slice(None),) * dim
        parts = [
            source[(*before, slice(first + self.start, first + self.stop))]
            for first in range(0, shape[dim], self.whole)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def shape_of(self, whole: Sequence[int]) -> list[int]:
        shape = list(whole)
        shape[self.dim] = (self.stop - self.start) * self.packed
        return shape


@dataclass(slots=True)
class Part:
    """What `cut` left of a module."""

    place: RankPosition
    cuts: dict[str, Cut] = field(default_factory=dict)  # by parameter
    heads: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """By layer whose attention is cut: its KV heads `[start, stop)` of how many."""
    first_layer: int = 0
    num_layers: int = 0
    stage: "Stage | None" = None  # of several


class CannotCut(ValueError):
    """The model cannot be divided so; the message says why, and what could be asked for."""


def cut(model: Any, place: RankPosition, links: Links | None) -> Part:
    """Leaves of a transformers causal LM on the meta device what the rank at `place` holds. `links` may be None where
    it is only to be measured.

    Raises:
        CannotCut: fewer heads than ranks, fewer layers than stages, or state that layers share across stages.
    """
    config = model.config.get_text_config(decoder=True)
    part = Part(place, num_layers=config.num_hidden_layers)
    if place.tensor_size > 1:
        _Cutter(model, config, part, links).cut()
    if place.num_stages > 1:
        part.stage = Stage(model, config, part, links)
    held = model.state_dict()
    part.cuts = {name: where for name, where in part.cuts.items() if name in held}  # others are other stages'
    return part


# -- tensor parallelism ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Cutter:
    model: Any
    config: Any
    part: Part
    links: Links | None

    def cut(self) -> None:
        modules = dict(self.model.named_modules())
        plan: dict[str, str] = dict(self.model.tp_plan)
        for tied in self.model.all_tied_weights_keys.items():  # one matrix: what divides one use divides the other
            head, embedding = (name.removesuffix(".weight") for name in tied)
            if head in plan and isinstance(modules.get(embedding), nn.Embedding):
                plan.setdefault(embedding, "embedding_rowwise")
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
            if style == "packed_colwise":
                self._shrink(name, parameter.dim() - 2, parameter.shape[-2] // 2, packed=2)
            elif style == "rowwise":
                self._shrink(name, parameter.dim() - 1, parameter.shape[-1])

    def colwise(self, name: str, module: Any, heads: "_Heads | None") -> None:
        """A linear whose outputs are divided."""
        range_ = heads.of(name, module.out_features) if heads else None
        self._shrink(f"{name}.weight", 0, module.out_features, range_)
        if module.bias is not None:
            self._shrink(f"{name}.bias", 0, module.out_features, range_)
        module.out_features = module.weight.shape[0]

    def colwise_gather_output(self, name: str, module: Any, _: "_Heads | None") -> None:
        """Likewise, and every rank needs all of them."""
        size, ranks = module.out_features, self.part.place.tensor_size
        self.colwise(name, module, None)
        sizes = [stop - start for start, stop in (_even(size, ranks, rank) for rank in range(ranks))]
        links = self.links
        module.register_forward_hook(lambda _module, _args, out: _linked(links).gather(out, sizes))

    def rowwise(self, name: str, module: Any, heads: "_Heads | None") -> None:
        """A linear whose inputs are divided already: the ranks' outputs add up."""
        range_ = heads.of(name, module.in_features) if heads else None
        self._shrink(f"{name}.weight", 1, module.in_features, range_)
        module.in_features = module.weight.shape[1]
        if module.bias is not None and self.part.place.tensor_rank:
            module.bias = None  # once is enough
        self._reduce_output(module)

    def rowwise_split_input(self, name: str, module: Any, _: "_Heads | None") -> None:
        """A linear of which each rank takes a share of inputs that all have."""
        start, stop = self._even(module.in_features)
        self.rowwise(name, module, None)
        module.register_forward_pre_hook(lambda _module, args: (args[0][..., start:stop], *args[1:]))

    def embedding_rowwise(self, name: str, module: Any, _: "_Heads | None") -> None:
        """A vocabulary of which each rank has a range: it looks up what it has, and zeros for the rest."""
        start, stop = self._even(module.num_embeddings)
        self._shrink(f"{name}.weight", 0, module.num_embeddings)
        links, lookup = self.links, module.forward

        def forward(token_ids: Tensor) -> Tensor:
            is_here = (token_ids >= start) & (token_ids < stop)
            found = lookup(torch.where(is_here, token_ids - start, 0))
            return _linked(links).all_reduce(found * is_here[..., None])

        module.forward = forward

    def experts(self, _name: str, module: Any, _: "_Heads | None") -> None:
        """Experts of which each rank has a share of the inner features of every one."""
        for name in ("intermediate_dim", "intermediate_size"):
            if hasattr(module, name):
                start, stop = self._even(getattr(module, name))
                setattr(module, name, stop - start)
        self._reduce_output(module)

    def nothing(self, _name: str, _module: Any, _: "_Heads | None") -> None:
        """Replicated: its input is, or it works on single heads."""

    def _heads(self, attention: Any) -> "_Heads":
        place = self.part.place
        num_heads = self.config.num_attention_heads
        num_kv_heads = num_heads  # of fused projections, and of latent ones, which expand to every head
        if getattr(attention, "k_proj", None) is not None:
            held = self.part.heads.get(attention.layer_idx)  # cut already: its k_proj has less than it had
            num_kv_heads = held[2] if held else attention.k_proj.out_features // attention.head_dim
        heads = _Heads.of_rank(num_heads, num_kv_heads, place)
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
        links = self.links
        module.register_forward_hook(lambda _module, _args, out: _linked(links).all_reduce(out))

    def _even(self, size: int) -> tuple[int, int]:
        return _even(size, self.part.place.tensor_size, self.part.place.tensor_rank)

    def _shrink(self, name: str, dim: int, whole: int, range_: tuple[int, int] | None = None, packed: int = 1) -> None:
        """Replaces a parameter by what this rank has of it."""
        start, stop = range_ or self._even(whole)
        where = self.part.cuts[name] = Cut(dim, start, stop, whole, packed)
        path, _, attribute = name.rpartition(".")
        module = self.model.get_submodule(path)
        old = getattr(module, attribute)
        new = torch.empty(where.shape_of(old.shape), dtype=old.dtype, device="meta")
        setattr(module, attribute, nn.Parameter(new, requires_grad=False))


_STYLES: dict[str, Callable[[_Cutter, str, Any, "_Heads | None"], None]] = {
    "colwise": _Cutter.colwise,
    "colwise_gather_output": _Cutter.colwise_gather_output,
    "rowwise": _Cutter.rowwise,
    "rowwise_split_input": _Cutter.rowwise_split_input,
    "embedding_rowwise": _Cutter.embedding_rowwise,
    "moe_tp_experts": _Cutter.experts,
    "replicated_with_grad_allreduce": _Cutter.nothing,
    "mla_kv_a_proj": _Cutter.nothing,
}


@dataclass(frozen=True, slots=True)
class _Heads:
    """Which heads of an attention a rank has."""

    query: tuple[int, int]
    kv: tuple[int, int]
    num_heads: int
    num_kv_heads: int

    @classmethod
    def of_rank(cls, num_heads: int, num_kv_heads: int, place: RankPosition) -> "_Heads":
        """Whole groups of query heads go with their KV head. Ranks that hold the same KV head divide its group."""
        ranges = [head_range(num_kv_heads, place.tensor_size, rank) for rank in range(place.tensor_size)]
        kv = ranges[place.tensor_rank]
        group = num_heads // num_kv_heads
        sharing = [rank for rank, held in enumerate(ranges) if held == kv]
        if len(sharing) > group:
            raise CannotCut(
                f"{num_heads} query heads over {num_kv_heads} KV heads cannot be divided among {place.tensor_size} "
                f"ranks: {len(sharing)} of them would share the {group} query heads of one; tensor_parallel_size can "
                f"be at most {num_heads}"
            )
        if len(sharing) == 1:
            return cls((kv[0] * group, kv[1] * group), kv, num_heads, num_kv_heads)
        start, stop = _even(group, len(sharing), sharing.index(place.tensor_rank))
        return cls((kv[0] * group + start, kv[0] * group + stop), kv, num_heads, num_kv_heads)

    def of(self, name: str, size: int) -> tuple[int, int]:
        """This rank's range of the `size` rows or columns of the projection called `name`."""
        is_kv = name.endswith((".k_proj", ".v_proj"))
        (start, stop), count = (self.kv, self.num_kv_heads) if is_kv else (self.query, self.num_heads)
        if size % count:
            raise CannotCut(f"{name}: its {size} features are not of {count} heads")
        return start * (size // count), stop * (size // count)


def _is_attention(module: Any) -> bool:
    return hasattr(module, "layer_idx") and hasattr(module, "scaling")


def _even(size: int, num_ranks: int, rank: int) -> tuple[int, int]:
    return size * rank // num_ranks, size * (rank + 1) // num_ranks


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _linked(links: Links | None) -> Links:
    assert links is not None, "this part was made to be measured, not to be run"
    return links


# -- pipeline parallelism --------------------------------------------------------------------------------------------

_Answer = TypeVar("_Answer")


class _StageDone(Exception):
    """Leaves the model's forward after this stage's last layer: what follows, by whatever name, is another's."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _Skipped(nn.Module):
    """Stands where a layer of another stage stood: models look layers up by their position."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # Models choose a layer's mask by such attributes.
        self.__dict__.update({name: value for name, value in vars(layer).items() if isinstance(value, str)})

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


class Stage:
    """A range of a model's layers, entered with what the stage before has computed and left for the next.

    The model's own forward runs on every stage. Before the stage's first layer its input is replaced by what was
    received, so whatever the model does to embeddings happens once, on the first stage.
    """

    def __init__(self, model: Any, config: Any, part: Part, links: Links | None) -> None:
        place, num_layers = part.place, config.num_hidden_layers
        if place.num_stages > num_layers:
            raise CannotCut(f"{num_layers} layers cannot be divided among {place.num_stages} stages")
        if getattr(config, "num_kv_shared_layers", 0):
            raise CannotCut(f"{config.model_type}: layers share keys and values, which stages cannot")
        self._links = links
        self._place = place
        self._entering: Tensor | None = None
        self._hidden_size: int = config.hidden_size
        self.needs_token_ids = place.is_first_stage or bool(getattr(config, "hidden_size_per_layer_input", 0))
        layers = _decoder_layers(model, num_layers)
        first, last = layer_range(num_layers, place.num_stages, place.stage)
        part.first_layer, part.num_layers = first, last - first
        for number in (*range(first), *range(last, num_layers)):
            layers[number] = _Skipped(layers[number])
        if not place.is_first_stage:
            layers[first].register_forward_pre_hook(self._enter, with_kwargs=True)
        if not place.is_last_stage:
            layers[last - 1].register_forward_hook(self._leave)
        self._drop_the_ends(model)

    def _drop_the_ends(self, model: Any) -> None:
        """The embedding is the first stage's and the head the last one's; tied, each has a copy of the one matrix."""
        is_tied = bool(model.all_tied_weights_keys)
        dropped = []
        if not self._place.is_last_stage:
            dropped.append(model.get_output_embeddings())
        if not self.needs_token_ids and not (is_tied and self._place.is_last_stage):
            dropped.append(model.get_input_embeddings())
        for name, module in list(model.named_modules()):
            if any(module is it for it in dropped):
                path, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(path), attribute, nn.Identity())
                for target, source in list(model.all_tied_weights_keys.items()):
                    if name in (target.rpartition(".")[0], source.rpartition(".")[0]):
                        del model.all_tied_weights_keys[target]

    def run(self, forward: Callable[[Tensor | None], _Answer], num_tokens: int, like: Tensor) -> _Answer | None:
        """Calls `forward` with the stage before's hidden states, [1, T, E], or None on the first. None where the next
        stage goes on. `like`: has their dtype and device."""
        links = _linked(self._links)
        if not self._place.is_first_stage:
            self._entering = links.receive((1, num_tokens, self._hidden_size), like.dtype, like.device)
        try:
            return forward(self._entering)
        except _StageDone as done:
            links.send(done.hidden)
            return None

    def _enter(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._entering is not None
        if args:
            return (self._entering, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._entering}

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> None:
        raise _StageDone(output[0] if isinstance(output, tuple) else output)


def _decoder_layers(model: Any, num_layers: int) -> nn.ModuleList:
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise CannotCut(f"{model.config.model_type}: it has no list of {num_layers} layers")
