"""The packed product against float64."""

import pytest
import torch

from crossdock.kernels.build import cpu_flags
from crossdock.kernels.decoder import PackedLinear

pytestmark = pytest.mark.skipif("avx512_bf16" not in cpu_flags(), reason="needs a CPU with AVX512-BF16")


@pytest.mark.parametrize(("N", "K"), [(16, 2), (48, 64), (80, 576), (960, 30), (1616, 128)])
def test_product_is_exact_to_rounding_and_rows_are_independent(N: int, K: int) -> None:
    weight = torch.randn(N, K).bfloat16()
    linear = PackedLinear(weight)
    x = torch.randn(211, K).bfloat16()
    exact = x.double() @ weight.double().T
    whole = linear(x)
    torch.testing.assert_close(whole.double(), exact, rtol=2**-8, atol=1e-3 * K**0.5)
    for M in (1, 2, 3, 5, 8, 13, 96, 97, 200):
        assert torch.equal(linear(x[:M]), whole[:M]), M
    strided = torch.randn(7, 2 * K).bfloat16()[:, ::2]
    assert torch.equal(linear(strided), linear(strided.contiguous()))
