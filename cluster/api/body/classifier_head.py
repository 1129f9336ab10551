"""The head of a decoder that classifies: from a text's last hidden state to a number for each label."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

_SUFFIX = "ForSequenceClassification"  # of the classes of transformers that have such a head
_NAME = "score.weight"  # of decoders' heads; those of encoders have other names and layers
_MOST_HEADER_BYTES = 100 << 20  # as safetensors
_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_ACTIVATIONS = {"regression": "none", "single_label_classification": "softmax", "multi_label_classification": "sigmoid"}


@dataclass(frozen=True, slots=True)
class ClassifierHead:
    """A matrix without bias, applied to the hidden state of a text's last token."""

    weight: NDArray[np.float32]  # [L, E]
    labels: Sequence[str]
    activation: Literal["softmax", "sigmoid", "none"]

    @classmethod
    def read(cls, model: Path, config: Mapping[str, Any]) -> Self | None:
        """Return the head in a model directory; None: its config.json names no class that has one.

        Raises:
            ValueError: the head is not that of a decoder, or is not as its config.json says.
        """
        names = config.get("architectures")
        if not isinstance(names, list) or not str(name := next(iter(names), "")).endswith(_SUFFIX):
            return None
        weight = _tensor(model, name)
        labels = config.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
        if not isinstance(labels, dict) or sorted(labels) != sorted(map(str, range(len(weight)))):
            raise ValueError(f"{model / 'config.json'}: id2label must name labels 0 to {len(weight) - 1}")
        activation = _ACTIVATIONS.get(str(config.get("problem_type")), "softmax" if len(weight) > 1 else "sigmoid")
        return cls(weight, [str(labels[str(i)]) for i in range(len(weight))], activation)  # type: ignore[arg-type]

    def numbers(self, vector: NDArray[np.float32], *, is_active: bool) -> NDArray[np.float64]:
        """Return the number of each label for a hidden state [E]: probabilities, or without activation logits."""
        logits: NDArray[np.float64] = (self.weight @ vector).astype(np.float64)
        if not is_active or self.activation == "none":
            return logits
        if self.activation == "sigmoid":
            return np.exp(-np.logaddexp(0.0, -logits))
        exponents = np.exp(logits - logits.max())
        return np.asarray(exponents / exponents.sum())


def _tensor(model: Path, name: str) -> NDArray[np.float32]:
    """Read the head's matrix from a checkpoint in safetensors. ValueError: there is none, of two dimensions."""
    index = model / "model.safetensors.index.json"
    try:
        places = json.loads(index.read_bytes())["weight_map"] if index.is_file() else {}
        with (model / places.get(_NAME, "model.safetensors")).open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size)) if size < _MOST_HEADER_BYTES else {}
            entry = header[_NAME]
            begin, end = entry["data_offsets"]
            file.seek(8 + size + begin)
            found = np.frombuffer(file.read(end - begin), _DTYPES[entry["dtype"]]).reshape(entry["shape"])
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        reason = f"{name} is served where a decoder's head is {_NAME} in safetensors, of floats"
        raise ValueError(f"model: {model}: {reason} ({type(error).__name__}: {error})") from None
    if found.ndim != 2:
        raise ValueError(f"model: {model}: {_NAME} must have two dimensions; it has {found.ndim}")
    if entry["dtype"] == "BF16":  # the upper half of a float32
        found = (found.astype("<u4") << 16).view("<f4")
    return found.astype(np.float32)
