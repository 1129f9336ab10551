"""Check what every format of weights must keep: read, cut among ranks, counted in bytes, computed, refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from crossdock.kernels.cpu.choice import only
from crossdock.kernels.cpu.linear import ChosenLinear
from crossdock.kernels.options import Quantization
from crossdock.workers.model.cut.position import CannotCut, RankPosition
from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.model.weights.formats import PlainWeights, WeightUse, format_of
from crossdock.workers.replica.serving.machine import held_bytes
from tests.workers.architectures import build

BF16 = torch.bfloat16
SIZES = {"hidden_size": 64, "intermediate_size": 80, "head_dim": 32}
NAMES = pytest.mark.parametrize("name", [None, "int8"])  # test_packed_checkpoints.py has the others


def use(num_ranks: int = 1) -> WeightUse:
    return WeightUse("cpu", BF16, num_ranks, "cpp", "auto")


def usable(name: Quantization | None) -> PlainWeights:
    """Return a format, or skip the test where this CPU does not compute products from it."""
    weights = format_of(name)
    if reason := weights.why_not(use()):
        pytest.skip(f"needs another CPU for {name} weights: {reason}")
    return weights


def rounded(weight: Tensor, name: Quantization | None) -> Tensor:
    """Return a weight [N, K] in float32 as a format holds it."""
    if name is None:
        return weight.float()
    scales = weight.abs().amax(1, keepdim=True).float() / 127
    return (weight.float() / scales).round() * scales


@NAMES
def test_weights_of_a_checkpoint_are_read_as_they_are(name: Quantization | None, tmp_path: Path) -> None:
    module = build("llama", SIZES).to(BF16)
    module.save_pretrained(tmp_path)
    found, part = format_of(name).read(module.config, tmp_path, BF16, None)
    assert part is None
    assert all(torch.equal(found.state_dict()[key], value) for key, value in module.state_dict().items())


@NAMES
def test_parts_of_two_ranks_are_slices_of_the_whole_or_refused(name: Quantization | None, tmp_path: Path) -> None:
    module, weights = build("llama", SIZES).to(BF16), format_of(name)
    if not weights.is_cut:
        assert "one rank" in (weights.why_not(use(num_ranks=2)) or "")
        return
    module.save_pretrained(tmp_path)
    whole = module.state_dict()
    for rank in range(2):
        position = RankPosition(rank, 2)
        links: Any = SimpleNamespace(position=position)  # reading needs no other rank
        found, part = weights.read(module.config, tmp_path, BF16, links)
        assert part is not None
        assert any(".mlp." in key for key in part.slices)
        for key, value in found.state_dict().items():
            kept = part.slices.get(key)
            assert torch.equal(value, whole[key] if kept is None else kept.read(whole[key], value.dim())), key
        assert weights.count_bytes(module.config, position, BF16).held == sum(p.nbytes for p in found.parameters())
    with pytest.raises(CannotCut):
        weights.count_bytes(module.config, RankPosition(0, 1, 99), BF16)


@NAMES
@pytest.mark.parametrize("is_tied", [False, True])
def test_bytes_counted_are_bytes_held(name: Quantization | None, is_tied: bool) -> None:
    weights = usable(name)
    module = build("llama", SIZES | {"tie_word_embeddings": is_tied}).to(BF16)
    counted = weights.count_bytes(module.config, RankPosition(), BF16)
    held = sum(parameter.nbytes for parameter in module.parameters())
    if weights.kernel is not None:
        module = wrap_module(module, LoadOptions(quantization=name)).module
        stack: Any = module.model.layers[0]._stack
        products = [each for layer in stack._layers for each in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        packed = [product.formats[weights.kernel] for product in (*products, module.lm_head.linear)]
        held = sum(tensor.nbytes for each in packed for tensor in each.tensors)
        held += sum(parameter.nbytes for parameter in module.parameters())
        held += sum(layer.input_norm.nbytes + layer.post_norm.nbytes for layer in stack._layers)
    assert counted.held == held == held_bytes(module)
    assert counted.loading >= counted.held


@NAMES
def test_product_is_that_of_the_weights_as_they_are_held(name: Quantization | None) -> None:
    weights, generator = usable(name), torch.Generator().manual_seed(0)
    weight, x = (torch.randn(shape, generator=generator).to(BF16) for shape in ((160, 128), (9, 128)))
    expected = x.float() @ rounded(weight, name).T
    error = ChosenLinear(weight, only(weights.kernel or "torch"))(x).float() - expected
    assert error.norm() <= 0.01 * expected.norm(), "bfloat16, and inputs that are rounded too"


@NAMES
def test_logits_beyond_the_tolerance_are_refused(name: Quantization | None, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = usable(name)
    if weights.tolerance is None:
        return  # layers then run in transformers' own code
    monkeypatch.setattr(type(weights), "tolerance", 1e-9)
    with pytest.raises(ValueError, match=f"quantization {name}: (fused, )?logits differ"):
        wrap_module(build("llama", SIZES).to(BF16), LoadOptions(quantization=name))
