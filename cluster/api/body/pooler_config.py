"""Settings of vectors that requests leave open: from the model's directory, under the names and rules of vLLM."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from crossdock.cluster.api.body.classifier_head import ClassifierHead
from crossdock.cluster.api.errors import wrong

Pooling: TypeAlias = Literal["last", "mean"]

_MODULES = {"Transformer", "Pooling", "Normalize"}  # of Sentence Transformers, by the end of their names
_HINT = "model.pooler_config (--pooler-config) sets another"


class PoolerConfig(BaseModel):
    """How the hidden states of a text become a vector. None: as the model's directory says."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pooling_type: Literal["LAST", "MEAN"] | None = Field(
        None, description="LAST: of the last token; MEAN: the mean of all. null: the model's own, else LAST."
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
        pooling, normalizes, refusal = _sentence_transformers(model)
        if config.pooling_type is not None:
            pooling = "mean" if config.pooling_type == "MEAN" else "last"
            refusal = ""
        if config.use_activation is not None:
            normalizes = config.use_activation
        words = tuple(config.classifier_from_token or ())
        head = ClassifierHead.read(model, shape)
        if words and head is not None:
            raise ValueError("model.pooler_config: classifier_from_token is for models without a classification head")
        return cls(pooling, normalizes, has_any_size, tuple(sizes or ()), refusal, words, head)

    def check_size(self, size: int) -> None:
        """Raise ApiError for a size that the model's vectors were not made for, as vLLM does."""
        if self.has_any_size or size in self.sizes:
            return
        known = f"its vectors have {', '.join(map(str, self.sizes))} or all" if self.sizes else "its vectors are whole"
        raise wrong("dimensions", f"this model was not made for vectors of {size} numbers: {known}")


def _sentence_transformers(model: Path) -> tuple[Pooling, bool, str]:
    """Return the pooling that a directory of Sentence Transformers names, whether vectors have a length of 1, and why
    this pooling is not possible; empty: it is. Without such a directory: last, and a length of 1."""
    modules = [module for module in _read(model / "modules.json", []) if isinstance(module, dict)]
    if not modules:
        return "last", True, ""
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if further := set(kinds) - _MODULES:
        return "last", True, f"this model's vectors need {', '.join(sorted(further))}, which is not served; {_HINT}"
    normalizes = "Normalize" in kinds
    folder = next(
        (str(module.get("path")) for module, kind in zip(modules, kinds, strict=True) if kind == "Pooling"), ""
    )
    modes = _read(model / folder / "config.json") if folder else {}
    found = sorted(name for name, value in modes.items() if name.startswith("pooling_mode_") and value is True)
    if found == ["pooling_mode_mean_tokens"]:
        return "mean", normalizes, ""
    if found in ([], ["pooling_mode_lasttoken"]):
        return "last", normalizes, ""
    return "last", normalizes, f"this model's pooling ({', '.join(found)}) is not served; {_HINT}"


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
