"""The formats of weights by the setting `quantization`. To add a format: a file beside this one, and a line here."""

from collections.abc import Mapping

from crossdock.kernels.options import Quantization
from crossdock.workers.model.weights.int8 import Int8Weights
from crossdock.workers.model.weights.plain import PlainWeights
from crossdock.workers.model.weights.weight_format import WeightFormat

FORMATS: Mapping[Quantization | None, WeightFormat] = {None: PlainWeights(), "int8": Int8Weights()}


def format_of(quantization: Quantization | None) -> WeightFormat:
    """Return the format of the weights that products read."""
    return FORMATS[quantization]
