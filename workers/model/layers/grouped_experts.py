"""Experts on GPUs by our grouped products, where torch's own would compute expert by expert and wait for the router."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from crossdock.kernels.backend import has_package
from crossdock.workers.model.network import Network

_NAME = "crossdock"
_ROWS_AT_ONCE = 4096  # tokens: bounds what products of all their experts take, 0.5 GB in Qwen3-30B-A3B


def needs_own_experts(model: Network) -> bool:
    """Return whether a GPU computes this model's experts without graphs in torch, and Triton can compute them."""
    if not (model.attention.is_beside_triton and has_package("triton")):
        return False
    return not _waits_for_none(model.device, model.dtype) and bool(_experts_of(model.module))


def use_own_experts(model: Network) -> Callable[[], None]:
    """Compute a model's experts by our products. Returns a function that undoes it."""
    ALL_EXPERTS_FUNCTIONS.register(_NAME, _forward)
    before = model.module.get_experts_implementation()
    model.module.set_experts_implementation(_NAME)

    def undo() -> None:
        model.module.set_experts_implementation(before)

    return undo


def _waits_for_none(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch's grouped products are one launch: in bfloat16, on compute capability 9 and 10."""
    if device.type != "cuda":
        return True
    return dtype is torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in (9, 10)


def _experts_of(module: nn.Module) -> list[Any]:
    """Return the experts that transformers would compute by torch's grouped products, which packed experts are not."""
    found: list[Any] = [each for each in module.modules() if hasattr(each, "has_post_expert_norm")]
    plain = [each for each in found if not each.has_post_expert_norm and not each._is_expert_parallel]
    return [each for each in plain if each.config._experts_implementation == "grouped_mm"]


def _forward(experts: Any, hidden: Tensor, chosen: Tensor, scales: Tensor) -> Tensor:
    """Return the outputs [T, E] of a layer's experts. chosen: [T, k], of each row; scales: [T, k], their shares."""
    blocks = zip(*(torch.split(each, _ROWS_AT_ONCE) for each in (hidden, chosen, scales)), strict=True)
    parts = [_some(experts, *block) for block in blocks]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _some(experts: Any, hidden: Tensor, chosen: Tensor, scales: Tensor) -> Tensor:
    from crossdock.kernels.gpu.triton_experts import Routing  # Triton is not installed everywhere
    from crossdock.kernels.gpu.triton_layer_steps import silu_and_multiply

    def of(name: str) -> tuple[Tensor, Tensor | None]:
        weight = getattr(experts, name)
        return weight.mT if experts.is_transposed else weight, getattr(experts, f"{name}_bias", None)

    routing = Routing.of(chosen, experts.num_experts)
    inner = routing.multiply(hidden, *of("gate_up_proj" if experts.has_gate else "up_proj"))
    if not experts.has_gate:
        inner = experts.act_fn(inner)
    elif type(experts)._apply_gate is _default_apply_gate and isinstance(experts.act_fn, nn.SiLU):
        inner = silu_and_multiply(inner)
    else:
        inner = experts._apply_gate(inner)
    out = routing.multiply(inner, *of("down_proj"), scales.flatten())
    return out.view(*chosen.shape, -1).sum(1).to(hidden.dtype)
