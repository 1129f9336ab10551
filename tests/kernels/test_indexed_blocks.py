"""Attention over the blocks that an indexer chooses gives what a sort of all blocks and attention row by row give."""

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from crossdock.kernels import indexed_blocks as module
from crossdock.kernels.attention import amx_takes, cpp_attention, reference_paged_attention
from crossdock.kernels.backend import CPP, choose_attention
from crossdock.kernels.indexed_blocks import BlockIndexer, best_blocks, block_attention
from tests.kernels.cpu.test_cpu_attention import needs_amx
from tests.kernels.test_attention import Case

pytestmark = pytest.mark.usefixtures("poisoned_memory")

HEADS, KV_HEADS, KEY, VALUE, INDEX_DIM = 6, 2, 32, 16, 24
BLOCK, NUM_BLOCKS = 8, 4
LENGTHS = [(1, 40), (1, 1), (1, 257), (1, 32), (1, 33), (37, 37), (9, 20), (60, 190), (3, 130)]


class Indexed:
    """A ragged batch over pages of keys, of values and of an indexer's keys behind these."""

    def __init__(self, page_size: int, num_local: int = 1, lengths: list[tuple[int, int]] = LENGTHS) -> None:
        rng = torch.Generator().manual_seed(1)
        self.case = Case(lengths, HEADS, KV_HEADS, KEY, VALUE + INDEX_DIM, page_size, seed=2)
        for values in self.case.values:
            values[:, 1:, VALUE:] = values[:, :1, VALUE:]
        self.case.fill()
        self.queries = torch.randn(len(self.case.q), KV_HEADS, INDEX_DIM, generator=rng)
        self.indexer = BlockIndexer(torch.empty(0, INDEX_DIM), self.queries, BLOCK, NUM_BLOCKS, num_local)

    def run(self, attention: Any = reference_paged_attention) -> Tensor:
        case = self.case
        return block_attention(attention, case.q, case.k_pages, case.v_pages, case.batch, self.indexer, scale=0.2)

    def expected(self) -> Tensor:
        """Return attention row by row in float64, from rows that were never stored to any page."""
        out = []
        for (q_len, kv_len), keys, values in zip(self.case.lengths, self.case.keys, self.case.values, strict=True):
            for row in range(q_len):
                last = kv_len - q_len + row
                heads = [self._attended(len(out), last, h, keys.double(), values.double()) for h in range(KV_HEADS)]
                out.append(torch.cat(heads))
        return torch.stack(out)

    def _attended(self, row: int, last: int, head: int, keys: Tensor, values: Tensor) -> Tensor:
        """Return the attention [H / Hkv, Dv] of a row's queries of one KV head."""
        scores = values[: last + 1, head, VALUE:] @ self.queries[row, head].double()
        own = last // BLOCK
        by_score = sorted(range(own + 1), key=lambda b: -float(scores[b * BLOCK : (b + 1) * BLOCK].max()))
        local = [b for b in range(own, own - self.indexer.num_local, -1) if b >= 0]
        chosen = (local + [b for b in by_score if b not in local])[:NUM_BLOCKS]
        seen = [token for token in range(last + 1) if token // BLOCK in chosen]
        group = HEADS // KV_HEADS
        q = self.case.q[row, head * group : (head + 1) * group].double()
        return (q @ keys[seen, head].T * 0.2).softmax(1) @ values[seen, head, :VALUE]


@pytest.mark.parametrize("attention", [reference_paged_attention, CPP.paged_attention])
@pytest.mark.parametrize("page_size", [8, 4, 16, 5])
@pytest.mark.parametrize(("num_bytes", "num_local"), [(64 << 20, 1), (1, 2), (30_000, NUM_BLOCKS)])
def test_attention_over_chosen_blocks_matches_longhand(
    attention: Any, page_size: int, num_bytes: int, num_local: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row at a time, a few, and all. Blocks are one page, two pages, half a page, and no number of pages."""
    monkeypatch.setattr("crossdock.kernels.indexed_attention._SCORED_BYTES", num_bytes)
    monkeypatch.setattr(module, "_BLOCK_BYTES", num_bytes)
    indexed = Indexed(page_size, num_local)
    out = indexed.run(attention)
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), indexed.expected(), atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton")
@pytest.mark.parametrize("page_size", [8, 16])
def test_triton_reads_chosen_blocks_in_pages_and_as_copies(page_size: int) -> None:
    """Rows of short sequences read values between which an indexer's keys lie: chunks and decodes."""
    indexed = Indexed(page_size, lengths=[(1, 40), (1, 9), (3, 37), (2, 20)])
    out = indexed.run(choose_attention("triton", torch.device("cpu")).paged_attention)
    torch.testing.assert_close(out.double(), indexed.expected(), atol=1e-4, rtol=1e-4)


def test_short_batch_reads_no_key_of_the_indexer() -> None:
    indexed = Indexed(8, lengths=[(1, BLOCK * NUM_BLOCKS), (9, 20)])
    expected = indexed.run()
    indexed.case.v_pages[..., VALUE:] = float("nan")
    assert torch.equal(indexed.run(), expected)


def test_pages_are_read_in_place_where_a_block_is_some_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_copied", None)
    Indexed(4).run()
    with pytest.raises(TypeError):
        Indexed(16).run()


def test_pages_without_int32_numbers_are_copied() -> None:
    """The distances between pages and between heads have no common divisor but 1: a view begins at each element."""
    pages = torch.empty_strided((1 << 12, 2, 16, 8), (1 << 20 | 1, 128, 8, 1), device="meta")
    assert module._pages_of_one_head(pages, pages) is None
    keys, values = torch.empty(9, 2, 16, 8), torch.empty(9, 4, 16, 8)[:, :2]
    assert module._pages_of_one_head(keys, values) is None


def test_earlier_blocks_of_equal_scores_are_chosen_beside_the_own_one() -> None:
    queries = torch.ones(2, 1, 1)
    keys = torch.tensor([[0.0], [-3.0], [2.0], [1.0], [0.0], [0.0], [-9.0], [9.0]])
    indexer = BlockIndexer(keys, queries, block_size=2, num_blocks=2, num_local=1)
    found = best_blocks(indexer, queries, keys, torch.tensor([6, 5]))
    assert found.blocks.tolist() == [[[1, 3]], [[1, 2]]]
    assert found.counts.tolist() == [[3], [4]]
    found = best_blocks(indexer, 0 * queries, keys, torch.tensor([6, 1]))
    assert found.blocks[0].tolist() == [[0, 3]]
    assert found.counts.tolist() == [[3], [2]]


@needs_amx
def test_amx_reads_values_between_which_keys_lie() -> None:
    case = Case([(20, 45), (17, 17)], HEADS, KV_HEADS, KEY, KEY + INDEX_DIM, dtype=torch.bfloat16)
    case.fill()
    values = case.v_pages[..., :KEY]
    assert amx_takes(case.dtype, case.k_pages, values)
    out = torch.empty(37, HEADS, KEY, dtype=case.dtype)
    cpp_attention(case.q, case.k_pages, values, case.batch, slice(0, 2), out, scale=0.2, by_amx=True)
    expected = reference_paged_attention(case.q, case.k_pages, values, case.batch, scale=0.2)
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
