"""Products from codes, where layers run in transformers' own code: packed linears and experts, rank by rank."""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crossdock.kernels.cpu.huge_pages import HugePages
from crossdock.kernels.cpu.linear import ChosenLinear, Weights, linear_choice, usable_packed_kernels
from crossdock.kernels.cpu.packed_linear import CodeForm, PackedPanels, why_not_packed
from crossdock.kernels.gpu.humming_product import HummingProduct, why_not_humming
from crossdock.kernels.options import CpuKernels
from crossdock.kernels.packed import (
    PackedMatrix,
    join_rows,
    multiplies_e4m3,
    packed_product,
    require_e4m3_products,
)
from crossdock.workers.model.weights.heap import trim_heap
from crossdock.workers.model.weights.packed_layers import PackedExperts, PackedLinear

logger = logging.getLogger(__name__)

Parts: TypeAlias = Sequence[PackedMatrix]
"""Matrices whose rows lie one after the other in one weight."""

Product: TypeAlias = ChosenLinear | HummingProduct
"""A product with one weight: x [T, K] to [T, N]."""

_TIMES_PLAIN = 11
"""Dequantising moves 22 bytes for each weight, through float32; a plain bfloat16 weight is read in 2. By arithmetic."""

_MOST_ERROR = 0.02  # in norm, of products with rounded scales beside those of dequantised weights


class CodedLinear(nn.Module):
    """A linear over codes in a kernel's own layout: x [..., K] to [..., N]."""

    product: Product
    bias: Tensor | None

    @property
    def kernel_tensors(self) -> Sequence[Tensor]:
        """The tensors of the weight."""
        return self.product.tensors

    def forward(self, x: Tensor) -> Tensor:
        out = _multiplied(x, self.product)
        return out if self.bias is None else out + self.bias


class CodedExperts(nn.Module):
    """The weights of experts over codes in a kernel's own layout, in the place of their parameter."""

    products: Sequence[Product]

    @property
    def layouts(self) -> Sequence[str]:
        """The kernels in whose layouts each weight is kept."""
        first = self.products[0]
        return tuple(first.formats) if isinstance(first, ChosenLinear) else ("humming",)

    @property
    def kernel_tensors(self) -> Sequence[Tensor]:
        """The tensors of all weights."""
        return [each for product in self.products for each in product.tensors]

    def tensors_of(self, expert: int) -> Sequence[Tensor]:
        """Return the tensors of one expert."""
        return self.products[expert].tensors

    def __getitem__(self, expert: Any) -> "CodedWeight":
        return CodedWeight(self.products[int(expert)])


class CodedWeight:
    """The weight of one expert, [N, K] of `F.linear` or [K, N] of `@`. Its codes are read by these products alone."""

    def __init__(self, product: Product) -> None:
        self.product = product

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        if func not in _PRODUCTS or kwargs or len(args) != 2 or not isinstance(args[0], Tensor):
            raise TypeError(f"an expert's packed weight is read by products alone, not by {func}")
        return _multiplied(args[0], args[1].product)


_PRODUCTS = (F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__)


def compute_from_codes(module: nn.Module, dtype: torch.dtype, setting: CpuKernels) -> str:
    """Let the packed linears and experts of a CPU model compute from their codes. Returns the kernels, as text.

    The codes move to panels one matrix after the other, so that memory holds them once. Matrices that have no panels
    stay as they are, and are dequantised for each product.
    """
    kernels = usable_packed_kernels(dtype, setting)
    parts = list(module.modules())
    linears: list[Any] = [each for each in parts if isinstance(each, PackedLinear) and _have_panels([each.packed])]
    experts: list[Any] = [
        each
        for each in parts
        if isinstance(each, PackedExperts) and each.stacked is None and all(map(_have_panels, each.experts))
    ]
    counts = Counter(_kind_of([each.packed]) for each in linears)
    counts.update(_kind_of(matrices) for each in experts for matrices in each.experts)
    if not kernels or not counts:
        return ""
    choices = {
        (shape, form): linear_choice("packed weights", Weights(*shape, count), dtype, kernels, form)
        for (shape, form), count in counts.items()
    }
    memory = HugePages()

    def product_of(matrices: Parts) -> ChosenLinear:
        choice = choices[_kind_of(matrices)]
        return ChosenLinear(PackedPanels.of(*matrices, memory=memory, frees=True), choice, memory)

    for linear in linears:
        _turn(linear, CodedLinear, "packed", product=product_of([linear.packed]))
    for each in experts:
        _turn(each, CodedExperts, "experts", products=[product_of(one) for one in each.experts])
    return ", or ".join(dict.fromkeys(map(str, choices.values())))


def compute_by_humming(module: nn.Module, dtype: torch.dtype) -> str:
    """Let the packed linears and experts of a GPU's model compute by humming-kernels. Returns how many do, as text.

    Matrices move to its layout one after the other, so that memory holds them once. Others stay as they are: those with
    a reason of `why_not_humming`, those that are multiplied in e4m3, and experts whose codes our products read.

    Where some are dequantised for each product, a warning says why, and how much slower that is.

    Raises:
        ValueError: a product of a few rows differs from that of the dequantised weight. Or this torch multiplies e4m3
            beside the current stream.
    """
    counts: Counter[str] = Counter()
    dequantised: Counter[str] = Counter()  # by the reason
    for part in list(module.modules()):
        if isinstance(part, PackedLinear):
            products = _by_humming([[part.packed]], dtype)
            if products:
                _turn(part, CodedLinear, "packed", product=products[0])
            elif multiplies_e4m3(part.packed, dtype, part.packed.codes.device):
                require_e4m3_products(part.packed.codes.device)
            else:
                dequantised[_why_dequantised([part.packed], dtype)] += 1
        elif isinstance(part, PackedExperts) and part.stacked is None:
            products = _by_humming(part.experts, dtype)
            if products:
                _turn(part, CodedExperts, "experts", products=products)
            else:
                dequantised[_why_dequantised(chain.from_iterable(part.experts), dtype)] += 1
        else:
            continue
        counts["humming" if products else "others"] += 1
    if dequantised:
        logger.warning(
            "%d of %d packed weights are dequantised for each product: %s. A step of few rows takes about %d times as "
            "long with them as with plain bfloat16 weights: install humming-kernels, or serve plain weights",
            *(dequantised.total(), counts.total(), dequantised.most_common(1)[0][0], _TIMES_PLAIN),
        )
    return f"humming {counts['humming']} of {counts.total()}" if counts["humming"] else ""


def _why_dequantised(matrices: Iterable[PackedMatrix], dtype: torch.dtype) -> str:
    reasons = (why_not_humming(each, dtype, each.codes.device) for each in matrices)
    return next((reason for reason in reasons if reason), "they are of unlike forms")


def _by_humming(weights: Sequence[Parts], dtype: torch.dtype) -> Sequence[Product]:
    """Return a product for each of the weights; none: not all of them can be computed so."""
    whole = []
    for parts in weights:
        device = parts[0].codes.device
        if any(why_not_humming(each, dtype, device) or multiplies_e4m3(each, dtype, device) for each in parts):
            return []
        whole.append(join_rows(parts))
    return [_checked(matrix, dtype) for matrix in whole]


def _checked(matrix: PackedMatrix, dtype: torch.dtype) -> Product:
    product = HummingProduct(matrix, dtype)
    (rows, columns) = matrix.shape
    x = torch.linspace(-1, 1, 3 * columns, device=matrix.codes.device).sin().view(3, columns).to(dtype)
    expected = packed_product(x, matrix).float()
    error = float((product(x).float() - expected).norm() / expected.norm().clamp_min(1e-30))
    if not error <= _MOST_ERROR:
        raise ValueError(
            f"humming-kernels: products with a matrix {matrix.kind} {[rows, columns]} in groups of {matrix.group} "
            f"differ by {error:.1%} in norm; uninstall humming-kernels, and weights are dequantised for each product"
        )
    return product


def _turn(module: Any, kind: type[nn.Module], old: str, **new: Any) -> None:
    """Make a module one of another kind, which keeps its hooks, and free the memory of its attribute `old`."""
    vars(module).pop(old)
    module.__class__ = kind
    vars(module).update(new)
    trim_heap()


def _have_panels(matrices: Parts) -> bool:
    """Report whether matrices can be one weight in panels."""
    is_joined = len({CodeForm.of(each) for each in matrices}) == 1
    is_joined &= len(matrices) == 1 or all(each.columns is None for each in matrices)
    return is_joined and all(why_not_packed(each) is None for each in matrices)


def _kind_of(matrices: Parts) -> tuple[tuple[int, int], CodeForm]:
    """Return the shape and the form of the weight of `matrices`: all that its seconds depend on."""
    rows = sum(each.shape[0] for each in matrices)
    return (rows, matrices[0].shape[1]), CodeForm.of(matrices[0])


def _multiplied(x: Tensor, product: Product) -> Tensor:
    return product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
