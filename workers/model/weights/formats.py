"""The formats of weights by the setting `quantization`. To add a format: a file beside this one, and a line here."""

from collections.abc import Mapping

from crossdock.kernels.options import CHECKPOINT_METHODS, Quantization
from crossdock.workers.model.weights.int8 import Int8Weights
from crossdock.workers.model.weights.plain import PlainWeights
from crossdock.workers.model.weights.weight_format import WeightFormat

_AS_STORED = PlainWeights()
FORMATS: Mapping[Quantization | None, WeightFormat] = {
    None: _AS_STORED,
    "int8": Int8Weights(),
    **dict.fromkeys(CHECKPOINT_METHODS, _AS_STORED),
}


def format_of(quantization: Quantization | None) -> WeightFormat:
    """Return the format of the weights that products read."""
    return FORMATS[quantization]
