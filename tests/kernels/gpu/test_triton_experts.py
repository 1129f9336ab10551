"""Products of experts in Triton against float64: interpreted on CPUs, compiled where there is a GPU."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton: pip install triton")

from crossdock.kernels.gpu.triton_experts import FEW, Routing, why_not_codes
from crossdock.kernels.options import CodeKind
from crossdock.kernels.packed import ExpertCodes, PackedMatrix

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


@pytest.mark.parametrize(
    ("kind", "group", "has_offsets", "T", "scale_dtype"),
    [("e2m1", 32, False, 3, torch.bfloat16), ("int4", 16, True, 40, torch.float32), ("int4", 128, False, 3, None)],
)
def test_rows_of_coded_experts_match_dequantised_ones(
    kind: CodeKind, group: int, has_offsets: bool, T: int, scale_dtype: torch.dtype | None, device: str, seed: int
) -> None:
    """Every code, groups narrower and wider than a tile, a last tile that is not full. 40 rows take the larger tile."""
    rng, K = torch.Generator().manual_seed(seed), max(96, group)
    x, chosen, scales = torch.randn(T, K, generator=rng), chosen_by("some", T, 2, rng), torch.rand(T * 2, generator=rng)
    matrices = []
    for _ in range(E):
        codes = torch.randint(256, (N, K // 2), generator=rng, dtype=torch.uint8)
        grid = torch.rand(N, K // group, generator=rng).to(scale_dtype or torch.float32)
        offsets = torch.randn(grid.shape, generator=rng) if has_offsets else None
        matrices.append(PackedMatrix(kind, codes, grid, offsets, group).map(lambda each: each.to(device)))
    assert not any(map(why_not_codes, matrices))
    coded, plain = ExpertCodes.of(matrices), torch.stack([each.dequantise(torch.float32) for each in matrices])
    assert torch.equal(coded.matrix(3).dequantise(torch.float32), plain[3])
    routing, x, scales = Routing.of(chosen.to(device), E), x.to(device), scales.to(device)
    inner = routing.multiply(x, coded)
    torch.testing.assert_close(inner, routing.multiply(x, plain), atol=1e-4, rtol=1e-5)
    x = x[routing.order // 2]
    torch.testing.assert_close(
        routing.multiply(x, coded, None, scales), routing.multiply(x, plain, None, scales), atol=1e-4, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("kind", "group", "block_rows", "reason"),
    [("int8", 32, 1, "codes are int8"), ("int4", 48, 1, "no power of two"), ("e2m1", 32, 2, "rows share scales")],
)
def test_matrix_that_is_no_expert_code_names_the_reason(
    kind: CodeKind, group: int, block_rows: int, reason: str
) -> None:
    codes = torch.zeros(4, 96 if kind == "int8" else 48, dtype=torch.int8 if kind == "int8" else torch.uint8)
    assert reason in why_not_codes(
        PackedMatrix(kind, codes, torch.ones(4 // block_rows, 96 // group), None, group, block_rows)
    )
