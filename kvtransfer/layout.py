"""The memory layout of one rank's KV pool: `[page, kv_head, layer, k|v, token, head_dim]`. Integers only.

All layers of one head of one page are ONE contiguous byte range. So a page, or any head range of it for any
tensor-parallel ratio, moves as a single descriptor. A layer's kernel sees a strided view of the same tensor.

`PoolSpec` holds everything that another replica must know before it may write into a pool: the model, the shape of its
keys and values, and the layers and heads of each rank.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The KV cache of one layer per token: `num_kv_heads` keys of `key_dim` and values of `value_dim` elements."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class View:
    """A strided window on the pool, `[page, kv_head, token, head_dim]`; strides and offset in elements."""

    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    offset: int


@dataclass(frozen=True)
class PoolLayout:
    """The shape of a page.

    Layers may differ (Gemma 4: fewer, wider heads in full layers; MLA: K and V of different sizes). A head's row is as
    long as all layers together; a layer with fewer heads leaves its part of the other rows unused.
    """

    layers: Sequence[LayerShape]
    page_size: int  # tokens
    itemsize: int  # bytes of an element
    least_page_elements: int = 0  # other layers' pages have that many

    @cached_property
    def num_kv_heads(self) -> int:
        return max((layer.num_kv_heads for layer in self.layers), default=0)

    @cached_property
    def layer_offsets(self) -> tuple[int, ...]:
        """The element at which each layer begins within a head's row, and at the end the row's length."""
        offsets = [0]
        for layer in self.layers:
            offsets.append(offsets[-1] + self.page_size * (layer.key_dim + layer.value_dim))
        return tuple(offsets)

    @property
    def head_elements(self) -> int:
        return self.layer_offsets[-1]

    @property
    def page_elements(self) -> int:
        return max(self.num_kv_heads * self.head_elements, self.least_page_elements)

    @property
    def page_bytes(self) -> int:
        return self.page_elements * self.itemsize

    @property
    def token_bytes(self) -> int:
        return self.page_bytes // self.page_size

    def views(self, layer: int, num_pages: int) -> tuple[View, View]:
        """Return the windows of the keys and of the values of `layer`."""
        shape = self.layers[layer]
        key_offset = self.layer_offsets[layer]
        value_offset = key_offset + self.page_size * shape.key_dim

        def view(dim: int, offset: int) -> View:
            strides = (self.page_elements, self.head_elements, dim, 1)
            return View((num_pages, shape.num_kv_heads, self.page_size, dim), strides, offset)

        return view(shape.key_dim, key_offset), view(shape.value_dim, value_offset)


def group_layouts(shapes: Sequence[Sequence[LayerShape]], page_size: int, itemsize: int) -> tuple[PoolLayout, ...]:
    """Return the layout of a page for each group of layers: all have the same number of bytes."""
    largest = max(PoolLayout(layers, page_size, itemsize).page_elements for layers in shapes)
    return tuple(PoolLayout(layers, page_size, itemsize, largest) for layers in shapes)


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of the model that one rank holds: layers from `first_layer` on, and KV heads `[start, stop)` of each.

    There is a range per layer, because layers may have different numbers of heads. Ranks may hold the same head: with
    fewer heads than ranks, tensor parallelism replicates heads.
    """

    first_layer: int
    heads: tuple[tuple[int, int], ...]


def head_range(num_kv_heads: int, num_tensor_ranks: int, rank: int) -> tuple[int, int]:
    """Return the KV heads `[start, stop)` that tensor rank `rank` holds: at least one, which ranks share if heads are
    few."""
    start = rank * num_kv_heads // num_tensor_ranks
    return start, max(start + 1, (rank + 1) * num_kv_heads // num_tensor_ranks)


def layer_range(num_layers: int, num_pipeline_ranks: int, stage: int) -> tuple[int, int]:
    """Return the layers `[first, last)` that pipeline stage `stage` holds."""
    return stage * num_layers // num_pipeline_ranks, (stage + 1) * num_layers // num_pipeline_ranks


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Layers that share pages.

    With a window or an attention chunk, a page is freed once no later token sees its tokens.
    """

    window: int | None  # tokens
    layers: tuple[int, ...]  # numbers in the whole model, ascending
    attention_chunk: int | None = None  # tokens


@dataclass(frozen=True)
class PoolSpec:
    """The description of one rank's KV pool that another replica needs before the two may exchange pages."""

    model: str  # names the weights and everything else that changes keys and values; pages of two models never mix
    dtype: str  # "bfloat16"
    itemsize: int  # bytes of an element
    page_size: int  # tokens
    layers: tuple[LayerShape, ...]  # of the whole model
    shards: tuple[Shard, ...]  # of every rank of this replica: together they decide which rank writes a replicated head
    rank: int
    num_pages: int
    groups: tuple[PageGroup, ...] = ()  # empty: one of all layers, without a window
    state: str = ""  # names the layout of the recurrent state in its pages, on every rank; empty: there is none

    def __post_init__(self) -> None:
        if min(self.itemsize, self.page_size, self.num_pages, len(self.layers)) < 1:
            raise ValueError("itemsize, page_size, num_pages and the number of layers must be at least 1")
        if not 0 <= self.rank < len(self.shards):
            raise ValueError(f"rank must be within 0 and {len(self.shards) - 1}, not {self.rank}")
        for layer in self.layers:
            if min(layer.num_kv_heads, layer.key_dim, layer.value_dim) < 0 or layer.num_kv_heads < 1:
                raise ValueError(f"impossible layer: {layer}")
        for shard in self.shards:
            held = self.layers[shard.first_layer : shard.first_layer + len(shard.heads)]
            if shard.first_layer < 0 or not shard.heads or len(held) != len(shard.heads):
                raise ValueError(f"a shard begins at layer {shard.first_layer} and has {len(shard.heads)}")
            for layer, (start, stop) in zip(held, shard.heads, strict=True):
                if not 0 <= start < stop <= layer.num_kv_heads:
                    raise ValueError(f"heads [{start}, {stop}) of a layer with {layer.num_kv_heads}")
        if self.groups and sorted(n for group in self.groups for n in group.layers) != list(range(len(self.layers))):
            raise ValueError(f"groups that do not divide {len(self.layers)} layers: {self.groups}")

    @classmethod
    def whole(cls, layout: PoolLayout, model: str, dtype: str, num_pages: int) -> "PoolSpec":
        """Return the pool of a replica with a single rank."""
        layers = tuple(layout.layers)
        shard = Shard(0, tuple((0, layer.num_kv_heads) for layer in layers))
        return cls(model, dtype, layout.itemsize, layout.page_size, layers, (shard,), 0, num_pages)

    @property
    def shard(self) -> Shard:
        return self.shards[self.rank]

    @property
    def num_groups(self) -> int:
        """Return how many groups of layers have pages of their own."""
        return max(len(self.groups), 1)

    @cached_property
    def page_bytes(self) -> int:
        """The bytes of a page on this rank, in every group."""
        return self.layouts_of(self.rank)[0].page_bytes

    def held_layers(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Return the layers of each group that any rank of this replica holds, by their numbers in the whole model."""
        first = self.shards[rank].first_layer
        held = range(first, first + len(self.shards[rank].heads))
        return tuple(tuple(n for n in group.layers if n in held) for group in self.groups) or (tuple(held),)

    def layouts_of(self, rank: int) -> tuple[PoolLayout, ...]:
        """Return the layout of each group's pages in the pool of any rank of this replica."""
        shard = self.shards[rank]

        def local(number: int) -> LayerShape:
            start, stop = shard.heads[number - shard.first_layer]
            return LayerShape(stop - start, self.layers[number].key_dim, self.layers[number].value_dim)

        shapes = [[local(number) for number in layers] for layers in self.held_layers(rank)]
        return group_layouts(shapes, self.page_size, self.itemsize)

    @property
    def nbytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def compatibility(self) -> str:
        """A hash of what `check_compatible` compares: equal for pools that may exchange pages."""
        texts = self.fields()
        return hashlib.blake2b("\n".join(texts[name] for name in _MUST_AGREE).encode(), digest_size=16).hexdigest()

    def _holds_of_ranks(self) -> str:
        """Return each rank's layers and heads as text: a state travels only between ranks that hold the same part."""
        return ", ".join(f"layer {shard.first_layer}: {shard.heads}" for shard in self.shards)

    def fields(self) -> dict[str, str]:
        """Return every field as text, for error messages."""
        shard = self.shard
        return {
            "model": self.model,
            "dtype": f"{self.dtype} ({self.itemsize} bytes)",
            "page_size": f"{self.page_size} tokens",
            "layers": ", ".join(
                f"{len(list(run))} x ({layer.num_kv_heads} heads, keys {layer.key_dim}, values {layer.value_dim})"
                for layer, run in groupby(self.layers)
            ),
            "groups": "; ".join(
                f"{_window_text(group)}: layers {', '.join(map(str, group.layers))}" for group in self.groups
            )
            or "all layers in one, which keeps its pages",
            "state": f"{self.state}; {self._holds_of_ranks()}" if self.state else "none",
            "rank": f"{self.rank} of {len(self.shards)}",
            "holds": f"layers {shard.first_layer}-{shard.first_layer + len(shard.heads) - 1}, heads "
            + ", ".join(f"{start}-{stop - 1}" for (start, stop), _ in groupby(shard.heads)),
            "page": f"{self.page_bytes} bytes, {self.num_pages} of them",
        }


def _window_text(group: PageGroup) -> str:
    if group.attention_chunk is not None:
        return f"attention chunk {group.attention_chunk}"
    return "no window" if group.window is None else f"window {group.window}"


class IncompatiblePools(ValueError):
    """Two pools cannot exchange pages; the message shows both, field by field."""


_MUST_AGREE = ("model", "dtype", "page_size", "layers", "groups", "state")


def check_compatible(ours: PoolSpec, theirs: PoolSpec) -> None:
    """Check that bytes of one pool mean the same in the other. Shards and sizes may differ.

    Raises:
        IncompatiblePools: the same bytes mean different things in the two pools.
    """
    left = ours.fields()
    right = theirs.fields()
    wrong = [name for name in _MUST_AGREE if left[name] != right[name]]
    if not wrong:
        return
    width = max(map(len, left.values()))
    rows = [f"  {name:<10} {left[name]:<{width}}   {right[name]}{' <- differs' * (name in wrong)}" for name in left]
    header = f"  {'':<10} {'here':<{width}}   there"
    raise IncompatiblePools("\n".join([f"pools differ in {', '.join(wrong)}:", header, *rows]))
