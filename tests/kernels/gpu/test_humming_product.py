"""Weights as humming-kernels gets them, beside a stand-in that is written after its API (0.1.19)."""

import logging
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crossdock.kernels.gpu import humming_product
from crossdock.kernels.gpu.humming_product import HummingProduct, why_not_humming
from crossdock.kernels.packed import TABLES, Kind, PackedMatrix
from crossdock.workers.model.layers.coded_products import CodedLinear, compute_by_humming
from crossdock.workers.model.weights.packed_layers import PackedLinear, put_linear

BITS = {"uint4": 4, "uint8": 8, "float4e2m1": 4, "float8e4m3": 8}
CUDA = torch.device("cuda")


@dataclass(eq=False)
class StandIn(nn.Module):
    """`HummingLayer`: parameters of given shapes, filled by name, then laid out once, then called with rows."""

    shape_n: int
    shape_k: int
    weight_config: dict[str, Any]
    torch_dtype: torch.dtype

    def __post_init__(self) -> None:
        super().__init__()
        config, self.is_transformed = dict(self.weight_config), False
        assert config.pop("quant_method") == "humming"
        self.bits, self.group = BITS[config["dtype"]], config["group_size"] or self.shape_k
        self.kind, self.height = config.pop("dtype"), config.pop("group_size_n", 1)
        self.has_zeros = config.pop("has_zero_point", False)
        assert set(config) == {"group_size"}
        assert self.shape_n % 64 == self.shape_k % 32 == 0, "tiles"
        assert self.height == 1 or self.height >= 64, "blocks"
        groups = self.shape_k // self.group
        shapes = {
            "weight": ((self.shape_n, self.shape_k * self.bits // 32), torch.int32),
            "weight_scale": (
                (self.shape_n // self.height, groups),
                self.torch_dtype if self.height == 1 else torch.float32,
            ),
        }
        if self.has_zeros:
            shapes["zero_point"] = ((self.shape_n * self.bits // 32, groups), torch.int32)
        for name, (shape, dtype) in shapes.items():
            setattr(self, name, nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False))

    def load_from_tensors(self, tensors: dict[str, Tensor]) -> None:
        for name, parameter in self.named_parameters():
            assert (tensors[name].shape, tensors[name].dtype) == (parameter.shape, parameter.dtype), name
        self.load_state_dict(tensors)

    def transform(self) -> None:
        self.is_transformed = True

    def forward(self, inputs: Tensor) -> Tensor:
        assert self.is_transformed
        assert inputs.is_contiguous()
        assert inputs.dim() == 2
        assert inputs.dtype == self.torch_dtype
        codes = self._unpacked(self.weight)
        if self.kind == "float4e2m1":
            values = torch.tensor(TABLES["e2m1"])[codes]
        elif self.kind == "float8e4m3":
            values = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
        elif self.has_zeros:
            values = codes - self._unpacked(self.zero_point.T.contiguous()).T.repeat_interleave(self.group, 1)
        else:
            values = codes - 2 ** (self.bits - 1)
        scales = self.weight_scale.float().repeat_interleave(self.group, 1).repeat_interleave(self.height, 0)
        return (inputs.float() @ (values * scales).T).to(inputs.dtype)

    def _unpacked(self, words: Tensor) -> Tensor:
        each = torch.arange(0, 32, self.bits)
        return (words[..., None].long() >> each & (1 << self.bits) - 1).flatten(1)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("humming.layer")
    module.HummingLayer = StandIn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "humming", ModuleType("humming"))
    monkeypatch.setitem(sys.modules, "humming.layer", module)
    monkeypatch.setattr(humming_product, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))


def matrix(kind: Kind, group: int, zeros: bool = False, height: int = 1) -> PackedMatrix:
    """Return a matrix [128, 256] whose scales bfloat16 holds, so that nothing is rounded."""
    generator, per_code = torch.Generator().manual_seed(group), 2 if kind in ("int4", "e2m1") else 1
    codes = torch.randint(0, 256, (128, 256 // per_code), generator=generator, dtype=torch.uint8)
    codes = torch.where(codes & 127 == 127, 0, codes) if kind == "e4m3" else codes
    codes = codes.view({"int8": torch.int8, "e4m3": torch.float8_e4m3fn}.get(kind, torch.uint8))
    grid = (128 // height, 256 // group)
    scales = (torch.rand(grid, generator=generator) + 0.1).bfloat16().float()
    offsets = -scales * torch.randint(0, 16, grid, generator=generator) if zeros else None
    return PackedMatrix(kind, codes, scales, offsets, group, height)


CASES: list[tuple[Kind, int, bool, int]] = [
    ("int4", 32, False, 1),
    ("int4", 128, True, 1),
    ("int8", 256, False, 1),
    ("int8", 64, True, 1),
    ("e2m1", 32, False, 1),
    ("e4m3", 128, False, 64),
    ("e4m3", 256, False, 128),
    ("e4m3", 256, False, 1),
]


@pytest.mark.parametrize(("kind", "group", "zeros", "height"), CASES)
def test_products_by_humming_are_those_of_the_matrix(kind: Kind, group: int, zeros: bool, height: int) -> None:
    weight, x = matrix(kind, group, zeros, height), torch.randn(5, 256).bfloat16()
    assert why_not_humming(weight, torch.bfloat16, CUDA) is None
    exact = (x.double() @ weight.dequantise(torch.float64).T).bfloat16()
    torch.testing.assert_close(HummingProduct(weight, torch.bfloat16)(x), exact)
    assert HummingProduct(weight, torch.bfloat16)(x[:0]).shape == (0, 128)


def test_columns_in_an_order_of_their_own_are_put_in_order_first() -> None:
    plain = matrix("int4", 32)
    weight = PackedMatrix("int4", plain.codes, plain.scales, None, 32, columns=torch.randperm(256))
    x = torch.randn(3, 256).bfloat16()
    exact = (x.double() @ weight.dequantise(torch.float64).T).bfloat16()
    torch.testing.assert_close(HummingProduct(weight, torch.bfloat16)(x), exact)


@pytest.mark.parametrize(
    ("weight", "dtype", "reason"),
    [
        (matrix("int4", 32), torch.float32, "rows are neither bfloat16 nor float16"),
        (matrix("int4", 32).part(0, 0, 32), torch.bfloat16, "no multiple of 64"),
        (matrix("int4", 8), torch.bfloat16, "groups of 8 columns"),
        (PackedMatrix("int4", torch.zeros(64, 32).byte(), torch.ones(64, 1), torch.ones(64, 1), 64),
         torch.bfloat16, "no whole zero points"),
    ],
)  # fmt: skip
def test_what_the_kernels_do_not_take_is_named(weight: PackedMatrix, dtype: torch.dtype, reason: str) -> None:
    assert reason in str(why_not_humming(weight, dtype, CUDA))


def test_linears_of_a_model_turn_where_their_matrices_fit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = nn.Sequential(nn.Linear(256, 128), nn.Linear(256, 128, bias=False))
    put_linear(module[0], matrix("int4", 32))
    put_linear(module[1], matrix("int4", 8))
    check, x = humming_product.why_not_humming, torch.randn(2, 3, 256).bfloat16()
    expected = module[0](x)
    monkeypatch.setattr(
        "crossdock.workers.model.layers.coded_products.why_not_humming",
        lambda packed, dtype, _: check(packed, dtype, CUDA),
    )
    with caplog.at_level(logging.WARNING):
        assert compute_by_humming(module, torch.bfloat16) == "humming 1 of 2"
    assert "1 of 2 packed weights are dequantised for each product: groups of 8 columns" in caplog.text
    assert "about 11 times as long" in caplog.text
    assert (type(module[0]), type(module[1])) == (CodedLinear, PackedLinear)
    assert (module[0](x) - expected).norm() < 0.01 * expected.norm()  # where weights are dequantised, they are rounded
