"""Count the bytes of weights that a loaded model holds, in whatever layout."""

from torch import nn

from crossdock.workers.model.weights.packed_layers import packed_tensors


def held_bytes(module: nn.Module) -> int:
    """Return the bytes of all weights of a module, those that several parts share once."""
    tensors = [*module.parameters(), *packed_tensors(module)]
    for part in module.modules():
        tensors += getattr(part, "kernel_tensors", ())  # of weights in layouts of kernels, which are no parameters
    return sum({id(each) if each.is_mkldnn else each.data_ptr(): each.nbytes for each in tensors}.values())
