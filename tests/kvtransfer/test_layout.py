"""A page is one byte range, a head of it another, and the layers' views tile it without overlap."""

import pytest
import torch

from crossdock.kvtransfer.layout import LayerShape, PoolLayout

SHAPES = {
    "uniform": [LayerShape(3, 8, 8)] * 4,
    "keys wider than values": [LayerShape(4, 24, 16)] * 2,
    "layers differ": [LayerShape(4, 8, 8), LayerShape(2, 16, 16), LayerShape(4, 8, 4)],
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_views_tile_the_pool(name: str, page_size: int) -> None:
    layers, num_pages = SHAPES[name], 5
    layout = PoolLayout(layers, page_size, 2)
    pool = torch.zeros(num_pages * layout.page_elements, dtype=torch.int64)
    for number in range(len(layers)):
        for view in layout.views(number, num_pages):
            pool.as_strided(view.shape, view.strides, view.offset).add_(1)
    assert pool.max() == 1, "two views overlap"
    used = sum(shape.num_kv_heads * (shape.key_dim + shape.value_dim) for shape in layers) * page_size * num_pages
    assert pool.sum() == used


def test_a_head_of_a_page_is_contiguous() -> None:
    layout = PoolLayout([LayerShape(3, 8, 8)] * 4, 16, 2)
    pool = torch.zeros(2 * layout.page_elements, dtype=torch.int64)
    for number in range(4):
        for view in layout.views(number, 2):
            pool.as_strided(view.shape, view.strides, view.offset)[1, 2] = 1
    start = layout.page_elements + 2 * layout.head_elements
    assert pool[start : start + layout.head_elements].all()
    assert pool.sum() == layout.head_elements


def test_smollm2_sizes() -> None:
    layout = PoolLayout([LayerShape(3, 64, 64)] * 30, 16, 2)
    assert layout.token_bytes == 30 * 3 * 128 * 2
    assert layout.page_bytes == 16 * layout.token_bytes
