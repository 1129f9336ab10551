"""Scales of e4m3 pages: powers of two with headroom, the same from every dtype and division of a model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from crossdock.workers.model.cut.collectives import Collectives
from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.load import load_model, wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.weights.fp8_scales import example_text, exponents, fingerprint_of, in_float32, scale_for
from crossdock.workers.replica.ranks.pool_layout import HeldLayers, held_layers, pool_spec
from tests.sweeps import rest_in_soak
from tests.workers.architectures import SERVED, build
from tests.workers.ranks import DIVISIONS, UNHURRIED_S, Ranks, saved

CHOSEN = ["llama", "gemma2", "gemma4_text", "gpt2", "phi3", "mixtral", "deepseek_v2", "gpt_oss"]


def test_scales_are_powers_of_two_with_headroom() -> None:
    largest = torch.cat([torch.logspace(-20, 20, 200), torch.tensor([448.0, 224.0, 448.0 / 3])])
    scale = scale_for(largest)
    assert scale.dtype == torch.float32
    assert torch.equal(torch.exp2(scale.log2().round()), scale)
    headroom = 448 * scale.double() / largest.double()
    assert headroom.min() >= 4
    assert headroom.max() <= 8
    assert exponents(scale) == [round(float(power)) for power in scale.double().log2()]
    assert scale_for(torch.zeros(2)).tolist() == [1.0, 1.0], "a head whose keys or values are all zero"


def test_example_text_covers_vocabulary_and_fits_model() -> None:
    ids = example_text(8192, 49152)
    assert len(set(ids.tolist())) == 256
    assert int(ids.min()) >= 0
    assert 40_000 < int(ids.max()) < 49152
    assert example_text(40, 10).max() == 9
    assert len(example_text(40, 10)) == 40


@pytest.mark.parametrize("fails", [False, True])
def test_model_in_float32_context_is_restored_afterwards(fails: bool) -> None:
    module = build("llama", {}).to(torch.bfloat16)
    before = dict(module.named_parameters())
    values = {name: parameter.clone() for name, parameter in before.items()}
    places = {name: parameter.data_ptr() for name, parameter in before.items()}
    seen: list[tuple[torch.dtype, torch.dtype, torch.dtype]] = []
    others: list[torch.dtype] = []

    def watch(linear: Any, args: tuple[Tensor], output: Tensor) -> None:
        seen.append((args[0].dtype, linear.weight.dtype, output.dtype))
        others.append(module.lm_head.weight.dtype)
        if fails:
            raise RuntimeError

    handle = module.model.layers[1].mlp.up_proj.register_forward_hook(watch, prepend=True)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        if fails:
            with pytest.raises(RuntimeError), in_float32(module):
                module(ids)
        else:
            with in_float32(module):
                inside = module(ids).logits
            torch.testing.assert_close(inside, build("llama", {}).to(torch.bfloat16).float()(ids).logits)
    assert seen == [(torch.float32,) * 3]
    assert others == [torch.bfloat16], "only the module that computes is in memory twice"
    handle.remove()
    after = dict(module.named_parameters())
    for name, parameter in before.items():
        assert after[name] is parameter
        assert parameter.data_ptr() == places[name]
        assert torch.equal(parameter, values[name])
    assert module(ids).logits.dtype == torch.bfloat16


def powers(model: LoadedModel) -> list[list[int]]:
    return [[*exponents(keys), *exponents(values)] for keys, values in model.scales]


@pytest.mark.parametrize("name", rest_in_soak(CHOSEN, "llama", "deepseek_v2"))
def test_scales_do_not_depend_on_dtype(name: str) -> None:
    """The same weights, computed in bfloat16 and in float32."""
    half = build(name, SERVED[name]).to(torch.bfloat16)
    whole = build(name, SERVED[name]).to(torch.bfloat16).to(torch.float32)
    scales = powers(wrap_module(half, LoadOptions(kv_cache_dtype="fp8")))
    assert scales == powers(wrap_module(whole, LoadOptions(kv_cache_dtype="fp8")))
    assert len(scales) == 4
    assert len({power for row in scales for power in row}) > 1


def test_scales_depend_only_on_their_heads_own_keys_or_values() -> None:
    """Keys of one head and values of another become 4 times as large: two powers up, and no other scale changes."""
    module = build("llama", {})
    before = powers(wrap_module(module, LoadOptions(kv_cache_dtype="fp8")))
    attention: Any = module.model.layers[-1].self_attn  # the last layer: no page depends on its output
    attention.k_proj.weight[:12] *= 4
    attention.v_proj.weight[12:] *= 4
    after = powers(wrap_module(module, LoadOptions(kv_cache_dtype="fp8")))
    assert after[:-1] == before[:-1]
    assert [new - old for new, old in zip(after[-1], before[-1], strict=True)] == [2, 0, 0, 2]


def held_part(rank: int, path: Path, tensor_size: int, num_stages: int) -> HeldLayers:
    links = Collectives(RankPosition(rank, tensor_size, num_stages), UNHURRIED_S)
    model = load_model(ModelSpec(str(path), "bfloat16", kv_cache_dtype="fp8"), links=links)
    return held_layers(model)


def assert_divisions_agree(ranks: Ranks, path: Path, divisions: list[tuple[int, int]]) -> None:
    model = load_model(ModelSpec(str(path), "bfloat16", kv_cache_dtype="fp8"))
    whole = pool_spec([held_layers(model)], 0, model, "m", 16, 8)
    assert whole.itemsize == 1
    assert whole.dtype.startswith("float8_e4m3fn, scales ")
    for tensor_size, num_stages in divisions:
        everyone = ranks.run(tensor_size * num_stages, held_part, path, tensor_size, num_stages)
        for rank in range(len(everyone)):
            assert pool_spec(everyone, rank, model, "m", 16, 8).compatibility == whole.compatibility


@pytest.mark.parametrize("options", [{}, {"num_key_value_heads": 1}], ids=str)
def test_scales_of_every_division_are_equal(ranks: Ranks, tmp_path: Path, options: dict[str, Any]) -> None:
    """Then their pages may be exchanged. One division has a head that two ranks hold."""
    assert_divisions_agree(ranks, saved(build("llama", options).to(torch.bfloat16), tmp_path), DIVISIONS)


@pytest.mark.soak
@pytest.mark.timeout(1200)  # two minutes alone on two slow cores
def test_scales_of_divided_real_weights_are_equal(ranks: Ranks, model_dir: Path) -> None:
    assert_divisions_agree(ranks, model_dir, [(2, 1)])


def test_other_scales_give_another_fingerprint() -> None:
    heads = [(layer, head, layer - 3, head + 2) for layer in range(3) for head in range(4)]
    same = fingerprint_of(heads)
    assert fingerprint_of(reversed(heads)) == same
    assert fingerprint_of([*heads, heads[5]]) == same, "held by two ranks"
    assert fingerprint_of([*heads, (1, 1, -1, 3)]) != same, "held by two ranks with different scales"
    for at in range(4):
        changed = [*heads[:5], tuple(value + (index == at) for index, value in enumerate(heads[5])), *heads[6:]]
        assert fingerprint_of(changed) != same
