"""Which kinds of layers a decoder has: with attention, with a recurrent state, with both or with neither."""

from transformers import PretrainedConfig

RECURRENT_TYPES = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
"""transformers' names of the layers with a recurrent state; hybrid layers have attention beside it."""
STATELESS_TYPES = frozenset({"moe", "mlp"})  # layers with neither attention nor state
_WITHOUT_ATTENTION = {"linear_attention", "conv"} | STATELESS_TYPES


def layer_kinds(config: PretrainedConfig) -> list[str]:
    """Return the kind of each layer of a decoder, where its configuration has them."""
    return list(getattr(config, "layer_types", None) or ())


def recurrent_layers(config: PretrainedConfig) -> list[int]:
    """Return the numbers of the layers of a decoder that keep a recurrent state."""
    return [layer for layer, kind in enumerate(layer_kinds(config)) if kind in RECURRENT_TYPES]


def attention_layers(config: PretrainedConfig) -> list[int]:
    """Return the numbers of the layers with attention of a decoder that has recurrent layers too."""
    return [layer for layer, kind in enumerate(layer_kinds(config)) if kind not in _WITHOUT_ATTENTION]
