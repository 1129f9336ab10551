"""Count the bytes of weights that a loaded model holds, in whatever layout."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from crossdock.workers.model.weights.packed_layers import packed_tensors


@runtime_checkable
class HoldsWeights(Protocol):
    """A module whose weights lie in layouts of kernels, not in parameters."""

    @property
    def kernel_tensors(self) -> Sequence[Tensor]:
        """All tensors of the weights, of each layout that is in use."""


def held_bytes(module: nn.Module) -> int:
    """Return the bytes of all weights of a module, those that several parts share once."""
    tensors = [*module.parameters(), *packed_tensors(module)]
    for part in module.modules():
        if isinstance(part, HoldsWeights):
            tensors += part.kernel_tensors
    return sum({id(each) if each.is_mkldnn else each.data_ptr(): each.nbytes for each in tensors}.values())
