"""How recurrent layers are divided among ranks. tests/workers/replica/ranks/test_worker_group.py has all families."""

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crossdock.workers.model.cut.collectives import Collectives
from crossdock.workers.model.cut.part import SliceRange, TensorSlice
from crossdock.workers.model.cut.position import CannotCut, RankPosition
from crossdock.workers.model.load import load_model, wrap_module
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.weights.weights import model_on_meta
from tests.sweeps import rest_in_soak
from tests.workers.architectures import DIVISIBLE, RECURRENT, SERVED, build
from tests.workers.model.cut.test_parts import assert_parts_equal_whole
from tests.workers.ranks import UNHURRIED_S, Ranks, saved

LINEAR, FULL = "linear_attention", "full_attention"


def module_of(name: str, options: dict[str, Any]) -> nn.Module:
    """Return a model of which no bias is zero and no norm or decay is one: else a wrong slice of these is not seen."""
    module = build(name, SERVED[name] | DIVISIBLE.get(name, {}) | options)
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.2)
    return module


def kept(rank: int, path: Path, tensor_size: int) -> tuple[int, str]:
    """On one rank: return the elements of a request's state, and why states are whole."""
    links = Collectives(RankPosition(rank, tensor_size), UNHURRIED_S)
    model = load_model(ModelSpec(str(path), "float32"), links=links)
    assert model.states is not None
    return sum(prod(each.shape) for each in model.states.shapes), model.part.why_states_are_whole


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lfm2 conv", {"conv_bias": True}),
        ("bamba", {"mamba_n_groups": 1, "mamba_proj_bias": True}),  # one B and C for all heads
        ("falcon_h1", {"mamba_n_groups": 2, "mamba_rms_norm": True}),  # a norm for each group
        ("falcon_h1", {"mamba_n_groups": 1, "mamba_rms_norm": True, "mamba_norm_before_gate": True}),
        pytest.param("nemotron_h", {"n_groups": 1, "use_bias": True}, marks=pytest.mark.soak),
        pytest.param("falcon_h1", {"mamba_n_groups": 1, "mamba_rms_norm": True}, marks=pytest.mark.soak),
    ],
)
def test_parts_of_mixers_of_any_settings_equal_whole(
    ranks: Ranks, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    assert_parts_equal_whole(ranks, saved(module_of(name, options), tmp_path), [(2, 1)])


@pytest.mark.parametrize("name", rest_in_soak(["qwen3_next", "granitemoehybrid"], "qwen3_next"))
def test_parts_of_mixers_with_less_heads_than_ranks_equal_whole(ranks: Ranks, tmp_path: Path, name: str) -> None:
    path = saved(module_of(name, {}), tmp_path)
    assert_parts_equal_whole(ranks, path, [(4, 1)])
    ((whole, _),) = ranks.run(1, kept, path, 1)
    for elements, why in ranks.run(4, kept, path, 4):
        assert elements == whole
        assert "cannot be divided among 4 ranks" in why


@pytest.mark.parametrize("name", rest_in_soak(RECURRENT, "qwen3_next", "bamba"))
def test_states_of_two_ranks_add_up_to_the_whole(ranks: Ranks, tmp_path: Path, name: str) -> None:
    path = saved(module_of(name, {}), tmp_path)
    ((whole, _),) = ranks.run(1, kept, path, 1)
    assert ranks.run(2, kept, path, 2) == [(whole // 2, "")] * 2


def test_ranks_of_one_group_of_heads_keep_its_inputs_whole(ranks: Ranks, tmp_path: Path) -> None:
    """Count the inputs of B and C twice: all heads share them, and both ranks keep them."""
    module = module_of("bamba", {"mamba_n_groups": 1})
    model = wrap_module(module)
    assert model.states is not None
    inputs = next(shape.shape for shape in model.states.shapes if shape.is_convolution)
    shared = 2 * 2 * 8 * inputs[-1]  # layers, B and C, their size, inputs
    whole = sum(prod(each.shape) for each in model.states.shapes)
    found = ranks.run(2, kept, saved(module, tmp_path), 2)
    assert found == [((whole + shared) // 2, "")] * 2


def test_uneven_heads_are_divided(ranks: Ranks, tmp_path: Path) -> None:
    options = {"linear_num_key_heads": 3, "linear_num_value_heads": 6}
    assert_parts_equal_whole(ranks, saved(module_of("qwen3_5_text", options), tmp_path), [(2, 1)])


def test_stage_without_attention_is_refused_with_the_reason() -> None:
    config = build("qwen3_next", SERVED["qwen3_next"] | {"layer_types": [LINEAR, LINEAR, FULL, FULL]}).config
    with pytest.raises(CannotCut, match=r"no layer from 0 to 1 has attention.* smaller pipeline_parallel_size"):
        model_on_meta(config, RankPosition(0, 1, 2), torch.float32)


def test_slice_of_a_packed_parameter_is_that_of_its_tensors() -> None:
    """A checkpoint may hold the convolutions over queries, keys and values, which are unequally wide, apart."""
    kept = TensorSlice(0, (SliceRange(2, 4, 4), SliceRange(2, 4, 4), SliceRange(3, 6, 6)))
    tensors = [torch.arange(4), torch.arange(4, 8), torch.arange(8, 14)]
    apart: list[Tensor] = [kept.read(tensor, 1) for tensor in tensors]
    assert torch.equal(torch.cat(apart), kept.read(torch.cat(tensors), 1))
    assert kept.shape_of([14]) == [7]
