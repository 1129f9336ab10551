"""How many programs does the attention of one layer launch on a GPU, and how many of them have something to do?

    python benchmarks/attention_programs.py

Counted from the rules by which kernels are launched, for Llama-3.1-8B on 132 multiprocessors; no GPU is needed.
*Before* is one launch for chunks and decodes, whose grid was blocks x heads x splits, and a second one to join the
splits. *After* is what kernels/gpu/triton_attention.py does. Needs torch and triton.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from tables import markdown

from crossdock.kernels.gpu.triton_attention import PART_TOKENS, num_blocks, num_joins, num_parts, tiles_for

HEADS, KV_HEADS, DIM, ITEM_BYTES = 32, 8, 128, 2  # of Llama-3.1-8B in bf16
GROUP, MULTIPROCESSORS = HEADS // KV_HEADS, 132
MAX_MODEL_LEN = 131_072
_MOST_SPLITS, _SPLIT_TOKENS, _FULL_SPLIT_TOKENS, _SMALL_ROWS, _LARGE_ROWS, _WAVES = 64, 256, 4096, 16, 128, 2  # before


@dataclass(frozen=True)
class Case:
    """A step: (query tokens, tokens of context) of each sequence, decodes first."""

    lengths: Sequence[tuple[int, int]]
    is_graph: bool = False  # launched for contexts of any length


CASES = {
    "prompt of 8,192 alone": Case([(8192, 8192)]),
    "64 decodes at 1,024": Case([(1, 1024)] * 64),
    "256 decodes at 1,024": Case([(1, 1024)] * 256),
    "256 decodes at 1,024, a graph": Case([(1, 1024)] * 256, is_graph=True),
    "chunk of 512 and 64 decodes at 1,024": Case([*[(1, 1024)] * 64, (512, 4096)]),
    "the last 512 of 32,768 and 64 decodes at 1,024": Case([*[(1, 1024)] * 64, (512, 32_768)]),
    "1 decode at 131,072": Case([(1, 131_072)]),
}


@dataclass(frozen=True)
class Programs:
    """Count the programs of one layer."""

    launches: int
    launched: int  # programs
    useful: int
    part_bytes: int  # of partial results

    @property
    def share(self) -> float:
        return self.useful / self.launched


def before(case: Case) -> Programs:
    """Return what was launched by the rule of commit 8b3312e."""
    lengths, S = case.lengths, len(case.lengths)
    longest_query = max(q for q, _ in lengths)
    longest = MAX_MODEL_LEN if case.is_graph else max(kv for _, kv in lengths)
    few, queries, tile = _SMALL_ROWS // GROUP, _LARGE_ROWS // GROUP, _tile()
    blocks = sum(q for q, _ in lengths) // queries + S if longest_query > few else S
    to_fill = -(-_WAVES * MULTIPROCESSORS // (S * KV_HEADS))
    least = _SPLIT_TOKENS if to_fill > 1 else _FULL_SPLIT_TOKENS
    splits = min(-(-longest // least), _MOST_SPLITS if to_fill == 1 else min(to_fill, _MOST_SPLITS))
    launched, useful, has_parts = blocks * KV_HEADS * splits, 0, splits > 1
    for q, kv in lengths:
        tiles = -(-kv // tile)
        part = max(-(-tiles // splits), -(-least // tile)) * tile
        useful += KV_HEADS * (-(-q // queries) if q > few else -(-kv // part))
        useful += HEADS * q * (has_parts and q <= few)
    launched += S * min(longest_query, few) * HEADS * has_parts
    return Programs(1 + has_parts, launched, useful, S * KV_HEADS * splits * _SMALL_ROWS * (DIM + 1) * 4 * has_parts)


def after(case: Case) -> Programs:
    """Return what is launched now, without the one program a step that cuts the contexts."""
    decodes = list(takewhile(lambda length: length[0] == 1, case.lengths))
    chunks = case.lengths[len(decodes) :]
    launches = launched = useful = part_bytes = 0
    if decodes:
        D = len(decodes)
        parts = num_parts(D, KV_HEADS, MULTIPROCESSORS)
        cut = cut_contexts([kv for _, kv in decodes], parts)
        launches, part_bytes = 2, parts * HEADS * (DIM + 1) * 4
        launched = (parts + num_joins(D, parts)) * KV_HEADS
        useful = (sum(cut) + sum(number > 1 for number in cut)) * KV_HEADS
    if chunks:
        rows = tiles_for(DIM, DIM, ITEM_BYTES, True).rows
        launches += 1
        launched += num_blocks(sum(q for q, _ in chunks), len(chunks), rows, GROUP) * KV_HEADS
        useful += sum(-(-q // (rows // GROUP)) for q, _ in chunks) * KV_HEADS
    return Programs(launches, launched, useful, part_bytes)


def cut_contexts(lengths: Sequence[int], num_parts: int) -> list[int]:
    """Return into how many parts each context is cut: the longest part is as short as `num_parts` in all allow."""
    tiles = [-(-length // _tile()) for length in lengths]
    share = PART_TOKENS // _tile()
    while sum(-(-n // share) for n in tiles) > num_parts:
        share += 1
    return [-(-n // share) for n in tiles]


def _tile() -> int:
    return tiles_for(DIM, DIM, ITEM_BYTES, False).tokens


def report() -> str:
    lines = [["a step", "", "launches", "programs", "useful", "share", "MiB of parts"]]
    for name, case in CASES.items():
        for label, programs in (("before", before(case)), ("after", after(case))):
            size = f"{programs.part_bytes / 2**20:.1f}"
            counts = f"{programs.launched:,}", f"{programs.useful:,}", f"{programs.share:.0%}", size
            lines.append([name if label == "before" else "", label, str(programs.launches), *counts])
    return markdown(lines)


if __name__ == "__main__":
    print(report())
