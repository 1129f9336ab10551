"""Compare what loaded layers compute with products of the checkpoint's own bytes.

The probe of the logits takes the loaded module as its reference, so it cannot see weights that were read wrongly. Here
the reference is made of bytes of the files and their scales, without transformers.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from crossdock.workers.model.cut.part import ModelPart
from crossdock.workers.model.weights.tensor_check import NamedTensors, StoredTensor, is_scale

_NUM_LINEARS = 16  # of all, at equal distances
_NUM_INPUTS = 4
_INPUT_SIZE = 16.0  # so that biases, which are not checked, are small beside the products
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.02}
"""The relative error in norm that products in a dtype may have: a few times its rounding."""


def check_products(module: Any, part: ModelPart | None, named: NamedTensors) -> None:
    """Check some rows of some linears of a module, or of one rank's part of it, before layers are replaced.

    Raises:
        ValueError: products are not those of the checkpoint's bytes; the message names the layer.
    """
    linears = {f"{name}.weight": each for name, each in module.named_modules() if type(each) is nn.Linear}
    found = [source for source in _single_sources(named) if source[0] in linears]
    for name, key, scale in found[:: max(1, len(found) // _NUM_LINEARS)]:
        linear = linears[name]
        weight, stored = linear.weight, named.stored[key]
        rows, columns = torch.arange(stored.shape[0]), torch.arange(stored.shape[1])
        if part is not None and (kept := part.slices.get(name)) is not None:
            rows = kept.read(rows[:, None], 2)[:, 0] if kept.dim == 0 else rows
            columns = kept.read(columns[None], 2)[0] if kept.dim == 1 else columns
        sample = torch.tensor([0, len(rows) // 3, 2 * len(rows) // 3, len(rows) - 1])
        generator = torch.Generator().manual_seed(0)
        x = (_INPUT_SIZE * torch.randn(_NUM_INPUTS, len(columns), generator=generator)).to(weight.dtype)
        given = stored_rows(named.stored, key, scale, rows[sample])
        expected = x.double() @ given[:, columns].T
        if linear.bias is not None:
            expected += linear.bias.double()[sample]
        with torch.no_grad():
            error = (linear.forward(x)[:, sample].double() - expected).norm() / expected.norm().clamp_min(1e-30)
        if not error <= _TOLERANCES[weight.dtype]:
            raise ValueError(
                f"{Path(stored.file).name}: as it was loaded, {name} gives products that differ by {float(error):.1%} "
                f"in norm from those of the bytes in the file; the model would give wrong results"
            )


def stored_rows(stored: Mapping[str, StoredTensor], key: str, scale: str | None, rows: Tensor) -> Tensor:
    """Return rows [R, K] of the matrix `key` of a checkpoint in float64, times its scales: one, or one for each block.

    `rows`: [R] int64, their numbers in the file. `scale` is the name of the scales; None: there are none.
    """
    with safe_open(stored[key].file, framework="pt", device="cpu") as reader:
        matrix = reader.get_slice(key)
        values: Tensor = torch.cat([matrix[row : row + 1].double() for row in rows.tolist()])
    if scale is None:
        return values
    with safe_open(stored[scale].file, framework="pt", device="cpu") as reader:
        grid: Tensor = reader.get_tensor(scale)
    grid = torch.exp2(grid.double() - 127) if grid.dtype == torch.uint8 else grid.double()
    grid = grid.reshape(grid.shape if grid.dim() == 2 else (1, 1))
    blocks = grid[rows // (stored[key].shape[0] // grid.shape[0])]
    return values * blocks.repeat_interleave(values.shape[1] // grid.shape[1], 1)


def _single_sources(named: NamedTensors) -> Iterator[tuple[str, str, str | None]]:
    """Yield (parameter, its tensor, the tensor of its scales or None) of each matrix that is one tensor in a file."""
    sources: dict[str, list[tuple[str, str | None]]] = defaultdict(list)
    for key, name, pattern in named.places():
        sources[name].append((key, pattern))
    for name, found in sources.items():
        scales = [key for key, pattern in found if is_scale(pattern) and not key.endswith("activation_scale")]
        values = [key for key, pattern in found if not is_scale(pattern) and named.keeps_values(pattern)]
        if len(values) == 1 and len(scales) <= 1 and named.stored[values[0]].shape == named.shape_of(name):
            yield name, values[0], next(iter(scales), None)
