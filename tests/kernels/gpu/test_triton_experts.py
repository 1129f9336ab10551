"""Products of experts in Triton against float64: interpreted on CPUs, compiled where there is a GPU."""

import importlib.util

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton: pip install triton", allow_module_level=True)

from crossdock.kernels.gpu.triton_experts import FEW, Routing

pytestmark = pytest.mark.usefixtures("poisoned_memory")

E, K, N = 5, 70, 130


def chosen_by(kind: str, T: int, k: int, rng: torch.Generator) -> Tensor:
    """Return the experts [T, k] of each row: two experts have none of them, or one expert has all."""
    if kind == "one":
        return torch.full((T, 1), 3)
    return torch.rand(T, E - 2, generator=rng).topk(k).indices + 1


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 2e-3)])
@pytest.mark.parametrize(("kind", "T", "k"), [("some", 1, 2), ("some", 90, 2), ("one", FEW.rows + 1, 1)])
def test_rows_of_experts_match_float64(
    dtype: torch.dtype, tolerance: float, kind: str, T: int, k: int, device: str, seed: int
) -> None:
    """Up and down, with biases; the second weight lies with its outputs adjacent. 90 rows take the larger tile."""
    rng = torch.Generator().manual_seed(seed)
    x, chosen, scales = torch.randn(T, K, generator=rng), chosen_by(kind, T, k, rng), torch.rand(T * k, generator=rng)
    up, down, bias = (torch.randn(*shape, generator=rng) / 8 for shape in ((E, N, K), (E, N, K), (E, N)))
    x, scales, up, down, bias = (each.to(device, dtype) for each in (x, scales, up, down, bias))
    routing, of_pair = Routing.of(chosen.to(device), E), chosen.flatten()
    inner = routing.multiply(x, up, bias)
    assert inner.dtype == dtype
    order = routing.order.cpu()
    exact = torch.einsum("pk,pnk->pn", x.cpu().double().repeat_interleave(k, 0), up.cpu().double()[of_pair])
    exact += bias.cpu().double()[of_pair]
    torch.testing.assert_close(inner.cpu().double(), exact[order], atol=20 * tolerance, rtol=tolerance)
    out = routing.multiply(inner, down.mT, None, scales)
    rows = torch.empty(T * k, N, dtype=torch.float64).index_copy_(0, order, inner.cpu().double())
    exact = torch.einsum("pn,pnk->pk", rows, down.cpu().double()[of_pair]) * scales.cpu().double()[:, None]
    torch.testing.assert_close(out.cpu().double(), exact, atol=20 * tolerance, rtol=tolerance)
