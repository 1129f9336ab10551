"""How the KV pool of one rank lies in memory: `[page, kv_head, layer, k|v, token, head_dim]`. Integers only.

All layers of one head of one page are ONE contiguous byte range, so a page (or any head range of it, for any
tensor-parallel ratio) moves as a single descriptor. A layer's kernel sees a strided view of the same tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps per token: `num_kv_heads` keys of `key_dim` and values of `value_dim` elements."""

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
    """The shape of a page. Layers may differ (Gemma 4: fewer, wider heads in full layers; MLA: K and V of different
    sizes); a head row is as long as all layers together, and a layer with fewer heads leaves its part of the others'
    rows unused."""

    layers: Sequence[LayerShape]
    page_size: int  # tokens
    itemsize: int  # bytes of an element

    @cached_property
    def num_kv_heads(self) -> int:
        return max(layer.num_kv_heads for layer in self.layers)

    @cached_property
    def layer_offsets(self) -> tuple[int, ...]:
        """Element at which each layer begins within a head's row; one more for the row's length."""
        offsets = [0]
        for layer in self.layers:
            offsets.append(offsets[-1] + self.page_size * (layer.key_dim + layer.value_dim))
        return tuple(offsets)

    @property
    def head_elements(self) -> int:
        return self.layer_offsets[-1]

    @property
    def page_elements(self) -> int:
        return self.num_kv_heads * self.head_elements

    @property
    def page_bytes(self) -> int:
        return self.page_elements * self.itemsize

    @property
    def token_bytes(self) -> int:
        return self.page_bytes // self.page_size

    def views(self, layer: int, num_pages: int) -> tuple[View, View]:
        """Where the keys and the values of `layer` lie."""
        shape = self.layers[layer]
        key_offset = self.layer_offsets[layer]
        value_offset = key_offset + self.page_size * shape.key_dim

        def view(dim: int, offset: int) -> View:
            strides = (self.page_elements, self.head_elements, dim, 1)
            return View((num_pages, shape.num_kv_heads, self.page_size, dim), strides, offset)

        return view(shape.key_dim, key_offset), view(shape.value_dim, value_offset)
