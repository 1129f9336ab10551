"""Plans which bytes of a page each source rank writes to each target rank: the intersection of their shards. Pure.

Every used byte of a target page comes from exactly one source rank, even if several source ranks hold the same head.
Pages are laid out head by head: ranks that hold the same layers exchange one contiguous range per page, at any ratio of
ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from crossdock.kvtransfer.layout import IncompatiblePools, PoolSpec, check_compatible


@dataclass(frozen=True, slots=True)
class ByteRange:
    """`length` bytes at offset `source` of a source page go to offset `target` of a target page."""

    source: int
    target: int
    length: int


def plan_writes(source: PoolSpec, target: PoolSpec) -> tuple[ByteRange, ...]:
    """Return what rank `source.rank` writes into each page of rank `target.rank`; empty if the two share no bytes.

    Raises:
        IncompatiblePools: the pools differ in what bytes mean, or no source rank holds what the target needs.
    """
    return _plan(source, target).get(source.rank, ())


def source_ranks(source: PoolSpec, target: PoolSpec) -> tuple[int, ...]:
    """Return the ranks of `source`'s replica that write into the pages of `target`, in order."""
    return tuple(sorted(_plan(source, target)))


@lru_cache(maxsize=256)  # a replica meets few others, and the plan of a large model has some thousand cells
def _plan(source: PoolSpec, target: PoolSpec) -> dict[int, tuple[ByteRange, ...]]:
    """Return the byte ranges that each source rank writes, by rank."""
    check_compatible(target, source)
    offsets = [{key: offset for key, offset, _ in _cells(source, rank)} for rank in range(len(source.shards))]
    plan: dict[int, list[ByteRange]] = {}
    previous: tuple[int, int] | None = None  # source rank, and how far the source offset is from the target offset
    for key, offset, length in sorted(_cells(target, target.rank), key=lambda cell: cell[1]):
        holders = [rank for rank, held in enumerate(offsets) if key in held]
        if not holders:
            raise IncompatiblePools(f"no rank of the source holds head {key[1]} of layer {key[0]}: {source.shards}")
        rank = holders[target.rank % len(holders)]  # ranks that hold the same head share the work
        begin = offsets[rank][key]
        ranges = plan.setdefault(rank, [])
        if (rank, begin - offset) == previous:
            # Bytes between two neighbouring cells are used by no layer: one range may span them.
            first = ranges[-1]
            ranges[-1] = ByteRange(first.source, first.target, offset + length - first.target)
        else:
            ranges.append(ByteRange(begin, offset, length))
        previous = rank, begin - offset
    return {rank: tuple(ranges) for rank, ranges in plan.items()}


def _cells(spec: PoolSpec, rank: int) -> Iterator[tuple[tuple[int, int], int, int]]:
    """Yield every cell, the part of a page that one layer uses for one head: ((layer, head) in the model's numbering,
    offset in a page, length), in bytes."""
    shard, layout = spec.shards[rank], spec.layout_of(rank)
    for number, (start, stop) in enumerate(shard.heads):
        begin, end = layout.layer_offsets[number : number + 2]
        for head in range(start, stop):
            offset = (head - start) * layout.head_elements + begin
            yield (shard.first_layer + number, head), offset * spec.itemsize, (end - begin) * spec.itemsize
