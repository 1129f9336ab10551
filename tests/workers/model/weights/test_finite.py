"""Weights with NaN or infinity are refused by name, at the start and as an update."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.new_weights import NewWeights
from crossdock.workers.model.weights.finite import check_finite
from tests.workers.architectures import build
from tests.workers.quantised import CASES, write

BROKEN = [float("nan"), float("inf"), float("-inf")]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", BROKEN)
def test_one_number_that_is_not_finite_is_found_wherever_it_is(dtype: torch.dtype, number: float) -> None:
    largest = torch.finfo(dtype).max
    fine = {"a": torch.full((7, 33), largest, dtype=dtype), "b": torch.full((70,), -largest, dtype=dtype)}
    integers = {"codes": torch.full((3,), 255, dtype=torch.uint8), "none": torch.empty(0)}
    check_finite(fine | integers, "here")
    for place in (0, 16, 69):
        broken = fine["b"].clone()
        broken[place] = number
        with pytest.raises(ValueError, match="here: b has NaN or infinity in 1 of its 70 numbers"):
            check_finite(fine | {"b": broken}, "here")


def saved(folder: Path, change: Callable[[Any], object] = lambda _: None, seed: int = 0) -> Path:
    module = build("llama", {})
    with torch.no_grad():
        module.model.norm.weight.add_(seed)
        change(module)
    module.save_pretrained(folder)
    return folder


def break_down(module: Any) -> None:
    module.model.layers[1].mlp.down_proj.weight[3, 5] = float("nan")


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_model_whose_weights_are_not_finite_does_not_start(tmp_path: Path, quantization: Any) -> None:
    spec = ModelSpec(str(saved(tmp_path, break_down)), "float32", quantization=quantization)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj\S* has NaN or infinity"):
        load_model(spec)


@pytest.mark.parametrize("name", ["awq"])
def test_packed_model_whose_scales_are_not_finite_does_not_start(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    write(tmp_path, case)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    scale = next(each for each in tensors if each.endswith(".scales"))
    tensors[scale].view(-1)[1] = float("inf")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"scales has NaN or infinity"):
        load_model(ModelSpec(str(tmp_path), "float32"))


@pytest.mark.parametrize("is_sent", [False, True])
def test_update_whose_weights_are_not_finite_is_refused_and_the_present_ones_stay(
    tmp_path: Path, is_sent: bool
) -> None:
    model = load_model(ModelSpec(str(saved(tmp_path / "first")), "float32"))
    weights, before = NewWeights(model), {name: each.clone() for name, each in model.module.state_dict().items()}
    broken = saved(tmp_path / "broken", break_down, 1)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj\.weight has NaN or infinity in 1 of"):
        weights.read_tensors(load_file(broken / "model.safetensors"), {}) if is_sent else weights.read(broken)
    assert not weights.is_read
    assert all(torch.equal(before[name], each) for name, each in model.module.state_dict().items())
    weights.read(saved(tmp_path / "good", seed=1))
    weights.put()
    assert torch.equal(model.module.state_dict()["model.norm.weight"], before["model.norm.weight"] + 1)
