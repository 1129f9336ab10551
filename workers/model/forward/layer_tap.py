"""The hidden states between a model's layers, for a head that drafts from them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class LayerTap:
    """Keeps the hidden states that enter some layers, of each forward pass. Closed until `open_at` is called.

    Layers that are fused into one module keep the states themselves: they call `keep`.
    """

    def __init__(self) -> None:
        self.layers: tuple[int, ...] = ()  # whose inputs are kept, ascending; (): none
        self._states: dict[int, Tensor] = {}  # [T, E] by layer, of the newest pass

    def open_at(self, layers: Sequence[int], modules: Sequence[nn.Module]) -> None:
        """Keep the inputs of `layers` from now on. `modules`: all layers; (): one module computes them all."""
        self.layers = tuple(sorted(set(layers)))
        for number in self.layers if modules else ():
            modules[number].register_forward_pre_hook(_Hook(self, number), with_kwargs=True)

    def keep(self, layer: int, hidden: Tensor) -> None:
        """Keep the states [T, E] that enter a layer. They must not be written to afterwards."""
        self._states[layer] = hidden

    def take(self, layers: Sequence[int]) -> Tensor:
        """Return the states of the newest pass side by side, [T, len(layers) * E], and forget them."""
        states = [self._states[layer] for layer in layers]
        self._states.clear()
        return torch.cat(states, -1)


class _Hook:
    """Keeps the input of one layer."""

    def __init__(self, tap: LayerTap, layer: int) -> None:
        self._tap = tap
        self._layer = layer

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        self._tap.keep(self._layer, hidden[0])
