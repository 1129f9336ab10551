"""The kernel that draws tokens against the same draw in float64: interpreted on CPUs, compiled where there is a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from crossdock.workers.model.sampling import sampler
from crossdock.workers.model.sampling.row import SampleRow
from crossdock.workers.model.sampling.sampler import PendingTokens, hashed_ids, row_keys, sample
from crossdock.workers.schedule.request.submission import SamplingParams

pytest.importorskip("triton", reason="needs Triton: pip install triton")

from crossdock.kernels.gpu import triton_sampling
from crossdock.kernels.gpu.triton_sampling import draw_tokens

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts and blocks so small that a short row has several of both."""
    monkeypatch.setattr(triton_sampling, "PART", 256)
    monkeypatch.setattr(triton_sampling, "BLOCK", 64)


def exact_scores(logits: Tensor, rows: list[SampleRow]) -> Tensor:
    """Compute the scores that the draw compares, [N, V] float64; the noise longhand, of the same bits."""
    keys = row_keys(rows, torch.device("cpu")).long() & 0xFFFFFFFF
    bits = _mixed((hashed_ids(logits.shape[-1], torch.device("cpu")).long() & 0xFFFFFFFF ^ keys[0]) * keys[1])
    uniform = ((bits ^ 0x80000000) - 0x80000000).float().abs().double() * 2.0**-31
    gumbel = -(-(-uniform.clamp(2.0**-32, 1 - 2.0**-24)).log1p()).log()
    temperatures = torch.tensor([[row.params.temperature] for row in rows], dtype=torch.float64)
    warm = temperatures > 0
    return logits.double() / torch.where(warm, temperatures, 1.0) + gumbel * warm


def _mixed(x: Tensor) -> Tensor:
    x = x & 0xFFFFFFFF
    x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
    return (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF


@pytest.mark.usefixtures("small")
def test_drawn_tokens_have_the_highest_score_of_the_same_noise(device: str) -> None:
    """Also where logits tie, where masks leave one token, and in greedy rows."""
    logits = torch.randn(24, 1000, generator=torch.Generator().manual_seed(3)).mul_(3).half()
    logits[5] = 0.0
    logits[6, :] = -torch.inf
    logits[6, 700] = -4.0
    rows = [SampleRow(SamplingParams(temperature=(i % 4) * 0.6, seed=i), [1] * (i + 1), 1) for i in range(24)]
    scores = exact_scores(logits, rows)
    padded = torch.full((24, 1024), torch.nan, dtype=torch.float16)
    padded[:, :1000] = logits
    temperatures = torch.tensor([[row.params.temperature] for row in rows])
    drawn = draw_tokens(
        padded.to(device)[:, :1000], temperatures.to(device), row_keys(rows, torch.device(device))
    ).cpu()
    chosen = scores.gather(-1, drawn[:, None]).squeeze(-1)
    assert (scores.amax(-1) - chosen).abs().max() < 1e-4
    assert drawn[6] == 700
    greedy = [i for i in range(24) if i % 4 == 0]
    assert drawn[greedy].tolist() == logits[greedy].argmax(-1).tolist(), "of equal logits the first"
    assert (
        draw_tokens(logits[:0].to(device), temperatures[:0].to(device), row_keys([], torch.device(device))).tolist()
        == []
    )


@pytest.mark.usefixtures("small")
def test_batch_of_all_kinds_of_rows_gets_the_tokens_of_torch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy rows, uncut ones, and such as are cut or edited."""
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"logit_bias": ((3, 2.0),)}, {"top_k": 1}]
    rows = [SampleRow(SamplingParams(seed=i, **kinds[i % 5]), [1], 1) for i in range(10)]
    logits = torch.randn(10, 500, generator=torch.Generator().manual_seed(7)).mul_(2).bfloat16()
    expected = [token.token_id for token in sample(logits, rows)]
    monkeypatch.setattr(sampler, "has_kernels", lambda device: True)
    assert [token.token_id for token in sample(logits.to(device), rows)] == expected
    assert [token.token_id for token in PendingTokens(logits.to(device), rows).read()[0]] == expected
