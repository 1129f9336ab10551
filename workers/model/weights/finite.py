"""Refuse weights with NaN or infinity: all that a model computes from them is NaN, or a token that means nothing."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from crossdock.workers.model.weights.packed_layers import PackedExperts, PackedLinear

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check_finite(tensors: Mapping[str, Tensor], where: str) -> None:
    """Check that no number is NaN or infinity. ValueError: names `where` the tensors are from, and the first of them.

    The smallest and the largest number are NaN or infinite where one number is, and take one pass over memory without
    a copy. Integers and packed codes always are numbers.
    """
    floats = {name: each for name, each in tensors.items() if each.dtype in _FLOATS and each.numel()}
    if not floats:
        return
    ends = torch.stack([torch.stack(tensor.detach().aminmax()).double() for tensor in floats.values()])
    for (name, tensor), is_finite in zip(floats.items(), ends.isfinite().all(-1).tolist(), strict=True):
        if not is_finite:
            count = int((~tensor.isfinite()).sum())
            raise ValueError(f"{where}: {name} has NaN or infinity in {count} of its {tensor.numel()} numbers")


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a module by name, and the scales and offsets of its packed matrices."""
    return dict(module.named_parameters()) | dict(_packed(module))


def _packed(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, part in module.named_modules():
        if isinstance(part, PackedLinear):
            matrices = [part.packed]
        elif isinstance(part, PackedExperts):
            matrices = [matrix for parts in part.experts for matrix in parts]
        else:
            continue
        for number, matrix in enumerate(matrices):
            place = name if len(matrices) == 1 else f"{name}.{number}"
            yield f"{place}.scales", matrix.scales
            if matrix.offsets is not None:
                yield f"{place}.offsets", matrix.offsets
