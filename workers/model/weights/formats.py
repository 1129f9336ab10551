"""The formats of weights by the setting `quantization`: as a checkpoint has them, or made from plain ones."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig

from crossdock.kernels.cpu.linear import why_not_int8
from crossdock.kernels.options import CpuKernels, Kernel, LoadFormat, Quantization
from crossdock.workers.model.cut.collectives import Collectives
from crossdock.workers.model.cut.cut_model import cut_model
from crossdock.workers.model.cut.part import ModelPart
from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.loaders.held import HeldTensors
from crossdock.workers.model.weights.packed_layers import panel_bytes
from crossdock.workers.model.weights.scheme import PLAIN, ROUNDED, Scheme
from crossdock.workers.model.weights.weights import load_weights, model_on_meta, part_bytes


class WeightUse(NamedTuple):
    """Where and by what the products of a model are computed."""

    device: str  # cpu or cuda
    dtype: torch.dtype  # of activations
    num_ranks: int
    attention: str  # name of the attention backend
    cpu_kernels: CpuKernels


class WeightBytes(NamedTuple):
    """The memory that the weights of one rank take."""

    held: int  # bytes once the model is loaded
    loading: int  # bytes while it is loaded from a checkpoint of another dtype
    in_panels: int = 0  # further bytes on CPUs, whose kernels have a float32 scale for each output and group

    def on(self, device: str) -> int:
        """Return the bytes once the model is loaded on a device, `cpu` or another."""
        return self.held + (self.in_panels if device == "cpu" else 0)


class PlainWeights:
    """Weights as a checkpoint has them: in the dtype of the activations, or packed."""

    name = "null"  # the value of the setting `quantization` that asks for the format
    kernel: Kernel | None = None  # the kernel of all products; None: the fastest
    tolerance: float | None = None  # the error of logits, in norm, that it may cause; None: no more than rounding
    is_cut = True  # whether ranks can divide such weights
    scheme: Scheme | None = None  # made from plain weights as they are read; None: that of the checkpoint

    def why_not(self, use: WeightUse) -> str | None:
        """Return why `use` cannot compute products from such weights; None: it can."""
        return None

    def read(
        self,
        config: PretrainedConfig,
        path: Path,
        dtype: torch.dtype,
        links: Collectives | None,
        device: str = "cpu",
        load_format: LoadFormat = "auto",
        held: HeldTensors | None = None,
    ) -> tuple[Any, ModelPart | None]:
        """Read the weights in `path`, or the part that the rank of `links` holds, and return which part that is.

        Plain tensors are read to `device`, each by itself; a checkpoint with packed matrices comes to the host.
        `held`: see `load_weights`.

        Raises:
            CannotCut: the model cannot be divided among so many ranks.
            ValueError: transformers lets no other attention into the model, or there are no weights in safetensors.
        """
        cut = None
        if links is not None and links.position.size > 1:
            cut = partial(cut_model, position=links.position, collectives=links)
        return load_weights(config, path, dtype, cut, device, load_format, self.scheme, held=held)

    def count_bytes(self, config: PretrainedConfig, position: RankPosition, dtype: torch.dtype) -> WeightBytes:
        """Return the memory for the part of the rank at `position`. CannotCut: there is no such part."""
        module = model_on_meta(config, position, dtype, self.scheme)
        held = part_bytes(module)
        return WeightBytes(held, held, panel_bytes(module))


class Fp8Weights(PlainWeights):
    """Codes of e4m3 with a scale for each output, made from plain weights as they are read: packed from then on."""

    name = "fp8"
    scheme = ROUNDED


class Int8Weights(PlainWeights):
    """8-bit integers with a scale for each output of a product, made from plain weights when the layers are fused.

    Our native kernels compute them on CPUs, for replicas of one rank.
    """

    name = "int8"
    kernel = "int8"
    tolerance: float = 0.2
    is_cut = False

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
        plain = super().count_bytes(config, position, dtype).held
        module = model_on_meta(config, RankPosition(), dtype)
        tied = set(getattr(module, "all_tied_weights_keys", ()))
        products = {f"{name}.weight": part for name, part in module.named_modules() if isinstance(part, nn.Linear)}
        dropped = sum(linear.weight.nbytes for name, linear in products.items() if name not in tied)
        scales = sum(linear.out_features * torch.float32.itemsize for linear in products.values())
        added = scales + sum(linear.weight.numel() for linear in products.values())
        return WeightBytes(held=plain + added - dropped, loading=plain + added)


def format_of(quantization: Quantization | None, scheme: Scheme = PLAIN) -> PlainWeights:
    """Return the format of the weights that products read. `scheme`: of the checkpoint."""
    if quantization == "fp8" and scheme is PLAIN:
        return Fp8Weights()
    return Int8Weights() if quantization == "int8" else PlainWeights()
