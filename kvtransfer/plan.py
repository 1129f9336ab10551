"""Plans which bytes of a page each source rank writes to each target rank: the intersection of their shards. Pure.

Every group of layers has a plan of its own, because the same bytes of a page hold other layers in each.

Every used byte of a target page comes from exactly one source rank, even if several source ranks hold the same head.
Pages are laid out head by head: ranks that hold the same layers exchange one contiguous range per page, at any ratio of
ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from crossdock.kvtransfer.layout import IncompatiblePools, PoolSpec, check_compatible


@dataclass(frozen=True, slots=True)
class ByteRange:
    """`length` bytes at offset `source` of a source page go to offset `target` of a target page."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class PageCopies:
    """Pages of one group of layers. Each is written to one page of the target."""

    group: int
    source_pages: tuple[int, ...]
    target_pages: tuple[int, ...]


GroupRanges: TypeAlias = tuple[tuple[ByteRange, ...], ...]
"""What travels of a page, for each group of layers; of models with recurrent layers also of a page of their state."""


def plan_writes(source: PoolSpec, target: PoolSpec) -> GroupRanges:
    """Return the byte ranges of a page that rank `source.rank` writes to rank `target.rank`, for each group of layers.
    The last entry is of the recurrent state, if any. An entry without shared bytes is empty.

    Raises:
        IncompatiblePools: the pools differ in what bytes mean, or no source rank holds what the target needs.
    """
    ranges = tuple(plan.get(source.rank, ()) for plan in _plan(source, target))
    return (*ranges, _state_ranges(source, target)) if target.state else ranges


def source_ranks(source: PoolSpec, target: PoolSpec) -> tuple[int, ...]:
    """Return the ranks of `source`'s replica that write into the pages of `target`, in order."""
    return tuple(sorted({rank for plan in _plan(source, target) for rank in plan}))


def _state_ranges(source: PoolSpec, target: PoolSpec) -> tuple[ByteRange, ...]:
    """Return the byte ranges of a page of the recurrent state that travel: whole pages, between equal ranks."""
    return (ByteRange(0, 0, target.page_bytes),) if source.rank == target.rank else ()


def bytes_by_group(ranges: GroupRanges) -> tuple[int, ...]:
    """Return how many bytes of a page travel, as `GroupRanges`."""
    return tuple(sum(part.length for part in parts) for parts in ranges)


@lru_cache(maxsize=256)  # a replica meets few others, and the plan of a large model has some thousand cells
def _plan(source: PoolSpec, target: PoolSpec) -> tuple[dict[int, tuple[ByteRange, ...]], ...]:
    """Return the byte ranges that each source rank writes, by rank, for each group of layers."""
    check_compatible(target, source)
    return tuple(_plan_group(source, target, group) for group in range(target.num_groups))


def _plan_group(source: PoolSpec, target: PoolSpec, group: int) -> dict[int, tuple[ByteRange, ...]]:
    ranks = range(len(source.shards))
    offsets = [{key: offset for key, offset, _ in _cells(source, rank, group)} for rank in ranks]
    plan: dict[int, list[ByteRange]] = {}
    previous: tuple[int, int] | None = None  # source rank, and how far the source offset is from the target offset
    for key, offset, length in sorted(_cells(target, target.rank, group), key=lambda cell: cell[1]):
        holders = [rank for rank, held in enumerate(offsets) if key in held]
        if not holders:
            raise IncompatiblePools(f"no rank of the source holds head {key[1]} of layer {key[0]}: {source.shards}")
        rank = holders[target.rank % len(holders)]  # ranks that hold the same head share the work
        if source.shards == target.shards:
            rank = target.rank  # the one that may write the recurrent state, which comes with the last tokens
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


def _cells(spec: PoolSpec, rank: int, group: int) -> Iterator[tuple[tuple[int, int], int, int]]:
    """Yield every cell, the part of a group's page that one layer uses for one head: ((layer, head) in the model's
    numbering, offset in a page, length), in bytes."""
    shard = spec.shards[rank]
    layout = spec.layouts_of(rank)[group]
    for number, layer in enumerate(spec.held_layers(rank)[group]):
        start, stop = shard.heads[layer - shard.first_layer]
        begin, end = layout.layer_offsets[number : number + 2]
        for head in range(start, stop):
            offset = (head - start) * layout.head_elements + begin
            yield (layer, head), offset * spec.itemsize, (end - begin) * spec.itemsize
