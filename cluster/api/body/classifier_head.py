"""The head of a model that classifies: from what is computed of a text to a number for each label."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from crossdock.cluster.api.body.float_tensor import float_tensor
from crossdock.workers.model.architecture import is_classifier
from crossdock.workers.model.weights.untrusted import read_json_if_any

_NAME = "score.weight"  # of decoders' heads; text encoders apply theirs in the replica
Activation: TypeAlias = Literal["softmax", "sigmoid", "none"]
_NAMED: Mapping[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
_ACTIVATIONS: Mapping[str, Activation] = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


@dataclass(frozen=True, slots=True)
class ClassifierHead:
    """A decoder's matrix without bias, applied to the hidden state of a text's last token. Or the activation alone of
    a text encoder's labels."""

    weight: NDArray[np.float32] | None  # [L, E]; None: replicas apply the head
    labels: Sequence[str]
    activation: Activation

    @classmethod
    def read(cls, model: Path, config: Mapping[str, Any], *, is_encoder: bool = False) -> Self | None:
        """Return the head in a model directory; None: its config.json names no class that has one.

        `is_encoder`: the model is a text encoder.

        Raises:
            ValueError: the head is neither that of a decoder nor of a text encoder, or not as its config.json says.
        """
        names = config.get("architectures")
        if not is_classifier(names):
            return None
        labels = config.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
        weight = None if is_encoder else _tensor(model, str(names[0]))
        number = len(labels) if weight is None else len(weight)
        if not isinstance(labels, dict) or sorted(labels) != sorted(map(str, range(number))):
            raise ValueError(f"{model / 'config.json'}: id2label must name labels 0 to {number - 1}")
        activation = _named_activation(model, config) or _ACTIVATIONS.get(
            str(config.get("problem_type")), "softmax" if number > 1 else "sigmoid"
        )
        return cls(weight, [str(labels[str(i)]) for i in range(number)], activation)

    @property
    def pooling(self) -> Literal["last", "labels"]:
        """Name the part of a text that replicas return: its last token's hidden state, or the numbers of its labels."""
        return "last" if self.weight is not None else "labels"

    def numbers(self, vector: NDArray[np.float32], *, is_active: bool) -> NDArray[np.float64]:
        """Return the number of each label: probabilities, or without activation logits.

        `vector`: a hidden state [E], or of a text encoder the logits [L].
        """
        found = vector if self.weight is None else self.weight @ vector
        logits: NDArray[np.float64] = found.astype(np.float64)
        if not is_active or self.activation == "none":
            return logits
        if self.activation == "sigmoid":
            return np.exp(-np.logaddexp(0.0, -logits))
        exponents = np.exp(logits - logits.max())
        return np.asarray(exponents / exponents.sum())


def _named_activation(model: Path, config: Mapping[str, Any]) -> Activation | None:
    """Return the activation that Sentence Transformers' fields of config.json name; None: they name none.

    Raises:
        ValueError: they name another one than those that are served.
    """
    own = config.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, dict) else None
    named = named or config.get("sbert_ce_default_activation_function")
    if named is None:
        return None
    found = _NAMED.get(str(named).rpartition(".")[2])
    if found is None:
        known = ", ".join(_NAMED)
        raise ValueError(f"{model / 'config.json'}: the activation of scores is {named!r}; served are {known} of torch")
    return found


def _tensor(model: Path, name: str) -> NDArray[np.float32]:
    """Read the head's matrix from a checkpoint in safetensors. ValueError: there is none, of two dimensions."""
    index = model / "model.safetensors.index.json"
    try:
        places = read_json_if_any(index).get("weight_map", {})
        found = float_tensor(model / str(places.get(_NAME, "model.safetensors")), _NAME)
    except (OSError, AttributeError, ValueError) as error:
        reason = f"{name} is served where a decoder's head is {_NAME} in safetensors, of floats"
        raise ValueError(f"model: {model}: {reason} ({error})") from None
    if found.ndim != 2:
        raise ValueError(f"model: {model}: {_NAME} must have two dimensions; it has {found.ndim}")
    return found
