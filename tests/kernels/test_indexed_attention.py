"""Attention over the tokens that an indexer chooses gives what a sort of all scores and attention row by row give."""

from typing import Any

import pytest
import torch
from torch import Tensor

from crossdock.kernels import indexed_attention as module
from crossdock.kernels.attention import AttentionBatch, reference_paged_attention, reference_store_kv
from crossdock.kernels.backend import CPP
from crossdock.kernels.indexed_attention import (
    Indexer,
    best_tokens,
    choice_of_rows,
    choose_tokens,
    indexed_attention,
)
from crossdock.kernels.latent_attention import UpProjections, latent_attention
from tests.kernels.test_attention import Case

HEADS, LATENT, ROTATED, KEY, VALUE = 3, 64, 16, 12, 20
INDEX_HEADS, INDEX_DIM, TOP_K = 8, 24, 31
LENGTHS = [(1, 40), (1, 1), (1, 257), (1, TOP_K), (1, TOP_K + 1), (37, 37), (9, 20), (60, 190), (3, 130)]


class Indexed:
    """A ragged batch over pages of latents and of an indexer's keys, and the projections of one layer."""

    def __init__(self, lengths: list[tuple[int, int]]) -> None:
        rng = torch.Generator().manual_seed(1)
        self.case = Case(lengths, 1, 1, LATENT + ROTATED, INDEX_DIM, seed=2)
        for keys, values, slots in zip(self.case.keys, self.case.values, self.case.slots_of, strict=True):
            reference_store_kv(keys, values, self.case.k_pages, self.case.v_pages, slots)
        self.up = UpProjections(torch.randn(HEADS, KEY + VALUE, LATENT, generator=rng) * LATENT**-0.5, KEY)
        num_rows = sum(rows for rows, _ in lengths)
        self.q = torch.randn(num_rows, HEADS, KEY + ROTATED, generator=rng)
        self.queries = torch.randn(num_rows, INDEX_HEADS, INDEX_DIM, generator=rng)
        self.weights = torch.randn(num_rows, INDEX_HEADS, generator=rng)

    def indexer(self) -> Indexer:
        return Indexer(0, torch.empty(0, INDEX_DIM), self.queries, self.weights, TOP_K)

    def run(self, attention: Any = reference_paged_attention, indexer: Indexer | None = None) -> Tensor:
        """Return our attention; `indexer`: of an earlier layer."""
        pages = self.case.k_pages, self.case.v_pages
        return indexed_attention(
            attention, self.q, *pages, self.case.batch, self.up, indexer or self.indexer(), scale=0.2
        )

    def expected(self) -> Tensor:
        """Return attention row by row in float64, from rows that were never stored to any page."""
        out, first = [], 0
        to_keys, to_values = self.up.weight.double().split((KEY, VALUE), 1)
        for (q_len, kv_len), cached, keys in zip(self.case.lengths, self.case.keys, self.case.values, strict=True):
            latents, rotated = cached[:, 0].double().split((LATENT, ROTATED), 1)
            for row in range(q_len):
                seen = kv_len - q_len + row + 1
                by_head = torch.einsum("hd,ld->hl", self.queries[first + row].double(), keys[:seen, 0].double())
                scores = (self.weights[first + row].double()[:, None] * by_head.clamp(min=0)).sum(0)
                chosen = scores.argsort(descending=True)[:TOP_K]
                own = torch.einsum("hdr,lr->hld", to_keys, latents[chosen])
                own = torch.cat((own, rotated[chosen].expand(HEADS, -1, -1)), -1)
                weights = (torch.einsum("hd,hld->hl", self.q[first + row].double(), own) * 0.2).softmax(1)
                out.append(torch.einsum("hl,hld->hd", weights, torch.einsum("hdr,lr->hld", to_values, latents[chosen])))
            first += q_len
        return torch.stack(out)


@pytest.mark.parametrize("attention", [reference_paged_attention, CPP.paged_attention])
@pytest.mark.parametrize("num_bytes", [1, 30_000, 64 << 20])
def test_attention_over_chosen_tokens_matches_longhand(
    attention: Any, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row at a time, a few, and all. Rows of sequences of up to `top_k` tokens see all of these."""
    monkeypatch.setattr(module, "_SCORED_BYTES", num_bytes)
    monkeypatch.setattr(module, "_BLOCK_BYTES", num_bytes)
    indexed = Indexed(LENGTHS)
    out = indexed.run(attention)
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), indexed.expected(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_bytes", [1, 30_000, 64 << 20])
def test_copied_latents_give_what_those_in_pages_give(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents are copied where no C++ reads them: one row at a time, a few, and all."""
    indexed = Indexed(LENGTHS)
    in_pages = indexed.run(CPP.paged_attention)
    monkeypatch.setattr(module, "_BLOCK_BYTES", num_bytes)
    monkeypatch.setattr(module, "library_for", lambda *_: None)
    torch.testing.assert_close(indexed.run(CPP.paged_attention), in_pages, atol=1e-5, rtol=1e-5)


def test_latents_are_copied_where_their_pages_have_no_int32_number() -> None:
    """The distances between pages and between tokens have no common divisor but 1: a view begins at each element."""
    pages = torch.empty_strided((1 << 12, 1, 16, 80), (1 << 20 | 1, 0, 80, 1), device="meta")
    assert module._pages_of_one_token(pages) is None


def test_short_batch_reads_no_key_of_the_indexer() -> None:
    indexed = Indexed([(1, TOP_K), (9, 20)])
    case = indexed.case
    expected = latent_attention(reference_paged_attention, indexed.q, case.k_pages, case.batch, indexed.up, scale=0.2)
    case.v_pages.fill_(float("nan"))
    assert torch.equal(indexed.run(), expected)


def test_layer_without_an_indexer_reads_the_tokens_of_the_layer_before() -> None:
    """Its pages have no keys to score."""
    indexed = Indexed(LENGTHS)
    expected = indexed.run()
    indexer = indexed.indexer()
    indexer.chosen = choose_tokens(indexer, indexed.case.v_pages, indexed.case.batch)
    indexed.case.v_pages = indexed.case.v_pages[..., :0]
    assert torch.equal(indexed.run(indexer=indexer), expected)


@pytest.mark.parametrize("followed", [[7, 1, 2], [8, 6, 5, 4, 3, 0], [1, 3]])
def test_row_after_another_reads_what_that_one_chose_or_all_tokens(followed: list[int]) -> None:
    """Its own queries would choose others, and the indexer's keys are gone."""
    indexed = Indexed(LENGTHS)
    case = indexed.case
    chosen = choose_tokens(indexed.indexer(), case.v_pages, case.batch)
    case.v_pages.fill_(float("nan"))
    last = case.batch.query_start[1:][followed].long() - 1
    batch = _one_row_each(case.batch, followed)
    given = choice_of_rows(chosen, last, batch)
    own = Indexer(0, torch.empty(0, INDEX_DIM), -indexed.queries[last], indexed.weights[last], TOP_K, given)
    pages = case.k_pages, case.v_pages
    out = indexed_attention(CPP.paged_attention, indexed.q[last], *pages, batch, indexed.up, own, scale=0.2)
    torch.testing.assert_close(out.double(), indexed.expected()[last], atol=1e-4, rtol=1e-4)


def test_row_after_a_step_that_chose_nothing_reads_all_tokens() -> None:
    """It is the first row of its text that sees more than `top_k`."""
    indexed = Indexed([(1, TOP_K + 1), (1, 5)])
    case = indexed.case
    case.v_pages.fill_(float("nan"))
    indexer = indexed.indexer()
    indexer.chosen = choice_of_rows(None, torch.tensor([0, 1]), case.batch)
    expected = latent_attention(reference_paged_attention, indexed.q, case.k_pages, case.batch, indexed.up, scale=0.2)
    torch.testing.assert_close(indexed.run(indexer=indexer), expected)


def _one_row_each(batch: AttentionBatch, sequences: list[int]) -> AttentionBatch:
    """Return a batch that reads the last row of some sequences again."""
    starts = torch.arange(len(sequences) + 1, dtype=torch.int32)
    lengths = batch.kv_len[sequences]
    longest = int(lengths.max())
    table = batch.page_table[sequences]
    return AttentionBatch(starts, lengths, table, batch.slots[:0], 1, longest, len(sequences))


def test_earlier_tokens_of_equal_scores_are_chosen() -> None:
    scores = torch.tensor([[0.0, 2.0, 0.0, -1.0, 0.0, 0.0], [3.0, 0.0, 0.0, 0.0, 0.0, 9.0]])
    positions, counts = best_tokens(scores, torch.tensor([5, 4]), 3)
    assert positions.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert counts.tolist() == [3, 3]


def test_row_that_sees_few_tokens_chooses_these() -> None:
    positions, counts = best_tokens(torch.tensor([[1.0, -5.0, 9.0, 9.0]]), torch.tensor([1]), 3)
    assert positions[0, : counts[0]].tolist() == [0, 1]


def test_scores_that_are_no_numbers_choose_one_token() -> None:
    _, counts = best_tokens(torch.full((2, 6), float("nan")), torch.tensor([5, 4]), 3)
    assert counts.tolist() == [1, 1]
