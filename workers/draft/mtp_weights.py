"""The tensors of an MTP head in a checkpoint, read as a model of its layers alone: one, of the decoder's own kind.

Three forms are published. DeepSeek and GLM number the head as one more layer: `layers.N.eh_proj`,
`layers.N.self_attn…`. Qwen calls it `mtp`: `mtp.fc`, `mtp.layers.0.self_attn…`. Nemotron-H calls it so too, and counts
attention and experts as two layers: `mtp.layers.0.eh_proj`, `mtp.layers.0.mixer…`, `mtp.layers.1.mixer…`,
`mtp.layers.1.final_layernorm`. All compute the same. (`MtpModel` of transformers; `nemotron_h_mtp.py`,
`hy_v3_mtp.py` and `exaone_moe_mtp.py` of vLLM.)
"""

import copy
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from crossdock.workers.model.architecture import (
    BLOCKS_TYPE,
    INDEXED_TYPE,
    attention_layers,
    is_indexed,
    layer_kinds,
    recurrent_layers,
    text_config,
)
from crossdock.workers.model.cut.part import ModelPart
from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.loaders.files import open_files
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.weights.checkpoint import resolve_model
from crossdock.workers.model.weights.finite import check_finite, weights_of
from crossdock.workers.model.weights.scheme import scheme_at
from crossdock.workers.model.weights.stored_tensors import StoredTensor
from crossdock.workers.model.weights.tensor_check import check_tensors
from crossdock.workers.model.weights.weights import auto_model, load_weights, read_config, without_quantisation

_JOINING = {
    "enorm.weight": "embedding_norm",
    "pre_fc_norm_embedding.weight": "embedding_norm",
    "hnorm.weight": "hidden_norm",
    "pre_fc_norm_hidden.weight": "hidden_norm",
    "eh_proj.weight": "projection",
    "fc.weight": "projection",
}
"""The tensors before the first layer, by all their names there."""

_LAYERS_HERE = "method mtp, whose first layer is layers.0 here"
_LAST_NORMS = ("norm.weight", "shared_head.norm.weight")
_LAST_NORM_IN_LAYER = "final_layernorm.weight"
_SHARED = ("embed_tokens.weight", "shared_head.head.weight")  # copies of the model's own, which is read
_OF_MODEL = re.compile(r"(?:(?:model|language_model|backbone)\.)*(embed_tokens|embeddings|lm_head)\.weight")
_MLP = {"exaone_moe": "dense"}
"""The feed-forward kind of a head's layer, by model type. Others have experts, or their config.json names the kind."""
_IN_ONE_LAYER: Mapping[str, Any] = {
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "indexer_types": ["full"],
}
"""Fields that say what each layer is, for one layer with experts: where a decoder has some, its head has. Where layers
of a decoder share an indexer, its head has one of its own."""


class MtpWeights(NamedTuple):
    """The weights of a head."""

    module: Any  # a causal LM of transformers with the head's layers alone, whose last norm is the head's
    norm: nn.Module  # the last one of `module`
    embedding_norm: Tensor  # [E]
    hidden_norm: Tensor  # [E]
    projection: Tensor  # [E, 2 E], of a normed embedding and a normed state side by side


class _OfTarget(nn.Module):
    """Calls a module of the target, whose weights may be replaced while the replica runs."""

    def __init__(self, find: Callable[[], nn.Module]) -> None:
        super().__init__()
        self._find = find

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self._find()(x)
        return found


def load_mtp(name: str | None, target: LoadedModel) -> MtpWeights:
    """Load the head of a checkpoint onto the device of `target`, in its dtype; packed matrices stay packed.

    `name`: directory or hub name of the checkpoint; None: that of `target`. Where ranks divide the embedding or the
    output projection of `target`, this rank reads a whole one for the head.

    Raises:
        ValueError: heads of this model are not computed, or the checkpoint has none, or is of another model.
    """
    path = _path_of(name, target)
    own, chosen = _head_in(path, target.config)
    device = str(target.device)

    def cut(module: Any) -> ModelPart:
        if target.has_whole_embedding:
            module.set_input_embeddings(_OfTarget(lambda: target.module.get_input_embeddings()))
        if target.part.position.tensor_size == 1:
            module.lm_head = _OfTarget(lambda: target.module.lm_head)
        return ModelPart(RankPosition(), num_layers=own.num_hidden_layers)

    try:
        module, _ = load_weights(own, path, target.dtype, cut, device, chosen=chosen)
    except ValueError as error:
        raise ValueError(f"speculative_config: {_LAYERS_HERE}: {error}") from None
    check_finite(weights_of(module), f"the MTP head of {path}")
    module = module.to(target.device)
    decoder = module.get_decoder()
    norm = decoder.norm_f if hasattr(decoder, "norm_f") else decoder.norm
    return MtpWeights(module, norm, **chosen.read(target))


def check_mtp(name: str | None, served: Path) -> None:
    """Check that a checkpoint has a head for the model in `served`, by its configuration and the tensors in its files.

    `name`: see `load_mtp`. ValueError: there is none, or it is not computed; the message names what is missing.
    """
    path = served if name is None else resolve_model(name)
    own, chosen = _head_in(path, read_config(served))
    try:
        check_tensors(auto_model(own), without_quantisation(own), path, torch.float32, scheme_at(path), chosen)
    except (OSError, ValueError) as error:
        raise ValueError(f"{_LAYERS_HERE}: {error}") from None


def _head_in(path: Path, served: PretrainedConfig) -> tuple[PretrainedConfig, "_Chosen"]:
    """Return the configuration of the head's layers in a checkpoint, and what picks its tensors.

    `served`: configuration of the model that is served. ValueError: heads of it are not computed.
    """
    config = read_config(path)
    _check_fits(config, served, path)
    own = _of_head(config, path)
    return own, _Chosen(path, text_config(config).num_hidden_layers, own)


class _Chosen:
    """Picks the tensors of a head, and of the embedding and the output projection, out of those of a checkpoint.

    Renames each layer as in a model that has the head's layers alone. Keeps the tensors before the layers for `read`.
    """

    def __init__(self, path: Path, num_layers: int, own: PretrainedConfig) -> None:
        """`num_layers`: of the decoder; `own`: configuration of the head's layers."""
        self._path = path
        self._num_own: int = own.num_hidden_layers
        self._width: int = own.hidden_size
        self._of_head = re.compile(rf"(?:(?:model|language_model)\.)*(?:mtp|layers\.{num_layers})\.(.+)")
        self._joining: dict[str, StoredTensor] = {}

    def __call__(self, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Return the chosen tensors. ValueError: there is no head, or one with several layers or of another width."""
        found: dict[str, StoredTensor] = {}
        for key, tensor in stored.items():
            if own := _OF_MODEL.fullmatch(key):
                found[f"{'model.' * (own[1] != 'lm_head')}{own[1]}.weight"] = tensor
            elif of_head := self._of_head.fullmatch(key):
                self._put(of_head[1], tensor, found)
        if len(self._joining) < len(set(_JOINING.values())):
            raise ValueError(
                f"model: {self._path} has no MTP head: its files lack mtp.fc with its norms, or eh_proj with its norms "
                f"in mtp.layers.0 or in one more layer than num_hidden_layers. Name a checkpoint that has them in "
                f"model, or another method"
            )
        for name, tensor in self._joining.items():
            expected = [self._width, 2 * self._width] if name == "projection" else [self._width]
            if tensor.shape != expected:
                raise ValueError(f"model: {self._path}: {tensor.key} is {tensor.shape}, expected {expected}")
        embedding = found.get("model.embed_tokens.weight") or found.get("model.embeddings.weight")
        if embedding is not None:
            found.setdefault("lm_head.weight", embedding)  # of a model that ties them
        return found

    def read(self, target: LoadedModel) -> dict[str, Tensor]:
        """Return the tensors before the layer by their names in `MtpWeights`, in plain floats."""
        tensors: dict[str, Tensor] = {}
        with open_files(self._path) as files:
            for name, stored in self._joining.items():
                tensors[name] = stored.opened(files, target.dtype)[...].to(target.device, target.dtype)
        check_finite(tensors, f"the MTP head of {self._path}")
        return tensors

    def _put(self, name: str, tensor: StoredTensor, found: dict[str, StoredTensor]) -> None:
        """Put a tensor of the head, called `name` there, where it belongs."""
        numbered = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
        if numbered and int(numbered[1]) >= self._num_own:
            raise ValueError(f"model: {tensor.key} is of a second layer; heads with one layer are computed")
        in_layer = numbered[2] if numbered else name
        if in_layer in _JOINING:
            self._joining[_JOINING[in_layer]] = tensor
        elif in_layer == _LAST_NORM_IN_LAYER:
            found[f"model.{'norm_f' if self._num_own > 1 else 'norm'}.weight"] = tensor
        elif name in _LAST_NORMS:
            found["model.norm.weight"] = tensor
        elif name not in _SHARED:
            found[f"model.{'' if numbered else 'layers.0.'}{name}"] = tensor


def _path_of(name: str | None, target: LoadedModel) -> Path:
    own: str = target.config.name_or_path
    if name is None and not own:
        raise ValueError("model: method mtp needs the directory of a checkpoint, and the served model has none")
    return resolve_model(name or own)


def _check_fits(config: PretrainedConfig, served: PretrainedConfig, path: Path) -> None:
    """Check that heads of a model are computed. ValueError: they are not, or the model is not the one in `served`."""
    decoder = text_config(config)
    own = text_config(served)
    for field in ("model_type", "hidden_size", "vocab_size"):
        if getattr(decoder, field) != getattr(own, field):
            raise ValueError(
                f"model: {path} has {field} {getattr(decoder, field)}; the model that is served has "
                f"{getattr(own, field)}"
            )
    count = getattr(decoder, "num_nextn_predict_layers", None) or getattr(decoder, "mtp_num_hidden_layers", None)
    if count not in (None, 0, 1):
        raise ValueError(f"model: {path} has {count} layers in its MTP head; heads with one layer are computed")
    if getattr(decoder, "mtp_use_dedicated_embeddings", False):
        raise ValueError(f"model: {path} has mtp_use_dedicated_embeddings; heads that read the model's are computed")


def _of_head(config: PretrainedConfig, path: Path) -> PretrainedConfig:
    """Return the configuration of the head's layers, as that of a model with no others. ValueError: not computed."""
    decoder = copy.deepcopy(text_config(config))
    fields = dict(_IN_ONE_LAYER) | {
        "layer_types": _attention_of_head(decoder, path),
        "mlp_layer_types": getattr(decoder, "mtp_mlp_layer_types", None) or [_MLP.get(decoder.model_type, "sparse")],
    }
    decoder.update({name: value for name, value in fields.items() if getattr(decoder, name, None) is not None})
    decoder.update({"tie_word_embeddings": False, "architectures": None})
    if recurrent_layers(decoder) or (hasattr(decoder, "mtp_layers_block_type") and not attention_layers(decoder)):
        raise ValueError(
            f"model: {path} has mtp_layers_block_type {decoder.mtp_layers_block_type}; heads whose layers have "
            f"attention, experts or an mlp are computed"
        )
    return decoder


def _attention_of_head(decoder: PretrainedConfig, path: Path) -> list[str]:
    """Return the kinds of a head's layers. ValueError: they choose blocks, or no field says which window they have."""
    if BLOCKS_TYPE in layer_kinds(decoder):
        raise ValueError(
            f"model: {path} has indexers that choose blocks of tokens, and no code of transformers says what the layer "
            f"of its head has; method mtp computes heads of other models"
        )
    kinds: list[str] | None = getattr(decoder, "mtp_layers_block_type", None) or getattr(
        decoder, "mtp_layer_types", None
    )
    if kinds is None and "sliding_attention" in layer_kinds(decoder):
        raise ValueError(
            f"model: {path} has layers with windows and no mtp_layer_types; heads are computed where this field says "
            f"sliding_attention or full_attention"
        )
    windows = getattr(decoder, "mtp_sliding_windows", None)
    if windows and kinds == ["sliding_attention"] and windows != [decoder.sliding_window]:
        raise ValueError(
            f"model: {path} has mtp_sliding_windows {windows}; heads with the decoder's window, "
            f"{decoder.sliding_window} tokens, are computed"
        )
    return kinds or [INDEXED_TYPE if is_indexed(decoder) else "full_attention"]
