"""How weights are stored: all that a format has to say. Each format is one object with a file of its own."""

from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from transformers import PretrainedConfig

from crossdock.kernels.options import CpuKernels, Kernel, LoadFormat
from crossdock.workers.model.cut.collectives import Collectives
from crossdock.workers.model.cut.part import ModelPart
from crossdock.workers.model.cut.position import RankPosition


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


class WeightFormat(Protocol):
    """One way to store the weights of products."""

    @property
    def name(self) -> str:
        """The value of the setting `quantization` that asks for the format."""

    @property
    def kernel(self) -> Kernel | None:
        """The kernel that computes all products; None: the kernels for plain weights, whichever is fastest."""

    @property
    def tolerance(self) -> float | None:
        """The relative error of logits, in norm, that the format may cause; None: no more than rounding."""

    @property
    def is_cut(self) -> bool:
        """Whether ranks can divide such weights."""

    def why_not(self, use: WeightUse) -> str | None:
        """Return why `use` cannot compute products from such weights; None: it can."""

    def read(
        self,
        config: PretrainedConfig,
        path: Path,
        dtype: torch.dtype,
        links: Collectives | None,
        device: str = "cpu",
        load_format: LoadFormat = "auto",
    ) -> tuple[Any, ModelPart | None]:
        """Read the weights in `path`, or the part that the rank of `links` holds, and return which part that is.

        Plain tensors are read to `device`, each by itself; a checkpoint with packed matrices comes to the host.

        Raises:
            CannotCut: the model cannot be divided among so many ranks.
            ValueError: transformers lets no other attention into the model, or there are no weights in safetensors.
        """

    def count_bytes(self, config: PretrainedConfig, position: RankPosition, dtype: torch.dtype) -> WeightBytes:
        """Return the memory for the part of the rank at `position`. CannotCut: there is no such part."""
