"""Plans are checked element by element, with an oracle that labels every element of the model with its own number."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from crossdock.kvtransfer.layout import IncompatiblePools, LayerShape, PageGroup, PoolSpec, Shard
from crossdock.kvtransfer.plan import ByteRange, plan_writes, source_ranks

from .shards import shard_model

UNIFORM = (LayerShape(4, 3, 3),) * 4
MIXED = (LayerShape(4, 2, 2), LayerShape(2, 4, 4), LayerShape(4, 2, 1), LayerShape(1, 5, 0))
ITEMSIZE, PAGE_SIZE = 2, 2
UNUSED = -1


def spec(
    layers: tuple[LayerShape, ...], rank: int = 0, tp: int = 1, pp: int = 1, groups: tuple[PageGroup, ...] = ()
) -> PoolSpec:
    shards = shard_model(layers, tp, pp)
    return PoolSpec("model", "float16", ITEMSIZE, PAGE_SIZE, layers, shards, rank, num_pages=1, groups=groups)


def striped(num_layers: int, num_groups: int) -> tuple[PageGroup, ...]:
    """Return groups that each have every so many layers; all but the first have a window."""
    return tuple(
        PageGroup(8 if number else None, tuple(range(number, num_layers, num_groups))) for number in range(num_groups)
    )


def labelled_page(pool: PoolSpec, group: int = 0) -> NDArray[np.int64]:
    """Return a group's page of this rank whose elements are labels of (layer, head, element of the cell). This oracle
    knows the layout only by its views, as the kernels do."""
    layout = pool.layouts_of(pool.rank)[group]
    page = np.full(layout.page_elements, UNUSED, dtype=np.int64)
    held = [layer for layer in range(len(pool.layers)) if not pool.groups or layer in pool.groups[group].layers]
    first = pool.shard.first_layer
    held = [layer for layer in held if first <= layer < first + len(pool.shard.heads)]
    for number, layer in enumerate(held):
        start, stop = pool.shard.heads[layer - first]
        for kind, view in enumerate(layout.views(number, 1)):
            _, num_heads, tokens, dim = view.shape
            assert num_heads == stop - start
            for head in range(num_heads):
                for token in range(tokens):
                    at = view.offset + head * view.strides[1] + token * view.strides[2]
                    label = ((layer * 64 + start + head) * 2 + kind) * 64 + token
                    page[at : at + dim] = label * 64 + np.arange(dim)
    return page


def transfer(sources: list[PoolSpec], target: PoolSpec, group: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the target's page after all sources wrote, and how often each of its elements was written."""
    page = np.full(target.page_bytes // ITEMSIZE, UNUSED - 1, dtype=np.int64)
    written = np.zeros_like(page)
    for source in sources:
        content = labelled_page(source, group)
        for part in plan_writes(source, target)[group]:
            assert part.source % ITEMSIZE == part.target % ITEMSIZE == part.length % ITEMSIZE == 0
            begin, end, from_ = (
                part.target // ITEMSIZE,
                (part.target + part.length) // ITEMSIZE,
                part.source // ITEMSIZE,
            )
            assert end <= len(page)
            assert from_ + end - begin <= len(content)
            page[begin:end] = content[from_ : from_ + end - begin]
            written[begin:end] += 1
    return page, written


def check(
    layers: tuple[LayerShape, ...],
    source: tuple[int, int],
    target: tuple[int, int],
    groups: tuple[PageGroup, ...] = (),
) -> None:
    sources = [spec(layers, rank, *source, groups) for rank in range(source[0] * source[1])]
    for rank in range(target[0] * target[1]):
        pool = spec(layers, rank, *target, groups)
        for group in range(max(len(groups), 1)):
            expected = labelled_page(pool, group)
            page, written = transfer(sources, pool, group)
            used = expected != UNUSED
            assert (page[used] == expected[used]).all()
            assert (written[used] == 1).all()
            assert (written <= 1).all()
        writers = [s.rank for s in sources if any(plan_writes(s, pool))]
        assert writers == list(source_ranks(sources[0], pool))


RATIOS = [
    ((1, 1), (1, 1)),
    ((1, 1), (2, 1)),
    ((2, 1), (1, 1)),
    ((2, 1), (4, 1)),
    ((4, 1), (2, 1)),
    ((3, 1), (2, 1)),  # 4 heads over 3 ranks: 1, 1, 2
    ((2, 1), (3, 1)),
    ((8, 1), (2, 1)),  # more ranks than heads: each head is held twice
    ((2, 1), (8, 1)),
    ((8, 1), (8, 1)),
    ((1, 1), (1, 2)),
    ((1, 2), (1, 1)),
    ((2, 2), (4, 1)),
    ((4, 1), (2, 2)),
    ((2, 3), (3, 2)),
]


@pytest.mark.parametrize(("source", "target"), RATIOS, ids=str)
@pytest.mark.parametrize("num_groups", [0, 2])
def test_plan_of_each_group_writes_every_element_once_from_the_right_place(
    num_groups: int, source: tuple[int, int], target: tuple[int, int]
) -> None:
    check(MIXED, source, target, striped(len(MIXED), num_groups))


shapes = st.builds(LayerShape, st.integers(1, 6), st.integers(1, 3), st.integers(0, 3))
models = st.lists(shapes, min_size=1, max_size=5).map(tuple)


@settings(max_examples=20, deadline=None)
@given(models, st.integers(1, 7), st.integers(1, 7), st.data())
def test_plan_of_any_model_at_any_ratio_writes_every_element_once(
    layers: tuple[LayerShape, ...], tp: int, other_tp: int, data: st.DataObject
) -> None:
    stages = st.integers(1, len(layers))
    groups = striped(len(layers), data.draw(stages))
    check(layers, (tp, data.draw(stages)), (other_tp, data.draw(stages)), groups)


@pytest.mark.parametrize(("tp", "other"), [(1, 1), (1, 2), (2, 1), (4, 2), (3, 2)])
def test_plan_of_equal_layers_has_at_most_one_range(tp: int, other: int) -> None:
    for rank in range(tp):
        for other_rank in range(other):
            (ranges,) = plan_writes(spec(UNIFORM, rank, tp), spec(UNIFORM, other_rank, other))
            assert len(ranges) <= 1


def test_plan_between_equal_shards_is_the_whole_page_with_unused_parts() -> None:
    ((part,),) = plan_writes(spec(MIXED), spec(MIXED))
    used = int(np.flatnonzero(labelled_page(spec(MIXED)) != UNUSED)[-1]) + 1
    assert (part.source, part.target, part.length) == (0, 0, used * ITEMSIZE)


def test_source_ranks_with_the_same_head_share_the_work() -> None:
    one_head = (LayerShape(1, 4, 4),) * 2
    writers = {source_ranks(spec(one_head, 0, 4), spec(one_head, rank, 4)) for rank in range(4)}
    assert writers == {(0,), (1,), (2,), (3,)}


@pytest.mark.parametrize(("tp", "pp"), [(3, 1), (3, 2), (4, 2), (5, 2)])
def test_ranks_of_equal_replicas_write_to_their_like_alone(tp: int, pp: int) -> None:
    """Also where ranks hold the same head: a state travels between ranks of the same number."""
    heads = (LayerShape(2, 4, 4),) * 4
    for rank in range(tp * pp):
        assert source_ranks(spec(heads, 0, tp, pp), spec(heads, rank, tp, pp)) == (rank,)


def test_source_that_lacks_layers_raises() -> None:
    half = PoolSpec("model", "float16", ITEMSIZE, PAGE_SIZE, UNIFORM, (Shard(0, ((0, 4),) * 2),), 0, 1)
    with pytest.raises(IncompatiblePools, match="no rank of the source holds head 0 of layer 2"):
        plan_writes(half, spec(UNIFORM))
    assert any(plan_writes(spec(UNIFORM), half)), "a source may hold more than the target needs"


def test_state_travels_between_ranks_that_hold_the_same_part() -> None:
    source, target = (replace(spec(UNIFORM, rank, 2), state="mamba") for rank in (0, 1))
    assert plan_writes(source, source)[1:] == ((ByteRange(0, 0, source.page_bytes),),)
    assert plan_writes(source, target)[1:] == ((),)
    with pytest.raises(IncompatiblePools, match="differ in state"):
        plan_writes(source, replace(spec(UNIFORM), state="mamba"))
    with pytest.raises(IncompatiblePools, match=r"(?s)differ in state.*none.*mamba"):
        plan_writes(source, spec(UNIFORM, 0, 2))


def test_pools_with_unlike_groups_of_layers_are_refused_with_both_named() -> None:
    grouped = spec(UNIFORM, groups=striped(4, 2))
    text = r"(?s)differ in groups.*all layers in one.*no window: layers 0, 2; window 8: layers 1, 3 <- differs"
    with pytest.raises(IncompatiblePools, match=text):
        plan_writes(grouped, spec(UNIFORM))
    assert grouped.compatibility != spec(UNIFORM).compatibility
