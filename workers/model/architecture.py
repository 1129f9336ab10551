"""Read from the configuration of a transformers model what its parts are."""

from transformers import PretrainedConfig

ATTENTION_NAME = "crossdock"  # under which transformers knows our attention


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
