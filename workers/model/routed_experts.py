"""Compute experts for the rows that are routed to them alone, where transformers computes all rows in all experts.

Llama 4's experts get a copy of all rows for each expert, multiplied by the router's score, which is mostly 0.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor


def skip_idle_experts(module: Any) -> None:
    """Let Llama 4's experts on a CPU skip rows of zeros. On GPUs the number of rows is not known before a step."""
    for experts in module.modules():
        if type(experts).__name__ == "Llama4TextExperts" and experts.gate_up_proj.device.type == "cpu":
            experts.forward = partial(_compute, experts)


def _compute(experts: Any, routed: Tensor) -> Tensor:
    """Return the outputs [E * T, D] of `routed` [E * T, D]: an expert has no bias, so a row of zeros stays one."""
    by_expert = routed.view(len(experts.gate_up_proj), -1, routed.shape[-1])
    is_routed, out = by_expert.any(-1), torch.zeros_like(by_expert)  # [E, T], [E, T, D]
    for expert in is_routed.any(-1).nonzero().flatten().tolist():
        rows = is_routed[expert]
        gate, up = (by_expert[expert, rows] @ experts.gate_up_proj[expert]).chunk(2, dim=-1)
        out[expert, rows] = (up * experts.act_fn(gate)) @ experts.down_proj[expert]
    return out.view_as(routed)
