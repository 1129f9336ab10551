"""The configuration of a drafting head, as `speculators` writes it and as the heads of vLLM's examples have it."""

from pathlib import Path
from typing import Any, NamedTuple

from transformers import LlamaConfig

from crossdock.workers.model.weights.untrusted import read_config_file

NUM_STATES = 3  # of the target's layers, which a head reads side by side


class EagleConfig(NamedTuple):
    """Says what a head is made of, and which of the target's layers it reads."""

    layer: LlamaConfig  # of the head's one decoder layer
    draft_vocab_size: int
    target_hidden_size: int
    norm_before_residual: bool
    layers: tuple[int, ...] | None  # whose inputs the head reads; None: `default_layers` of the target

    @classmethod
    def read(cls, folder: Path) -> "EagleConfig":
        """Read config.json. ValueError: a head of this form is not computed here; the message names the field."""
        found = read_config_file(folder)
        is_speculators = "transformer_layer_config" in found
        inner = found["transformer_layer_config"] if is_speculators else found
        if not isinstance(inner, dict):
            raise ValueError(f"model: {folder}: transformer_layer_config must be an object")
        eagle = found.get("eagle_config") or {}
        kinds = [found.get("speculators_model_type"), *(found.get("architectures") or [])]
        if not any("eagle3" in str(kind).lower() for kind in kinds):
            raise ValueError(
                f"model: {folder} is no head of EAGLE-3: its config.json has neither speculators_model_type eagle3 nor "
                f"Eagle3 in architectures"
            )
        reason = _why_not(inner, found, eagle)
        if reason:
            raise ValueError(f"model: {folder}: {reason}")
        try:
            layer = LlamaConfig(**inner)
            layers = found.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
            return cls(
                layer,
                int(found.get("draft_vocab_size") or layer.vocab_size),
                int(found.get("target_hidden_size") or layer.hidden_size),
                bool(found.get("norm_before_residual", False)),
                None if layers is None else tuple(int(each) for each in layers),
            )
        except (TypeError, ValueError, KeyError) as error:
            raise ValueError(f"model: {folder}: config.json cannot be read: {error}") from None

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers that the head reads, of a target with so many. ValueError: the target lacks one."""
        chosen = self.layers if self.layers is not None else default_layers(num_layers)
        if len(chosen) != NUM_STATES or any(not 0 <= each < num_layers for each in chosen):
            raise ValueError(
                f"model: the head reads the inputs of layers {list(chosen)}; expected are {NUM_STATES} layers from 0 "
                f"to {num_layers - 1}, see eagle_aux_hidden_state_layer_ids in its config.json"
            )
        return chosen


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs a head reads that names none, as in vLLM: an early, a middle and a late one."""
    return 2, num_layers // 2, num_layers - 3


def _why_not(inner: dict[str, Any], found: dict[str, Any], eagle: dict[str, Any]) -> str:
    """Return why a head is not computed here; empty: nothing speaks against it."""
    expected: list[tuple[dict[str, Any], str, Any]] = [
        (inner, "model_type", "llama"),
        (inner, "num_hidden_layers", 1),
        (inner, "hidden_act", "silu"),
        (eagle, "use_aux_hidden_state", True),
        (found, "norm_before_fc", False),
        (found, "logit_scale", 1.0),
    ]
    for where, name, only in expected:
        if where.get(name, only) != only:
            return f"{name} is {where[name]!r}; heads with {only!r} are computed"
    rope = inner.get("rope_parameters") or inner.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else "unknown"
    if kind in ("dynamic", "longrope", "unknown"):
        return f"rope_type {kind} changes with the longest text of a step; heads with other kinds are computed"
    if found.get("quantization_config") or inner.get("quantization_config"):
        return "quantization_config: the weights are packed; heads with plain weights are computed"
    return ""
