"""Joined projections give what each gives alone."""

from typing import Any

import pytest
import torch
from torch import nn

from crossdock.workers.model.layers.fused_projections import join_projections, joined_tensor
from crossdock.workers.model.load import wrap_module
from tests.workers.architectures import SERVED, build
from tests.workers.model.paged import assert_near, in_random_steps, monolithic, random_prompts

# Groups of heads, biases, norms of queries, windows, experts, several kinds of attention.
JOINED = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "olmo2", "opt", "qwen3_moe", "gpt_oss", "starcoder2"]


def projections(module: nn.Module) -> list[Any]:
    names = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    return [child for name, child in module.named_modules() if name.endswith(names)]


@pytest.mark.parametrize("name", JOINED)
def test_joined_projections_give_same_logits_and_can_be_undone(name: str) -> None:
    module = build(name, SERVED[name])
    for key, parameter in module.named_parameters():
        if key.endswith("bias"):  # else zero
            torch.nn.init.normal_(parameter, std=0.1)
    prompts = random_prompts(5, 23, 40)
    expected = [monolithic(module, prompt) for prompt in prompts]
    model = wrap_module(module)
    num_bytes = sum(parameter.nbytes for parameter in module.parameters())
    undo = join_projections(module)
    assert all("forward" in vars(linear) for linear in projections(module))
    assert sum(parameter.nbytes for parameter in module.parameters()) == num_bytes
    assert_near(in_random_steps(model, prompts, seed=3), expected)
    undo()
    assert not any("forward" in vars(linear) for linear in projections(module))
    assert_near(in_random_steps(model, prompts, seed=3), expected)


class Three(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, n, **options) for n in (6, 4, 2))


@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_joined_projections_in_any_order_equal_separate_ones(bias: bool) -> None:
    module = Three(bias=bias)
    linears = [module.q_proj, module.k_proj, module.v_proj]
    x, y = torch.randn(2, 3, 8).unbind()
    alone = {(number, id(given)): linear(given) for number, linear in enumerate(linears) for given in (x, y)}
    join_projections(module)

    in_order, mixed = [(0, x), (1, x), (2, x)], [(2, y), (1, y), (0, y), (0, x), (1, y), (2, x), (1, x), (1, x), (0, x)]
    for number, given in in_order + mixed:
        torch.testing.assert_close(linears[number](given), alone[number, id(given)])


def test_weight_of_joined_projections_is_whole_and_not_a_copy() -> None:
    module = Three()
    whole = torch.cat([module.q_proj.weight, module.k_proj.weight, module.v_proj.weight])
    assert joined_tensor(module.q_proj.weight, module.k_proj.weight, module.v_proj.weight) is None
    join_projections(module)
    weight = joined_tensor(module.q_proj.weight, module.k_proj.weight, module.v_proj.weight)
    assert weight is not None
    assert torch.equal(weight, whole)
    assert weight.data_ptr() == module.q_proj.weight.data_ptr()
    assert joined_tensor(module.q_proj.weight, module.v_proj.weight) is None


def test_projections_that_differ_are_not_joined() -> None:
    module = nn.ModuleList([Three(), Three(), nn.Linear(8, 8)])
    module[0].k_proj = nn.Linear(9, 4)
    module[1].v_proj = nn.Linear(8, 2, bias=False)
    join_projections(module)
    assert not any("forward" in vars(child) for child in module.modules())
