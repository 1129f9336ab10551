"""Layers with recurrent state (gated delta net, Mamba-2, short convolutions): transformers' own, with states in pages.

transformers computes one batch of equally long sequences. A step is a flat batch of unequal ones. So the forward of
each module that keeps a state is replaced: it runs once for all decodes, and once for each chunk.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig

from crossdock.workers.model.architecture import recurrent_layers
from crossdock.workers.model.forward.forward_context import context_or_none
from crossdock.workers.model.forward.state_pages import LayerStates, StateLayout, StateShape

_CACHE_NAMES = ("cache_params", "past_key_values")  # by which modules receive transformers' cache


class NotRecurrentError(Exception):
    """A model's recurrent layers are not of a kind that is known; the message gives the reason."""


def keep_states_in_pages(
    module: nn.Module, config: PretrainedConfig, layers: range, compute: Callable[[DynamicCache], object]
) -> StateLayout:
    """Replace the forward of every module that keeps a recurrent state. Returns where a request's states lie.

    `compute` runs two tokens through `module` with the given cache, which attention must fill as well. `config` is
    the decoder's, of which `module` has `layers`. Collective: every rank of a worker group must call it.

    Raises:
        NotRecurrentError: some states are kept elsewhere; the model is unchanged.
    """
    recorder = _StateRecorder(config=config)
    handles = [each.register_forward_pre_hook(recorder.enter) for each in module.modules()]
    handles += [each.register_forward_hook(recorder.leave) for each in module.modules()]
    try:
        compute(recorder)
    except Exception as failure:  # the model expects a cache of its own
        reason = " ".join(str(failure).split())
        raise NotRecurrentError(f"transformers' cache does not hold its states: {reason}") from failure
    finally:
        for handle in handles:
            handle.remove()
    expected = {layer for layer in recurrent_layers(config) if layer in layers}
    if missing := sorted(expected - {layer for layer, _ in recorder.owners}):
        raise NotRecurrentError(f"layers {missing} keep no state in transformers' cache")
    replacements = [_RecurrentForward(owner, layer) for layer, owner in recorder.owners]
    for replacement in replacements:
        replacement.module.forward = replacement
    return StateLayout(tuple(recorder.shapes()))


class _StateRecorder(DynamicCache):  # type: ignore[misc]
    """transformers' own cache, which notes the modules that store states in it."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config=config)
        self.owners: list[tuple[int, nn.Module]] = []
        self._entered: list[nn.Module] = []

    def enter(self, module: nn.Module, _: object) -> None:
        self._entered.append(module)

    def leave(self, module: nn.Module, _: object, __: object) -> None:
        self._entered.pop()

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args: Any, **options: Any) -> Tensor:
        self._note(layer_idx)
        seen: Tensor = super().update_conv_state(conv_states, layer_idx, *args, **options)
        return seen

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *args: Any, **options: Any) -> Tensor:
        self._note(layer_idx)
        stored: Tensor = super().update_recurrent_state(recurrent_states, layer_idx, *args, **options)
        return stored

    def _note(self, layer: int) -> None:
        owner = (layer, self._entered[-1])
        if owner not in self.owners:
            self.owners.append(owner)

    def shapes(self) -> list[StateShape]:
        """Return the tensors that were stored, by layer."""
        found = []
        for number in sorted({layer for layer, _ in self.owners}):
            layer: Any = self.layers[number]
            for is_convolution, states in ((True, layer.conv_states), (False, layer.recurrent_states)):
                found += [
                    StateShape(number, index, is_convolution, tuple(state.shape[1:]), state.dtype)
                    for index, state in states.items()
                    if state is not None
                ]
        return found


class _RecurrentForward:
    """Takes the place of the forward of a module that keeps a recurrent state.

    Outside a step the module runs its own forward.
    """

    def __init__(self, module: nn.Module, layer: int) -> None:
        """Prepare to replace the forward of `module`, which belongs to `layer`.

        Raises:
            NotRecurrentError: the module needs more than hidden states and a cache.
        """
        self.module: Any = module
        self._forward: Callable[..., Any] = module.forward
        self._layer = layer
        parameters = inspect.signature(module.forward).parameters
        self._cache = next((name for name in _CACHE_NAMES if name in parameters), "")
        needed = [each.name for each in parameters.values() if each.default is each.empty]
        if not self._cache or needed not in (["hidden_states"], ["hidden_states", "kwargs"]):
            raise NotRecurrentError(f"{type(module).__name__} of layer {layer} takes {', '.join(parameters)}")

    def __call__(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        """Compute the hidden states [1, T, D] of a flat batch.

        Positions and masks are left out: no sequence is padded.
        """
        context = context_or_none()
        if context is None:
            return self._forward(hidden_states, *args, **options)
        if context.batch is None:  # a probe of whole sequences
            parts = torch.split(hidden_states, list(context.probe_lengths), 1)
            return torch.cat([self._forward(part) for part in parts], 1)
        states = context.states
        assert states is not None, "the step does not say where its states are"
        out = torch.empty_like(hidden_states)
        starts = [0]
        for length in states.lengths:
            starts.append(starts[-1] + length)

        def compute(parts: slice, layer_states: LayerStates) -> None:
            rows = slice(starts[parts.start], starts[parts.stop])
            given = hidden_states[0, rows].view(parts.stop - parts.start, -1, hidden_states.shape[-1])
            out[0, rows] = self._forward(given, **{self._cache: layer_states}).flatten(0, 1)

        states.update(self._layer, compute)
        return out
