"""Compare what loaded layers compute with products of the checkpoint's own bytes.

The probe of the logits takes the loaded module as its reference, so it cannot see weights that were read wrongly. Here
the reference is made of bytes of the files and their scales, without transformers.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from crossdock.workers.model.cut.part import ModelPart
from crossdock.workers.model.loaders.files import Files, open_files
from crossdock.workers.model.weights.heap import trim_heap
from crossdock.workers.model.weights.packed_layers import PackedLinear
from crossdock.workers.model.weights.stored_tensors import StoredTensor
from crossdock.workers.model.weights.tensor_check import NamedTensors

_NUM_LINEARS = 16  # of all, at equal distances
_NUM_INPUTS = 4
_LINEARS = (nn.Linear, PackedLinear)
_INPUT_SIZE = 16.0  # so that biases, which are not checked, are small beside the products
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.02}
"""The relative error in norm that products in a dtype may have: a few times its rounding."""


def check_products(module: Any, part: ModelPart | None, named: NamedTensors, held: Files | None = None) -> None:
    """Check some rows of some linears of a module, or of one rank's part of it, before layers are replaced.

    `held`: the tensors, where no files have them.

    Raises:
        ValueError: products are not those of the checkpoint's bytes; the message names the layer.
    """
    linears = {f"{name}.weight": each for name, each in module.named_modules() if type(each) in _LINEARS}
    found = [source for source in _single_sources(named) if source[0] in linears]
    checked = found[:: max(1, len(found) // _NUM_LINEARS)]
    with held or (open_files(Path(checked[0][1].file).parent) if checked else Files()) as files:
        files.expect(lambda: [stored.read_rows(files, _sample(stored, part, name)[0]) for name, stored in checked])
        for name, stored in checked:
            dtype = getattr(linears[name], "weight", next(module.parameters())).dtype
            error = _error(linears[name], stored, files, dtype, part, name)
            if not error <= _TOLERANCES[dtype]:
                raise ValueError(
                    f"{Path(stored.file).name}: as it was loaded, {name} gives products that differ by {error:.1%} in "
                    f"norm from those of the bytes in the file; the model would give wrong results"
                )
            trim_heap()  # gives back what the matrices of this check took


@torch.no_grad()
def _error(
    linear: Any, stored: StoredTensor, files: Files, dtype: torch.dtype, part: ModelPart | None, name: str
) -> float:
    """Return how much products of a linear, or a rank's part of it, differ in norm from those of rows of the file."""
    rows, sample, columns = _sample(stored, part, name)
    generator = torch.Generator().manual_seed(0)
    x = (_INPUT_SIZE * torch.randn(_NUM_INPUTS, len(columns), generator=generator)).to(dtype)
    expected = x.double() @ stored.rows(files, rows)[:, columns].T
    if linear.bias is not None:
        expected += linear.bias[sample.to(linear.bias.device)].double().cpu()
    device = x.device if isinstance(linear, PackedLinear) else linear.weight.device
    found = linear.forward(x.to(device)).cpu()[:, sample].double()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def _sample(stored: StoredTensor, part: ModelPart | None, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return some rows of a matrix, their places in the part of a rank, and the columns that the part has."""
    kept = None if part is None else part.slices.get(name)
    rows = torch.arange(stored.shape[0])
    columns = torch.arange(stored.shape[1])
    if kept is not None:
        rows = kept.read(rows[:, None], 2)[:, 0] if kept.dim == 0 else rows
        columns = kept.read(columns[None], 2)[0] if kept.dim == 1 else columns
    sample = torch.tensor([0, len(rows) // 3, 2 * len(rows) // 3, len(rows) - 1])
    return rows[sample], sample, columns


def _single_sources(named: NamedTensors) -> Iterator[tuple[str, StoredTensor]]:
    """Yield (parameter, its tensor) of each matrix that is one tensor in a file, or one packed matrix."""
    sources: dict[str, list[tuple[StoredTensor, str | None]]] = defaultdict(list)
    for key, name, pattern in named.places():
        sources[name].append((named.stored[key], pattern))
    for name, found in sources.items():
        tensor, pattern = found[0]
        if len(found) == 1 and pattern is None and tensor.shape == named.shape_of(name):
            yield name, tensor
