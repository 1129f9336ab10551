"""Kernels that add each row in one order: a row alone has the bits that it has in any batch, at any place."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from crossdock.kernels.attention import AttentionBatch, reference_paged_attention

pytest.importorskip("triton", reason="needs Triton: pip install triton")

from crossdock.kernels.gpu.triton_attention import paged_attention
from crossdock.kernels.gpu.triton_fixed_order import TILE, log_softmax, product
from crossdock.kernels.gpu.triton_layer_steps import add_and_norm

pytestmark = pytest.mark.usefixtures("dots_by_row")
BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)  # which Triton's interpreter multiplies by its bits
DTYPES = [torch.float32, torch.float16, BF16]
PIECES = [(0, 1), (7, 8), (3, 10), (1, TILE + 1), (TILE - 1, TILE + 3)]  # rows of a larger batch
PAGE, LENGTH = 8, 70  # tokens


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [True, False])
def test_product_of_a_row_is_the_same_in_any_rows(has_bias: bool, dtype: torch.dtype, device: str, seed: int) -> None:
    x, weight = (random(seed, n, 100).to(device, dtype) for n in (2 * TILE + 5, TILE + 9))
    bias = random(seed + 1, len(weight)).to(device, dtype) if has_bias else None
    whole = product(x[None], weight, bias)[0]
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    bound = max(3e-6, torch.finfo(dtype).eps)
    assert (whole.double() - exact).norm() <= bound * exact.norm()
    for start, end in PIECES:
        assert torch.equal(product(x[start:end].clone(), weight, bias), whole[start:end])


def test_log_softmax_of_a_row_is_the_same_in_any_rows(device: str, seed: int) -> None:
    scores = random(seed, 4, 2101).to(device) * 5  # rows that begin at unlike alignments
    scores[1, 4:] = -torch.inf  # as where the tail is cut
    whole = log_softmax(scores)
    torch.testing.assert_close(whole, scores.double().log_softmax(-1).float(), atol=1e-5, rtol=1e-5)
    for row in range(4):
        assert torch.equal(log_softmax(scores[row : row + 1].clone()), whole[row : row + 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_a_row_is_the_same_in_any_rows(dtype: torch.dtype, device: str, seed: int) -> None:
    hidden, weight = random(seed, 9, 100).to(device, dtype), random(seed + 1, 100).to(device, dtype)
    whole = add_and_norm(hidden, None, weight, 1e-5)
    for start, end in PIECES[:3]:
        assert torch.equal(add_and_norm(hidden[start:end].clone(), None, weight, 1e-5), whole[start : min(end, 9)])


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.float16),
        ({"window": 20}, torch.float32),
        ({"softcap": 3.0, "attention_chunk": 32}, torch.float32),
        pytest.param({}, torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_attention_of_a_row_is_the_same_in_any_chunks(
    options: dict[str, float], dtype: torch.dtype, device: str, seed: int
) -> None:
    """One chunk of a sequence, beside chunks and decodes of any lengths, and each row decoded alone."""
    num_pages = -(-LENGTH // PAGE)
    q = random(seed, LENGTH, 3, 16).to(device, dtype)
    k_pages, v_pages = (random(seed + i, num_pages, 1, PAGE, 16).to(device, dtype) for i in (1, 2))
    table = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).int()

    def rows(*spans: tuple[int, int]) -> list[Tensor]:
        """Return the outputs of parts of the sequence, one step; parts of one row at the front are decodes."""
        lengths = [end - start for start, end in spans]
        starts = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
        ends = torch.tensor([end for _, end in spans]).int().to(device)
        decodes = next((i for i, length in enumerate(lengths) if length > 1), len(lengths))
        tables = table[None].repeat(len(spans), 1).to(device)
        batch = AttentionBatch(starts, ends, tables, ends.long(), max(lengths), LENGTH, decodes)
        given = torch.cat([q[start:end] for start, end in spans])
        out = paged_attention(given, k_pages, v_pages, batch, scale=0.3, in_fixed_order=True, **options)
        exact = reference_paged_attention(given.float(), k_pages.float(), v_pages.float(), batch, scale=0.3, **options)
        assert (out.float() - exact).norm() <= max(1e-5, 3 * torch.finfo(dtype).eps) * exact.norm()
        return list(torch.split(out, lengths))

    (whole,) = rows((0, LENGTH))
    cuts = [0, 1, 30, 31, 50, LENGTH]
    spans = sorted(pairwise(cuts), key=lambda span: span[1] - span[0] > 1)
    for (start, end), found in zip(spans, rows(*spans), strict=True):
        assert torch.equal(found, whole[start:end])
    for number in (40, LENGTH - 1):
        assert torch.equal(rows((number, number + 1))[0], whole[number : number + 1])
