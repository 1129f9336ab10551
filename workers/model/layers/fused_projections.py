"""Projections of one input computed as one, q, k and v, gate and up: each alone is little work for a launch."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_OF_ONE_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@torch.inference_mode(False)  # weights are used in other modes too
def join_projections(module: nn.Module) -> Callable[[], None]:
    """Join the projections of every layer in which they are plain linears of one input.

    Their weights become views of one tensor. Returns a function that lets each be computed alone again.
    """
    joined: list[Any] = []
    for child, names in product(module.modules(), _OF_ONE_INPUT):
        linears: list[Any] = [getattr(child, name, None) for name in names]
        if all(type(linear) is nn.Linear for linear in linears) and _are_alike(linears):
            _JoinedLinears(linears)
            joined += linears

    def undo() -> None:
        for linear in joined:
            del linear.forward

    return undo


def joined_tensor(*parts: Tensor) -> Tensor | None:
    """Return the one tensor [sum of N, …] that the weights or biases of joined linears are views of; None: not one."""
    first = parts[0]
    num_rows = 0
    for weight in parts:
        is_next = weight.storage_offset() == first.storage_offset() + num_rows * first.stride(0)
        if not is_next or weight.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        num_rows += len(weight)
    whole: Tensor = first.detach().as_strided((num_rows, *first.shape[1:]), first.stride())
    return whole


def _are_alike(linears: Sequence[nn.Linear]) -> bool:
    return len({(linear.in_features, linear.weight.dtype, linear.bias is None) for linear in linears}) == 1


class _JoinedLinears:
    """Replaces the `forward` of several linears. The first to be called with an input computes the outputs of all.

    Each linear gives the same outputs as alone, in any order of calls: another input is computed again.
    """

    def __init__(self, linears: Sequence[Any]) -> None:
        self._weight = torch.cat([linear.weight for linear in linears])  # [sum of N, E]
        self._bias = torch.cat([linear.bias for linear in linears]) if linears[0].bias is not None else None
        self._sizes = [linear.out_features for linear in linears]
        self._input: Tensor | None = None
        self._parts: Sequence[Tensor] = ()
        for number, (linear, weight) in enumerate(zip(linears, torch.split(self._weight, self._sizes), strict=True)):
            linear.weight = nn.Parameter(weight, requires_grad=False)
            if self._bias is not None:
                linear.bias = nn.Parameter(torch.split(self._bias, self._sizes)[number], requires_grad=False)
            linear.forward = partial(self._part, number)

    def _part(self, number: int, x: Tensor) -> Tensor:
        if x is not self._input:
            self._input, self._parts = x, torch.split(F.linear(x, self._weight, self._bias), self._sizes, -1)
        part = self._parts[number]
        if number == len(self._sizes) - 1:  # no tensor is held beyond its layer
            self._input = None
            self._parts = ()
        return part
