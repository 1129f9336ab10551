"""Products in every format against float64, and the choice between them."""

import pytest
import torch
import torch.nn.functional as F

from crossdock.kernels.cpu import linear as linears
from crossdock.kernels.cpu.build import cpu_flags
from crossdock.kernels.cpu.choice import KernelChoice
from crossdock.kernels.cpu.linear import (
    FORMATS,
    ROWS,
    ChosenLinear,
    NativeLinear,
    Weights,
    fits_bfloat16,
    interleave,
    linear_cells,
    padded,
    rounds_rows,
    usable_kernels,
)
from crossdock.kernels.options import Kernel

needs_native = pytest.mark.skipif("avx512_bf16" not in cpu_flags(), reason="needs a CPU with AVX512-BF16")


@needs_native
@pytest.mark.parametrize(("N", "K"), [(16, 2), (48, 64), (80, 576), (960, 30), (1616, 128), (32, 4096)])
def test_own_product_is_exact_to_rounding_and_rows_are_independent(N: int, K: int) -> None:
    weight = torch.randn(N, K).bfloat16()
    linear = NativeLinear(weight)
    x = torch.randn(211, K).bfloat16()
    exact = x.double() @ weight.double().T
    whole = linear(x)
    torch.testing.assert_close(whole.double(), exact, rtol=2**-8, atol=1e-3 * K**0.5)
    for M in (0, 1, 2, 3, 5, 8, 13, 16, 17, 32, 33, 96, 97, 200):
        assert torch.equal(linear(x[:M]), whole[:M]), M
    numbers = torch.randint(N, (3, 5))
    assert torch.equal(linear.rows(numbers), weight[numbers])
    strided = torch.randn(7, 2 * K).bfloat16()[:, ::2]
    assert torch.equal(linear(strided), linear(strided.contiguous()))


@pytest.mark.parametrize(("N", "K"), [(16, 2), (48, 64), (80, 576), (960, 30), (1616, 128)])
def test_own_product_in_float32_is_exact_to_rounding_and_rows_are_independent(N: int, K: int) -> None:
    weight, x = torch.randn(N, K).bfloat16().float(), torch.randn(211, K)
    linear = NativeLinear(weight)
    exact = x.double() @ weight.double().T
    whole = linear(x)
    torch.testing.assert_close(whole.double(), exact, rtol=1e-5, atol=1e-6 * K)
    for M in (0, 1, 2, 3, 5, 7, 16, 17, 96, 97, 200):
        assert torch.equal(linear(x[:M]), whole[:M]), M
    assert torch.equal(linear.rows(torch.arange(N)), weight)


def test_float32_weight_with_more_digits_than_bfloat16_does_not_fit() -> None:
    weight = torch.ones(9, 1 << 20)  # more than is compared at once
    assert fits_bfloat16(weight)
    weight[8, 1] += 2**-9
    assert not fits_bfloat16(weight)
    assert fits_bfloat16(weight.bfloat16())


@pytest.mark.skipif(not rounds_rows(), reason="needs a CPU with AVX512-VNNI, or with AVX2 alone")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("N", "K"), [(16, 16), (48, 64), (80, 576), (960, 48), (1616, 144)])
def test_int8_product_is_that_of_the_rounded_numbers_and_rows_are_independent(
    N: int, K: int, dtype: torch.dtype
) -> None:
    """The oracle quantises in float64: a scale for each output, and for each 64 numbers of a row."""
    weight, x = torch.randn(N, K).bfloat16().to(dtype), torch.randn(211, K).bfloat16().to(dtype)
    x[3], x[5], x[7] = x[3] * 1e4, 0, x[7] * 1e-35  # other rows do not notice; nothing is divided by zero
    linear = FORMATS["int8"](weight, None)
    groups = F.pad(x.double(), (0, -K % 64)).view(len(x), -1, 64)
    x_scales = groups.abs().amax(-1, keepdim=True).clamp_min(1e-300) / 127
    rounded_x = ((groups / x_scales).round() * x_scales).view(len(x), -1)[:, :K]
    w_scales = weight.double().abs().amax(1, keepdim=True) / 127
    exact = rounded_x @ ((weight.double() / w_scales).round() * w_scales).T
    whole = linear(x)
    # The result is rounded to bfloat16; float32 rounds a few ties of the scaled numbers to the other side.
    error, size = (whole.double() - exact).norm(dim=1), exact.norm(dim=1)
    assert (error <= 2**-7 * size + 1e-30).all()
    for M in (0, 1, 2, 3, 5, 8, 13, 96, 97, 200):
        assert torch.equal(linear(x[:M]), whole[:M]), M


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_format_is_exact_to_rounding(dtype: torch.dtype) -> None:
    weight = torch.randn(160, 96).bfloat16().to(dtype)
    for kernel in usable_kernels(dtype):
        linear = FORMATS[kernel](weight, None)
        for rows in (1, 7, 64, 130):
            x = torch.randn(rows, 96).to(dtype)
            tolerance = {"rtol": 2**-8, "atol": 1e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-4}
            torch.testing.assert_close(linear(x).double(), x.double() @ weight.double().T, **tolerance)


def test_chosen_linear_packs_the_weight_once_for_each_kernel_and_switches_by_rows() -> None:
    weight, calls = torch.randn(32, 16), list[Kernel]()
    linear = ChosenLinear(weight, KernelChoice("torch", "onednn", 8))
    assert list(linear.formats) == ["torch", "onednn"]
    for kernel in linear.formats:
        linear.formats[kernel] = lambda x, kernel=kernel: calls.append(kernel) or x  # type: ignore[misc, assignment]
    for rows in (1, 7, 8, 300):
        linear(torch.randn(rows, 16))
    assert calls == ["torch", "torch", "onednn", "onednn"]


def test_interleaved_weight_alternates_sixteen_outputs() -> None:
    gate, up = torch.arange(48.0)[:, None].expand(48, 2), 100 + torch.arange(48.0)[:, None].expand(48, 2)
    both = interleave(gate, up)[:, 0].view(3, 2, 16)
    assert torch.equal(both[:, 0].flatten(), gate[:, 0])
    assert torch.equal(both[:, 1].flatten(), up[:, 0])


def test_padded_rows_are_few_different_numbers() -> None:
    assert [padded(rows) for rows in (1, 5, 8, 9, 16, 17, 250)] == [1, 5, 8, 16, 16, 24, 256]


def test_kernels_without_their_instructions_are_not_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "cpu_flags", lambda: frozenset({"avx2", "fma"}))
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert usable_kernels(torch.bfloat16) == ("torch",)
    assert usable_kernels(torch.float32) == ("native", "onednn", "torch")
    assert usable_kernels(torch.float32, fits=False) == ("onednn", "torch")
    with pytest.raises(
        ValueError, match="cpu_kernels native: it keeps weights in bfloat16, which does not hold those of"
    ):
        usable_kernels(torch.float32, "native", fits=False)
    with pytest.raises(ValueError, match="cpu_kernels native: this CPU has no AVX512-BF16; auto"):
        usable_kernels(torch.bfloat16, "native")
    with pytest.raises(ValueError, match="cpu_kernels onednn: oneDNN has no bfloat16 on this CPU; auto"):
        usable_kernels(torch.bfloat16, "onednn")
    assert usable_kernels(torch.bfloat16, "torch") == ("torch",)
    with pytest.raises(ValueError, match="cpu_kernels onednn: it is used for bfloat16 and float32; auto"):
        usable_kernels(torch.float16, "onednn")


@needs_native
def test_machine_that_cannot_compile_own_products_uses_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: str) -> None:
        raise OSError("g++ could not build decoder.cpp: error")

    monkeypatch.setattr(linears, "cpu_library", fails)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert usable_kernels(torch.bfloat16) == ("onednn", "torch")
    with pytest.raises(ValueError, match=r"cpu_kernels native: g\+\+ could not build decoder.cpp: error; auto"):
        usable_kernels(torch.bfloat16, "native")


@torch.inference_mode()
@pytest.mark.parametrize("weights", [Weights(64, 32, count=5), Weights(1 << 20, 64, count=1)], ids=str)
def test_measured_calls_are_short_and_stream_from_memory(weights: Weights) -> None:
    cells = linear_cells(weights, torch.float32, ["torch"], ROWS)
    assert set(cells) == {("torch", rows) for rows in ROWS}
    for (_, rows), calls in cells.items():
        out = calls[0]()
        assert isinstance(out, torch.Tensor)
        assert out.shape[0] == rows
        height = out.shape[1]
        assert 2 * rows * height * weights.in_features <= 1e8 * torch.get_num_threads()
        assert 4 * height * weights.in_features <= 8 << 20  # bytes
        assert len(calls) >= min(weights.count * weights.out_features // height, 4)
