"""Recurrent states in pages of the KV pool: one row of bytes per request, spread over any pages.

Layers read and write their own bytes of the rows. So a step needs memory for the states of one layer at a time.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from math import gcd, prod

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes: of each tensor in a row, at least its dtype's


@dataclass(frozen=True, slots=True)
class StateShape:
    """One tensor of a layer's state, of one request."""

    layer: int
    number: int  # among the layer's tensors of this kind
    is_convolution: bool  # the newest inputs of a convolution; otherwise a recurrent state
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Return the size of the tensor, padded so that the next tensor is aligned."""
        return -(-prod(self.shape) * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class StateLayout:
    """Where a row of bytes holds the states of all recurrent layers of one request. Layers follow one another."""

    shapes: tuple[StateShape, ...]  # by layer

    @cached_property
    def num_bytes(self) -> int:
        """Return the length of a row."""
        return sum(shape.num_bytes for shape in self.shapes)

    @cached_property
    def by_layer(self) -> dict[int, tuple[int, tuple[StateShape, ...]]]:
        """Return the byte at which each layer begins, and its tensors."""
        found = {}
        begin = 0
        for layer, group in groupby(self.shapes, key=lambda shape: shape.layer):
            shapes = tuple(group)
            found[layer] = begin, shapes
            begin += sum(shape.num_bytes for shape in shapes)
        return found

    @property
    def name(self) -> str:
        """Return a name that rows of equal layout share: replicas that exchange states need the same."""
        return hashlib.blake2b(repr(self.shapes).encode(), digest_size=4).hexdigest()

    def num_pages(self, page_bytes: int) -> int:
        """Return how many pages a row takes."""
        return -(-self.num_bytes // page_bytes)


@dataclass(slots=True, eq=False)
class LayerStates:
    """The states of one layer for some requests, in the shape of transformers' cache: layers read and update it.

    A request without computed tokens has zeros: transformers pads the first tokens with zeros too.
    """

    convolutions: dict[int, Tensor] = field(default_factory=dict)  # by number, [B, *shape]
    recurrent: dict[int, Tensor] = field(default_factory=dict)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the state of a convolution, which its kernel may update in place."""
        return self.convolutions.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a recurrent state, which its kernel may update in place."""
        return self.recurrent.get(state_idx)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object) -> Tensor:
        """Append inputs [B, C, n] to the state. Returns all that the convolution sees, [B, C, state + n]."""
        state = self.convolutions[state_idx]
        seen = torch.cat((state, conv_states.to(state.dtype)), -1)
        state.copy_(seen[..., -state.shape[-1] :])
        return seen

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> Tensor:
        """Replace a recurrent state."""
        return self.recurrent[state_idx].copy_(recurrent_states)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return True: zeros are a state too."""
        return True

    def is_recording_past(self, layer_idx: int | None = None) -> bool:
        """Return that states of the past are not kept."""
        return False


@dataclass(slots=True, eq=False)
class StepStates:
    """The pages of the states that one step reads and writes."""

    layout: StateLayout
    pool: Tensor  # the KV pool as bytes, [page, page_bytes] uint8
    read: Tensor  # [S, n] int32; rows of -1: zeros
    write: Tensor  # [S, n] int32
    lengths: Sequence[int]  # of the S parts, in tokens
    num_decodes: int  # parts of one token that come first: they are computed together
    _words: Tensor = field(init=False)  # the pool in the widest words that divide its pages
    _has_zeros: bool = field(init=False)

    def __post_init__(self) -> None:
        page_bytes = self.pool.shape[1]
        self._words = self.pool.view(_WORDS[gcd(page_bytes, 8)])
        self.read, self.write = self.read.long(), self.write.long()
        # On a GPU to ask would be to wait.
        self._has_zeros = self.pool.device.type != "cpu" or bool((self.read[:, :1] < 0).any())

    def update(self, layer: int, compute: Callable[[slice, LayerStates], None]) -> None:
        """Call `compute` with the states of `layer`, for a slice of the parts each time, and store the new states.

        All states are read before the first is written: no part sees the new state of another part of this step.
        """
        begin, shapes = self.layout.by_layer[layer]
        length = sum(shape.num_bytes for shape in shapes)
        rows = self._gather(begin, length)
        batched = [slice(0, self.num_decodes)] if self.num_decodes else []
        for parts in (*batched, *(slice(part, part + 1) for part in range(self.num_decodes, len(self.lengths)))):
            compute(parts, _views(rows[parts], shapes))
        self._scatter(rows, begin)

    def _gather(self, begin: int, length: int) -> Tensor:
        """Return bytes `[begin, begin + length)` of the states that are read, [S, length]."""
        width = self._words.dtype.itemsize
        rows = torch.empty(len(self.read), length // width, dtype=self._words.dtype, device=self.pool.device)
        known = self.read.clamp(min=0) if self._has_zeros else self.read
        for number, source, target in self._pieces(begin, length):
            torch.index_select(self._words[:, source], 0, known[:, number], out=rows[:, target])
        if self._has_zeros:
            rows.masked_fill_(self.read[:, :1] < 0, 0)
        return rows.view(torch.uint8)

    def _scatter(self, rows: Tensor, begin: int) -> None:
        """Store the rows [S, length] from byte `begin` on of the states that are written."""
        words = rows.view(self._words.dtype)
        for number, target, source in self._pieces(begin, rows.shape[1]):
            self._words[:, target].index_copy_(0, self.write[:, number], words[:, source])

    def _pieces(self, begin: int, length: int) -> list[tuple[int, slice, slice]]:
        """Return the pages that hold bytes `[begin, begin + length)` of a row: the number of each, the words within
        it, and the words of these bytes."""
        width = self._words.dtype.itemsize
        page = self._words.shape[1]
        start = begin // width
        stop = (begin + length) // width
        pieces = []
        for number in range(start // page, -(-stop // page)):
            before = number * page
            first = max(start, before)
            last = min(stop, before + page)
            pieces.append((number, slice(first - before, last - before), slice(first - start, last - start)))
        return pieces


_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def _views(rows: Tensor, shapes: Sequence[StateShape]) -> LayerStates:
    """Return the tensors of a layer's states in their rows of bytes [B, length]."""
    states = LayerStates()
    begin = 0
    for shape in shapes:
        used = prod(shape.shape) * shape.dtype.itemsize
        tensor = rows[:, begin : begin + used].view(shape.dtype).view(-1, *shape.shape)
        (states.convolutions if shape.is_convolution else states.recurrent)[shape.number] = tensor
        begin += shape.num_bytes
    return states
