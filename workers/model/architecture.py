"""Read from the configuration of a transformers model what its parts are."""

from transformers import PretrainedConfig

ATTENTION_NAME = "crossdock"  # under which transformers knows our attention

RECURRENT_TYPES = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
"""transformers' names of the layers with a recurrent state; hybrid layers have attention beside it."""
STATELESS_TYPES = frozenset({"moe", "mlp"})  # layers with neither attention nor state
_WITHOUT_ATTENTION = {"linear_attention", "conv"} | STATELESS_TYPES


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of the decoder, which is a part of some models' configuration."""
    decoder: PretrainedConfig = config.get_text_config(decoder=True)
    return decoder


def is_multimodal(config: PretrainedConfig) -> bool:
    """Return whether a model has an encoder of pictures beside its decoder."""
    return getattr(config, "vision_config", None) is not None


def attention_names(config: PretrainedConfig, name: str = ATTENTION_NAME) -> "str | dict[str, str]":
    """Return the attention of each part of a model, as transformers wants it: `name` for the decoder.

    An encoder of pictures never has our attention, which would write to the KV pages.
    """
    return {"text_config": name, "vision_config": "sdpa"} if is_multimodal(config) else name


def num_deep_layers(config: PretrainedConfig) -> int:
    """Return the number of layers after which embeddings of pictures are added (Qwen3-VL's DeepStack)."""
    return len(getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ())


def layer_kinds(config: PretrainedConfig) -> list[str]:
    """Return the kind of each layer of a decoder, where its configuration has them."""
    return list(getattr(config, "layer_types", None) or ())


def recurrent_layers(config: PretrainedConfig) -> list[int]:
    """Return the numbers of the layers of a decoder that keep a recurrent state."""
    return [layer for layer, kind in enumerate(layer_kinds(config)) if kind in RECURRENT_TYPES]


def attention_layers(config: PretrainedConfig) -> list[int]:
    """Return the numbers of the layers with attention of a decoder that has recurrent layers too."""
    return [layer for layer, kind in enumerate(layer_kinds(config)) if kind not in _WITHOUT_ATTENTION]
