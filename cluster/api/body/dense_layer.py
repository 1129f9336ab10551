"""The dense layers of Sentence Transformers: products of a pooled vector, as EmbeddingGemma and LaBSE have them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from crossdock.cluster.api.body.float_tensor import float_tensor

_ACTIVATIONS: Mapping[str, Callable[[NDArray[np.float32]], NDArray[np.float32]]] = {
    "Identity": lambda vector: vector,
    "Tanh": np.tanh,
    "ReLU": lambda vector: np.maximum(vector, np.float32(0)),
    "Sigmoid": lambda vector: np.exp(-np.logaddexp(np.float32(0), -vector)),
}
_NAMES = ("module_input_name", "module_output_name")  # of newer files: which of several vectors is read and written
_VECTOR = "sentence_embedding"


@dataclass(frozen=True, slots=True, eq=False)
class DenseLayer:
    """A matrix, a bias, and an activation, in float32 as in Sentence Transformers."""

    weight: NDArray[np.float32]  # [F, E]
    bias: NDArray[np.float32] | None  # [F]
    activation: str

    @classmethod
    def read(cls, folder: Path, fields: Mapping[str, Any]) -> Self:
        """Return the layer in the folder of a module. `fields`: those of its config.json.

        Raises:
            ValueError: the layer is not computed, or has no weights of its sizes in safetensors; the message names why.
        """
        activation = str(fields.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
        if activation not in _ACTIVATIONS:
            known = ", ".join(_ACTIVATIONS)
            raise ValueError(f"{folder}: activation {activation!r} is not computed; known are {known}")
        if others := [name for name in _NAMES if fields.get(name) not in (None, _VECTOR)]:
            raise ValueError(f"{folder}: {others[0]} is {fields[others[0]]!r}; only {_VECTOR!r} is computed")
        sizes = fields.get("out_features"), fields.get("in_features")
        file = folder / "model.safetensors"
        weight = float_tensor(file, "linear.weight")
        bias = float_tensor(file, "linear.bias") if fields.get("bias", True) else None
        if weight.shape != sizes or (bias is not None and bias.shape != sizes[:1]):
            shapes = [list(each.shape) for each in (weight, bias) if each is not None]
            raise ValueError(f"{file}: tensors are {shapes}; config.json has out_features and in_features {sizes}")
        return cls(weight, bias, activation)

    def __call__(self, vector: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the layer's output [F] for a vector [E]."""
        found: NDArray[np.float32] = self.weight @ vector
        return _ACTIVATIONS[self.activation](found if self.bias is None else found + self.bias)
