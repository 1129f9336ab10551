"""Experts on GPUs by our grouped products, where they would be computed one by one and wait for the router.

Torch's own do before Hopper, and packed ones everywhere, whose codes our products read.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from crossdock.kernels.packages import has_package
from crossdock.workers.model.network import Network
from crossdock.workers.model.weights.packed_layers import PackedExperts

_NAME = "crossdock"
_ROWS_AT_ONCE = 4096  # tokens: bounds what products of all their experts take, 0.5 GB in Qwen3-30B-A3B


def needs_own_experts(model: Network) -> bool:
    """Return whether a GPU computes this model's experts without graphs otherwise, and Triton can compute them."""
    if not (model.attention.is_beside_triton and has_package("triton")):
        return False
    if _packed_of(model.module):
        return True
    return not _waits_for_none(model.device, model.dtype) and bool(_experts_of(model.module))


def use_own_experts(model: Network) -> Callable[[], None]:
    """Compute a model's experts by our products. Returns a function that undoes it."""
    for packed in _packed_of(model.module):
        packed.stack()
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
    return [each for each in _replaceable(module) if each.config._experts_implementation == "grouped_mm"]


def _replaceable(module: nn.Module) -> list[Any]:
    found: list[Any] = [each for each in module.modules() if hasattr(each, "has_post_expert_norm")]
    return [each for each in found if not each.has_post_expert_norm]


def _packed_of(module: nn.Module) -> list[PackedExperts]:
    """Return the packed experts; none where our products cannot read the codes of one of them, or one is not packed."""
    from crossdock.kernels.gpu.triton_experts import why_not_codes  # Triton is not installed everywhere

    weights = [getattr(each, name) for each in _replaceable(module) for name in _names(each)]
    packed = [each for each in weights if isinstance(each, PackedExperts)]
    for each in packed:
        forms = {
            (one.kind, one.group, one.scales.dtype, one.offsets is None) for parts in each.experts for one in parts
        }
        if len(forms) > 1 or any(why_not_codes(one) for parts in each.experts for one in parts):
            return []
    return packed if len(packed) == len(weights) else []


def _names(experts: Any) -> tuple[str, str]:
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def _forward(experts: Any, hidden: Tensor, chosen: Tensor, scales: Tensor) -> Tensor:
    """Return the outputs [T, E] of a layer's experts. chosen: [T, k], of each row; scales: [T, k], their shares."""
    blocks = zip(*(torch.split(each, _ROWS_AT_ONCE) for each in (hidden, chosen, scales)), strict=True)
    parts = [_some(experts, *block) for block in blocks]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _some(experts: Any, hidden: Tensor, chosen: Tensor, scales: Tensor) -> Tensor:
    from crossdock.kernels.gpu.triton_experts import Routing  # Triton is not installed everywhere
    from crossdock.kernels.gpu.triton_layer_steps import silu_and_multiply

    def of(name: str) -> tuple[Any, Tensor | None]:
        weight = getattr(experts, name)
        bias = getattr(experts, f"{name}_bias", None)
        if isinstance(weight, PackedExperts):
            return weight.stacked, bias
        return weight.mT if experts.is_transposed else weight, bias

    first, last = _names(experts)
    routing = Routing.of(chosen, experts.num_experts, is_partial=experts._is_expert_parallel)
    inner = routing.multiply(hidden, *of(first))
    if not experts.has_gate:
        inner = experts.act_fn(inner)
    elif type(experts)._apply_gate is _default_apply_gate and isinstance(experts.act_fn, nn.SiLU):
        inner = silu_and_multiply(inner)
    else:
        inner = experts._apply_gate(inner)
    out = routing.multiply(inner, *of(last), scales.flatten())
    return out.view(*chosen.shape, -1).sum(1).to(hidden.dtype)
