"""Settings of vectors that requests leave open: from the model's directory, under the names and rules of vLLM."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from crossdock.cluster.api.body.classifier_head import ClassifierHead
from crossdock.cluster.api.body.dense_layer import DenseLayer
from crossdock.cluster.api.body.text_prompts import FILE, TextPrompts
from crossdock.cluster.api.errors import ApiError, wrong
from crossdock.workers.model.text_files import TextAnswer, answer_of

Pooling: TypeAlias = Literal["last", "mean", "cls"]

_DENSE = "Dense"
_MODULES = ("Transformer", "Pooling", _DENSE, "Normalize")
"""The modules of Sentence Transformers that are served, by the end of their names, in the order in which they come."""
_POOLING_TYPES: Mapping[str, Pooling] = {"LAST": "last", "MEAN": "mean", "CLS": "cls"}
_FIRST = "the first token of this model sees no other"
_MODES: Mapping[str, Pooling] = {
    **dict.fromkeys(("mean_tokens", "mean"), "mean"),
    **dict.fromkeys(("cls_token", "cls"), "cls"),
    "lasttoken": "last",
}
_HINT = "model.pooler_config (--pooler-config) sets another"


class PoolerConfig(BaseModel):
    """How the hidden states of a text become a vector. None: as the model's directory says."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pooling_type: Literal["LAST", "MEAN", "CLS"] | None = Field(
        None,
        description="LAST: of the last token; MEAN: the mean of all; CLS: of the first, for text encoders. null: the "
        "model's own, else MEAN for text encoders and LAST for others.",
    )
    use_activation: bool | None = Field(
        None, description="Vectors have a length of 1. null: the model's own, else true."
    )
    matryoshka_dimensions: tuple[int, ...] | None = Field(
        None, description="Sizes that a request's `dimensions` may ask for; null: those of the model's config.json."
    )
    classifier_from_token: tuple[str, str] | None = Field(
        None,
        description='The words for no and yes of a model that judges pairs: ["no", "yes"] for Qwen3-Reranker. Scores '
        "are then the probability of yes; null: cosines of vectors.",
    )


@dataclass(frozen=True, slots=True)
class EmbeddingDefaults:
    """The vectors that one model's server makes."""

    pooling: Pooling = "last"  # of requests that name none
    normalizes: bool = True
    has_any_size: bool = False  # the beginning of a vector, however short, is one too
    sizes: Sequence[int] = ()  # else those that are, besides the whole vector
    refusal: str = ""  # why requests that name no pooling are refused
    classifier: Sequence[str] = ()  # words for no and yes of a model that judges pairs of texts
    head: ClassifierHead | None = None  # of a model that classifies texts, and generates none
    encoder: TextAnswer | None = None  # what a text encoder makes of texts; None: the model is none
    prompts: TextPrompts = field(default_factory=TextPrompts)  # before the texts whose vectors are wanted
    dense: Sequence[DenseLayer] = ()  # through which a pooled vector goes before it is cut and gets its length

    @classmethod
    def read(cls, model: Path, config: PoolerConfig | None = None) -> Self:
        """Return the defaults for a model directory. `config` wins over its files. ValueError: one cannot be read."""
        config = config or PoolerConfig.model_validate({})
        shape = _read(model / "config.json")
        sizes = config.matryoshka_dimensions
        if sizes is None:
            sizes = shape.get("matryoshka_dimensions")
            if sizes is not None and not (isinstance(sizes, list) and all(type(each) is int for each in sizes)):
                raise ValueError(f"{model / 'config.json'}: matryoshka_dimensions must be a list of whole numbers")
        has_any_size = sizes is None and shape.get("is_matryoshka") is True
        encoder = answer_of(shape, model)
        pooling, normalizes, refusal = _sentence_transformers(model, "last" if encoder is None else "mean")
        prompts = TextPrompts.read(
            _read(model / FILE), is_pooled=_pooling_fields(model).get("include_prompt") is not False
        )
        if config.pooling_type is not None:
            pooling = _POOLING_TYPES[config.pooling_type]
            refusal = ""
        if pooling == "cls" and encoder is None:
            refusal = f"this model's pooling (pooling_mode_cls_token) is not served: {_FIRST}; {_HINT}"
            if config.pooling_type is not None:
                raise ValueError(f"model.pooler_config: pooling_type CLS is for text encoders; {_FIRST}")
            pooling = "last"
        if config.use_activation is not None:
            normalizes = config.use_activation
        words = tuple(config.classifier_from_token or ())
        head = ClassifierHead.read(model, shape, is_encoder=encoder is not None)
        if words and (head is not None or encoder is not None):
            raise ValueError("model.pooler_config: classifier_from_token is for models that generate text")
        dense = () if refusal else _dense_layers(model, shape)
        return cls(pooling, normalizes, has_any_size, tuple(sizes or ()), refusal, words, head, encoder, prompts, dense)

    @property
    def why_no_text(self) -> str:
        """Return the reason why the model generates no text, with what it does; empty: it generates."""
        if self.encoder == "vectors":
            return "This model makes vectors of texts, and generates none: use /v1/embeddings, /v1/score or /v1/rerank."
        if self.encoder == "labels":
            return "This model makes labels of texts, and generates none: use /classify, /v1/score or /v1/rerank."
        if self.head is not None:
            return "This model classifies texts, and generates none: use /classify, /v1/score or /v1/embeddings."
        return ""

    def check_pooling(self, pooling: Pooling) -> None:
        """Raise ApiError for vectors that the model does not make."""
        if self.encoder == "labels":
            reason = "This model makes labels of texts, and no vectors: use /classify, /v1/score or /v1/rerank."
            raise ApiError(reason, param="model", code="unsupported_value")
        if pooling == "cls" and self.encoder is None:
            raise wrong("pooling", f"'cls' is for text encoders: {_FIRST}")

    def check_size(self, size: int) -> None:
        """Raise ApiError for a size that the model's vectors were not made for, as vLLM does."""
        if self.has_any_size or size in self.sizes:
            return
        known = f"its vectors have {', '.join(map(str, self.sizes))} or all" if self.sizes else "its vectors are whole"
        raise wrong("dimensions", f"this model was not made for vectors of {size} numbers: {known}")


def _sentence_transformers(model: Path, otherwise: Pooling) -> tuple[Pooling, bool, str]:
    """Return the pooling that a directory of Sentence Transformers names, whether vectors have a length of 1, and why
    this pooling is not possible; empty: it is. Without such a directory: `otherwise`, and a length of 1."""
    kinds = [kind for kind, _ in _modules(model)]
    if not kinds:
        return otherwise, True, ""
    if further := set(kinds).difference(_MODULES):
        return otherwise, True, f"this model's vectors need {', '.join(sorted(further))}, which is not served; {_HINT}"
    if not _are_in_order(kinds):
        return otherwise, True, f"this model's modules come in another order than {', '.join(_MODULES)}; {_HINT}"
    normalizes = "Normalize" in kinds
    modes = _pooling_fields(model)
    prefix = "pooling_mode_"
    found = sorted(name for name, value in modes.items() if name.startswith(prefix) and value is True)
    if isinstance(named := modes.get("pooling_mode"), str):  # newer files name it
        found = [f"{prefix}{named}"]
    if not found:
        return otherwise, normalizes, ""
    if len(found) == 1 and (pooling := _MODES.get(found[0].removeprefix(prefix))) is not None:
        return pooling, normalizes, ""
    return otherwise, normalizes, f"this model's pooling ({', '.join(found)}) is not served; {_HINT}"


def _dense_layers(model: Path, shape: Mapping[str, Any]) -> tuple[DenseLayer, ...]:
    """Return the dense layers that a directory of Sentence Transformers names. `shape`: the model's config.json.

    Raises:
        ValueError: one is not computed, or does not take what comes before it.
    """
    if not _are_in_order([kind for kind, _ in _modules(model)]):
        return ()  # the refusal says so, until a pooling is named
    layers: list[DenseLayer] = []
    size = shape.get("hidden_size", shape.get("dim"))  # DistilBERT's name
    for folder in (model / folder for kind, folder in _modules(model) if kind == _DENSE):
        layer = DenseLayer.read(folder, _read(folder / "config.json"))
        if size is not None and layer.weight.shape[1] != size:
            raise ValueError(f"{folder}: the layer takes {layer.weight.shape[1]} numbers, and gets {size}")
        size = len(layer.weight)
        layers.append(layer)
    return tuple(layers)


def _are_in_order(kinds: Sequence[str]) -> bool:
    """Return whether modules are of the kinds that are served, and come in their order."""
    return set(kinds) <= set(_MODULES) and list(kinds) == sorted(kinds, key=_MODULES.index)


def _modules(model: Path) -> list[tuple[str, str]]:
    """Return the kind and the folder of each module that a directory of Sentence Transformers names, in order."""
    modules = [module for module in _read(model / "modules.json", []) if isinstance(module, dict)]
    return [(str(each.get("type", "")).rpartition(".")[2], str(each.get("path", ""))) for each in modules]


def _pooling_fields(model: Path) -> Mapping[str, Any]:
    """Return the fields of the pooling module's own config.json; empty: there is none."""
    folder = next((folder for kind, folder in _modules(model) if kind == "Pooling"), "")
    found: Mapping[str, Any] = _read(model / folder / "config.json") if folder else {}
    return found


def _read(path: Path, otherwise: Any = None) -> Any:
    """Return the content of a file of JSON; where there is none, `otherwise`, or else an empty object."""
    if not path.is_file():
        return {} if otherwise is None else otherwise
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    expected = dict if otherwise is None else list
    if not isinstance(found, expected):
        raise ValueError(f"{path} is not JSON of {'an object' if expected is dict else 'a list'}")
    return found
