"""Read from the configuration of a transformers model what its parts are. No torch."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LABELS = "ForSequenceClassification"  # the end of the classes of transformers that give a number for each label
DECODERS = ("text_config", "llm_config")  # parts of config.json with a decoder's fields, where there are other parts
ATTENTION_NAME = "crossdock"  # under which transformers knows our attention

RECURRENT_TYPES = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
"""transformers' names of the layers with a recurrent state; hybrid layers have attention beside it."""
STATELESS_TYPES = frozenset({"moe", "mlp"})  # layers with neither attention nor state
_WITHOUT_ATTENTION = {"linear_attention", "conv"} | STATELESS_TYPES


INDEXED_TYPE = "indexed_attention"  # an indexer of the layer, or of an earlier one, chooses the tokens that are read
BLOCKS_TYPE = "minimax_m3_sparse"  # for each KV head an indexer chooses the blocks of tokens that are read
INDEXED_MODELS = {"axk2": "halves", "deepseek_v32": "halves", "glm_moe_dsa": "pairs"}
"""Model types whose indexers are served, and which elements of a query or key these rotate: those that are half a row
apart, or neighbours."""
_BLOCK_MODELS = ("minimax_m3_vl", "minimax_m3_vl_text")

_LAYER_TYPES = (
    {"full_attention", "sliding_attention", "chunked_attention", INDEXED_TYPE, BLOCKS_TYPE}
    | RECURRENT_TYPES
    | STATELESS_TYPES
)
_BLOCKS = "keys are compressed by blocks of tokens, and KV pages hold a row for each token"
_WHY_NOT = {
    "compressed_sparse_attention": _BLOCKS,
    "heavily_compressed_attention": _BLOCKS,
}
"""Why layers of transformers' other types are refused. docs/models.md names the first step towards each."""


def decoder_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json. Those of its decoder, where it has a part of its own, win over outer ones."""
    found = dict(fields)
    for name in DECODERS:
        if isinstance(part := fields.get(name), Mapping):
            found |= part
    return found


def is_classifier(architectures: Any) -> TypeGuard[list[Any]]:
    """Report whether a model classifies texts, by the `architectures` of its config.json: a list, None or a mistake."""
    return isinstance(architectures, list) and bool(architectures) and str(architectures[0]).endswith(LABELS)


def require_served_layers(model_type: str, kinds: Iterable[str]) -> None:
    """Check that all state of layers of these types lies in KV pages. Raises ValueError: names the types."""
    kinds = set(kinds)
    for kind, served in ((INDEXED_TYPE, tuple(INDEXED_MODELS)), (BLOCKS_TYPE, _BLOCK_MODELS)):
        if kind in kinds and model_type not in served:
            raise ValueError(
                f"{model_type}: its indexer chooses the tokens that are read, and was not compared with transformers' "
                f"own; served are {', '.join(served)}"
            )
    if unknown := kinds - _LAYER_TYPES:
        reasons = dict.fromkeys(_WHY_NOT.get(kind, "their state does not lie in KV pages") for kind in sorted(unknown))
        raise ValueError(
            f"{model_type} has layers of type {', '.join(sorted(unknown))}: {'; '.join(reasons)}. Served are "
            f"{', '.join(sorted(_LAYER_TYPES))}"
        )


def text_config(config: "PretrainedConfig") -> "PretrainedConfig":
    """Return the configuration of the decoder, which is a part of some models' configuration."""
    decoder: PretrainedConfig = config.get_text_config(decoder=True)
    return decoder


def is_multimodal(config: "PretrainedConfig") -> bool:
    """Return whether a model has an encoder of pictures beside its decoder."""
    return getattr(config, "vision_config", None) is not None


def attention_names(config: "PretrainedConfig", name: str = ATTENTION_NAME) -> "str | dict[str, str]":
    """Return the attention of each part of a model, as transformers wants it: `name` for the decoder.

    An encoder of pictures never has our attention, which would write to the KV pages.
    """
    return {"text_config": name, "vision_config": "sdpa"} if is_multimodal(config) else name


def num_deep_layers(config: "PretrainedConfig") -> int:
    """Return the number of layers after which embeddings of pictures are added (Qwen3-VL's DeepStack)."""
    return len(getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ())


def layer_kinds(config: "PretrainedConfig") -> list[str]:
    """Return the kind of each layer of a decoder, where its configuration has them."""
    return list(getattr(config, "layer_types", None) or ())


def is_indexed(config: "PretrainedConfig") -> bool:
    """Return whether indexers choose the tokens that a decoder's layers read."""
    return not {INDEXED_TYPE, BLOCKS_TYPE}.isdisjoint(layer_kinds(config))


def most_chosen(config: "PretrainedConfig") -> int | None:
    """Return how many tokens the indexers of a decoder choose for a row at most; None: it has no indexers."""
    if not is_indexed(config):
        return None
    chooses_blocks = BLOCKS_TYPE in layer_kinds(config)
    most: int = config.index_topk_blocks * config.index_block_size if chooses_blocks else config.index_topk
    return most


def recurrent_layers(config: "PretrainedConfig") -> list[int]:
    """Return the numbers of the layers of a decoder that keep a recurrent state."""
    return [layer for layer, kind in enumerate(layer_kinds(config)) if kind in RECURRENT_TYPES]


def attention_layers(config: "PretrainedConfig") -> list[int]:
    """Return the numbers of the layers with attention of a decoder whose configuration has the kinds of its layers."""
    return [layer for layer, kind in enumerate(layer_kinds(config)) if kind not in _WITHOUT_ATTENTION]


def has_layers_without_attention(config: "PretrainedConfig") -> bool:
    """Return whether some layers of a decoder have no attention."""
    return not _WITHOUT_ATTENTION.isdisjoint(layer_kinds(config))
