"""Attention over latents gives what attention over every head's expanded keys and values gives, in either way."""

from typing import Any

import pytest
import torch
from torch import Tensor

from crossdock.kernels import latent_attention as module
from crossdock.kernels.attention import reference_paged_attention, reference_store_kv
from crossdock.kernels.backend import CPP
from crossdock.kernels.cpu.cpu_attention import CpuAttention
from crossdock.kernels.latent_attention import UpProjections, expanding_is_cheaper, latent_attention
from tests.kernels.test_attention import Case

HEADS, LATENT, ROTATED, KEY, VALUE = 6, 64, 16, 12, 20
MIXED = [(1, 40), (1, 1), (1, 257), (37, 37), (60, 190), (3, 130)]  # its chunks have 100 rows
SHORT = [(1, 40), (5, 37), (20, 90), (1, 130)]


class Latents:
    """A ragged batch over pages of latents, and the projections of one layer."""

    def __init__(self, lengths: list[tuple[int, int]], dtype: torch.dtype = torch.float32, **case: Any) -> None:
        rng = torch.Generator().manual_seed(1)
        self.case = Case(lengths, 1, 1, LATENT + ROTATED, 0, dtype=dtype, seed=2, **case)
        for keys, values, slots in zip(self.case.keys, self.case.values, self.case.slots_of, strict=True):
            reference_store_kv(keys, values, self.case.k_pages, self.case.v_pages, slots, **self.case.scales)
        weight = torch.randn(HEADS, KEY + VALUE, LATENT, generator=rng) * LATENT**-0.5
        self.up = UpProjections(weight.to(dtype), KEY)
        num_rows = sum(rows for rows, _ in lengths)
        self.q = torch.randn(num_rows, HEADS, KEY + ROTATED, generator=rng).to(dtype)

    def arguments(self) -> tuple[Any, ...]:
        return self.q, self.case.k_pages, self.case.batch, self.up

    def expected(self) -> Tensor:
        """Return attention row by row in float64, from latents that were never stored to any page."""
        out, first = [], 0
        to_keys, to_values = self.up.weight.double().split((KEY, VALUE), 1)
        for (q_len, kv_len), cached in zip(self.case.lengths, self.case.keys, strict=True):
            latents, rotated = cached[:, 0].double().split((LATENT, ROTATED), 1)  # [L, R], [L, Dr]
            keys = torch.cat((torch.einsum("hdr,lr->hld", to_keys, latents), rotated.expand(HEADS, -1, -1)), -1)
            values = torch.einsum("hdr,lr->hld", to_values, latents)
            for row in range(q_len):
                seen = kv_len - q_len + row + 1
                scores = torch.einsum("hd,hld->hl", self.q[first + row].double(), keys[:, :seen]) * 0.2
                out.append(torch.einsum("hl,hld->hd", scores.softmax(1), values[:, :seen]))
            first += q_len
        return torch.stack(out)


@pytest.mark.parametrize(
    "attention", [reference_paged_attention, CPP.paged_attention, CpuAttention("torch").paged_attention]
)
@pytest.mark.parametrize("lengths", [MIXED, MIXED[3:], MIXED[:3], SHORT], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latents_match_longhand(attention: Any, lengths: list[tuple[int, int]], dtype: torch.dtype) -> None:
    latents = Latents(lengths, dtype)
    out = latent_attention(attention, *latents.arguments(), scale=0.2)
    assert out.is_contiguous()
    tolerance = 1e-4 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(out.double(), latents.expected(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("lengths", [MIXED, SHORT], ids=str)
def test_latents_in_e4m3_pages_match_longhand(lengths: list[tuple[int, int]]) -> None:
    latents = Latents(lengths, fp8=True)
    scale = latents.case.scales["k_scale"]
    scales = {"k_scale": scale, "v_scale": scale}
    out = latent_attention(reference_paged_attention, *latents.arguments(), scale=0.2, **scales)
    torch.testing.assert_close(out.double(), latents.expected(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_bytes", [1, 300_000])
def test_few_heads_at_a_time_match_longhand(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """One head at a time, and four of six, then two."""
    monkeypatch.setattr(module, "_EXPANDED_BYTES", num_bytes)
    latents, calls = Latents(MIXED[4:5]), []

    def recorded(q: Tensor, *args: Any, **options: Any) -> Tensor:
        calls.append(q.shape[1])
        return CPP.paged_attention(q, *args, **options)

    out = latent_attention(recorded, *latents.arguments(), scale=0.2)
    assert calls == ([1] * HEADS if num_bytes == 1 else [4, 2])
    torch.testing.assert_close(out.double(), latents.expected(), atol=1e-4, rtol=1e-4)


def test_long_chunks_of_deepseek_v3_are_expanded() -> None:
    """192 and 128 elements a row instead of 576 and 512, for 512 * 256 products a token of context: 171 rows."""
    up = UpProjections(torch.empty(128, 256, 512, device="meta"), 128)
    assert not expanding_is_cheaper(170, 1, up)
    assert expanding_is_cheaper(171, 1, up)
    assert not expanding_is_cheaper(300, 2, up)
    assert not expanding_is_cheaper(0, 0, up)
