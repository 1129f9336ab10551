"""8-bit integers with a scale for each output of a product, made from plain weights when the layers are fused."""

from typing import Final, Literal

import torch
from torch import nn
from transformers import PretrainedConfig

from crossdock.kernels.cpu.linear import why_not_int8
from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.weights.plain import PlainWeights
from crossdock.workers.model.weights.weight_format import WeightBytes, WeightUse
from crossdock.workers.model.weights.weights import model_on_meta


class Int8Weights:
    """Weights that our own kernels compute on CPUs, for replicas of one rank."""

    _source = PlainWeights()
    name = "int8"
    kernel: Final[Literal["int8"]] = "int8"
    tolerance = 0.2
    is_cut = False
    read = _source.read  # the weights become integers when the layers are fused

    def why_not(self, use: WeightUse) -> str | None:
        if use.device != "cpu":
            return f"it is for CPUs, and the model runs on {use.device}"
        if use.num_ranks > 1:
            return "it is for replicas of one rank"
        if use.attention != "cpp":
            return f"it needs the attention that runs in C++, and attention runs in {use.attention}"
        return why_not_int8(use.dtype, use.cpu_kernels)

    def count_bytes(self, config: PretrainedConfig, position: RankPosition, dtype: torch.dtype) -> WeightBytes:
        """Return the memory for a whole model.

        An output projection that is tied to the embedding is counted as int8 only: the embedding keeps the other copy.
        """
        plain = self._source.count_bytes(config, position, dtype).held
        module = model_on_meta(config, RankPosition(), dtype)
        tied = set(getattr(module, "all_tied_weights_keys", ()))
        products = {f"{name}.weight": part for name, part in module.named_modules() if isinstance(part, nn.Linear)}
        dropped = sum(linear.weight.nbytes for name, linear in products.items() if name not in tied)
        scales = sum(linear.out_features * torch.float32.itemsize for linear in products.values())
        added = scales + sum(linear.weight.numel() for linear in products.values())
        return WeightBytes(held=plain + added - dropped, loading=plain + added)
