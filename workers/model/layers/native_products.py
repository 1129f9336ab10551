"""Linear layers of a small module, such as a head that drafts, by packed.cpp."""

from typing import Any

import torch
from torch import Tensor, nn

from crossdock.kernels.cpu.huge_pages import HugePages
from crossdock.kernels.cpu.linear import NativeLinear, fits_bfloat16, usable_kernels


class _NativeProduct(nn.Module):
    """A linear layer without bias by packed.cpp."""

    def __init__(self, linear: nn.Linear, memory: HugePages) -> None:
        super().__init__()
        self._product = NativeLinear(linear.weight, memory)

    def forward(self, x: Tensor) -> Tensor:  # [T, K] to [T, N]
        return self._product(x)


def use_native_products(module: nn.Module, dtype: torch.dtype) -> bool:
    """Compute a module's products by packed.cpp on a CPU, if it holds all numbers of the weights, which are of `dtype`.

    Returns whether it does.
    """
    linears: dict[str, Any] = {name: each for name, each in module.named_modules() if isinstance(each, nn.Linear)}
    fits = all(
        each.bias is None and each.out_features % 16 == 0 and fits_bfloat16(each.weight) for each in linears.values()
    )
    if "native" not in usable_kernels(dtype, fits=fits):
        return False
    memory = HugePages()  # one for all: small matrices share its pages
    for name, linear in linears.items():
        path, _, own = name.rpartition(".")
        setattr(module.get_submodule(path), own, _NativeProduct(linear, memory))
    return True
