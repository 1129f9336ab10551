"""A page is one byte range, a head of a page another; the layers' views tile the pool; pools that differ do not mix."""

import pytest
import torch

from crossdock.kvtransfer.layout import (
    IncompatiblePools,
    LayerShape,
    PageGroup,
    PoolLayout,
    PoolSpec,
    Shard,
    check_compatible,
)
from crossdock.kvtransfer.transport import Peer

from .shards import shard_model

SHAPES = {
    "uniform": [LayerShape(3, 8, 8)] * 4,
    "keys wider than values": [LayerShape(4, 24, 16)] * 2,
    "layers differ": [LayerShape(4, 8, 8), LayerShape(2, 16, 16), LayerShape(4, 8, 4)],
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_views_of_all_layers_tile_the_pool(name: str, page_size: int) -> None:
    layers, num_pages = SHAPES[name], 5
    layout = PoolLayout(layers, page_size, 2)
    pool = torch.zeros(num_pages * layout.page_elements, dtype=torch.int64)
    for number in range(len(layers)):
        for view in layout.views(number, num_pages):
            pool.as_strided(view.shape, view.strides, view.offset).add_(1)
    assert pool.max() == 1, "two views overlap"
    used = sum(shape.num_kv_heads * (shape.key_dim + shape.value_dim) for shape in layers) * page_size * num_pages
    assert pool.sum() == used


def test_head_of_a_page_is_contiguous() -> None:
    layout = PoolLayout([LayerShape(3, 8, 8)] * 4, 16, 2)
    pool = torch.zeros(2 * layout.page_elements, dtype=torch.int64)
    for number in range(4):
        for view in layout.views(number, 2):
            pool.as_strided(view.shape, view.strides, view.offset)[1, 2] = 1
    start = layout.page_elements + 2 * layout.head_elements
    assert pool[start : start + layout.head_elements].all()
    assert pool.sum() == layout.head_elements


def test_layout_of_smollm2_has_its_known_sizes() -> None:
    layout = PoolLayout([LayerShape(3, 64, 64)] * 30, 16, 2)
    assert layout.token_bytes == 30 * 3 * 128 * 2
    assert layout.page_bytes == 16 * layout.token_bytes


LAYERS = (LayerShape(4, 8, 8), LayerShape(2, 16, 16), LayerShape(4, 8, 4))


def spec(**changes: object) -> PoolSpec:
    values = {"model": "m@1", "dtype": "bfloat16", "itemsize": 2, "page_size": 16, "layers": LAYERS, "rank": 0}
    return PoolSpec(**{**values, "shards": shard_model(LAYERS, 1), "num_pages": 7, **changes})  # type: ignore[arg-type]


def test_shards_of_a_model_are_whole_heads_and_layers() -> None:
    assert shard_model(LAYERS, 1) == (Shard(0, ((0, 4), (0, 2), (0, 4))),)
    assert shard_model(LAYERS, 2) == (Shard(0, ((0, 2), (0, 1), (0, 2))), Shard(0, ((2, 4), (1, 2), (2, 4))))
    assert [s.heads[1] for s in shard_model(LAYERS, 4)] == [(0, 1), (0, 1), (1, 2), (1, 2)], "few heads are replicated"
    assert [(s.first_layer, len(s.heads)) for s in shard_model(LAYERS, 1, 2)] == [(0, 1), (1, 2)]


def test_rank_has_the_layout_of_its_shard() -> None:
    second = spec(shards=shard_model(LAYERS, 2, 3), rank=3)
    assert [list(layout.layers) for layout in second.layouts_of(3)] == [[LayerShape(1, 16, 16)]]
    assert second.nbytes == 7 * 16 * 32 * 2
    assert PoolSpec.whole(PoolLayout(LAYERS, 16, 2), "m@1", "bfloat16", 7) == spec()


def test_pages_of_all_groups_have_the_bytes_of_the_largest() -> None:
    grouped = spec(groups=(PageGroup(None, (1,)), PageGroup(8, (0, 2))))
    assert grouped.num_groups == 2
    first, second = grouped.layouts_of(0)
    assert first.page_bytes == second.page_bytes == grouped.page_bytes == 4 * (16 + 12) * 16 * 2
    assert (list(first.layers), list(second.layers)) == ([LAYERS[1]], [LAYERS[0], LAYERS[2]])
    stage = spec(shards=shard_model(LAYERS, 1, 3), rank=1, groups=grouped.groups)
    assert stage.held_layers(1) == ((1,), ()), "a stage may have no layer of a group"
    assert stage.page_bytes == 2 * 32 * 16 * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 0}, "page_size"),
        ({"rank": 1}, "rank must be within 0 and 0, not 1"),
        ({"layers": (LayerShape(0, 8, 8),)}, "num_kv_heads=0"),
        ({"shards": (Shard(1, ((0, 2), (0, 4), (0, 4))),)}, "begins at layer 1"),
        ({"shards": (Shard(0, ((0, 5),)),)}, r"heads \[0, 5\) of a layer with 4"),
        ({"shards": (Shard(0, ((2, 2),)),)}, r"heads \[2, 2\)"),
        ({"groups": (PageGroup(None, (0, 1)),)}, "do not divide 3 layers"),
        ({"groups": (PageGroup(None, (0, 1)), PageGroup(8, (1, 2)))}, "do not divide 3 layers"),
    ],
)
def test_impossible_pool_spec_raises(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec(**changes)


def test_window_that_slides_and_attention_chunk_of_as_many_tokens_differ() -> None:
    chunked = spec(groups=(PageGroup(None, (1,)), PageGroup(None, (0, 2), attention_chunk=8)))
    with pytest.raises(IncompatiblePools, match=r"(?s)window 8: layers 0, 2.*attention chunk 8: layers 0, 2"):
        check_compatible(spec(groups=(PageGroup(None, (1,)), PageGroup(8, (0, 2)))), chunked)
    peer = Peer("a", "tcp", b"", chunked)
    assert Peer.unpack(peer.pack()) == peer


@pytest.mark.parametrize("changes", [{"num_pages": 9}, {"shards": shard_model(LAYERS, 2), "rank": 1}])
def test_pools_of_other_sizes_or_shards_are_compatible(changes: dict[str, object]) -> None:
    check_compatible(spec(), spec(**changes))


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("model", {"model": "m@2"}),
        ("dtype", {"dtype": "float16"}),
        ("dtype", {"itemsize": 4}),
        ("page_size", {"page_size": 32}),
        ("groups", {"groups": (PageGroup(8, (0, 2)), PageGroup(None, (1,)))}),
        ("layers", {"layers": (LAYERS[0], LAYERS[1], LayerShape(4, 8, 8))}),
    ],
)
def test_incompatible_pools_raise_with_both_in_the_message(field: str, changes: dict[str, object]) -> None:
    ours, theirs = spec(), spec(**changes)
    with pytest.raises(IncompatiblePools) as error:
        check_compatible(ours, theirs)
    text = str(error.value)
    assert text.startswith(f"pools differ in {field}:")
    rows = {line.split()[0]: line for line in text.splitlines()[2:]}
    for name in ours.fields():
        assert ours.fields()[name] in rows[name]
        assert theirs.fields()[name] in rows[name]
        assert rows[name].endswith("<- differs") == (name == field)
