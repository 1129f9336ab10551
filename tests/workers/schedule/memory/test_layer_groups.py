"""Groups of layers: what streams of real models hold, and that every layer is in one group of its own window."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.workers.schedule.memory.layer_groups import LayerGroup, group_layers, held_bytes
from crossdock.workers.schedule.memory.prefix_index import AttentionChunk, Window, first_visible_page, most_visible

PAGE_SIZE = 16
CONTEXT = 32_768
# From the models' config.json: the layers' windows, and bytes of keys and values per token and layer in bfloat16.
GPT_OSS_120B = [128, None] * 18, 2 * 2 * 8 * 64
GEMMA_3_27B = ([1024] * 5 + [None]) * 10 + [1024] * 2, 2 * 2 * 16 * 128
GEMMA_3_270M = ([512] * 5 + [None]) * 3, 2 * 2 * 256
MISTRAL_7B = [4096] * 32, 2 * 2 * 8 * 128
LLAMA_4_SCOUT: tuple[list[Window], int] = ([AttentionChunk(8192)] * 3 + [None]) * 12, 2 * 2 * 8 * 128
LLAMA_8B: tuple[list[Window], int] = [None] * 32, 2 * 2 * 8 * 128


def share_of_one_group(windows: list[Window], layer_bytes: int) -> float:
    """Return the bytes that a stream of `CONTEXT` tokens holds, as a share of those without windows."""
    token_bytes = [layer_bytes] * len(windows)
    groups = group_layers(windows, token_bytes, CONTEXT, PAGE_SIZE)
    return held_bytes(groups, token_bytes, CONTEXT, PAGE_SIZE) / (sum(token_bytes) * CONTEXT)


@pytest.mark.parametrize(
    ("model", "most"),
    [
        *((GPT_OSS_120B, 0.505), (GEMMA_3_27B, 0.2), (GEMMA_3_270M, 0.25), (MISTRAL_7B, 0.13)),
        *((LLAMA_4_SCOUT, 0.44), (LLAMA_8B, 1.0)),
    ],
)
def test_stream_of_a_real_model_holds_the_share_of_its_windows(model: tuple[list[Window], int], most: float) -> None:
    share = share_of_one_group(*model)
    windows = model[0]
    least = sum(CONTEXT if window is None else most_visible(window) for window in windows) / (CONTEXT * len(windows))
    assert least <= share <= most


def test_groups_of_gemma_have_as_many_layers_as_there_are_without_a_window() -> None:
    groups = group_layers(GEMMA_3_270M[0], [GEMMA_3_270M[1]] * 18, CONTEXT, PAGE_SIZE)
    assert groups[0] == LayerGroup(None, (5, 11, 17))
    assert [len(group.layers) for group in groups] == [3] * 6


@pytest.mark.parametrize("num_stages", [2, 4])
def test_stages_of_a_pipeline_hold_as_many_layers_of_each_group(num_stages: int) -> None:
    """A page takes as many bytes on each stage as the largest group there."""
    windows, layer_bytes = GEMMA_3_27B
    groups = group_layers(windows, [layer_bytes] * len(windows), CONTEXT, PAGE_SIZE)
    for stage in range(num_stages):
        first, last = (len(windows) * (stage + each) // num_stages for each in (0, 1))
        counts = [sum(first <= layer < last for layer in group.layers) for group in groups]
        assert max(counts) - min(counts) <= 1


def test_window_that_slides_and_attention_chunk_of_as_many_tokens_are_two_groups() -> None:
    groups = group_layers([64, AttentionChunk(64), None], [64] * 3, CONTEXT, PAGE_SIZE)
    assert [group.window for group in groups] == [None, 64, AttentionChunk(64)]


@pytest.mark.parametrize(
    ("windows", "window"),
    [
        ([None] * 4, None),
        ([64] * 4, 64),
        ([AttentionChunk(64)] * 4, AttentionChunk(64)),
        ([CONTEXT, None], None),  # no request leaves the window
        ([AttentionChunk(CONTEXT), None], None),
    ],
)
def test_layers_that_see_the_same_are_one_group(windows: list[Window], window: Window) -> None:
    group = LayerGroup(window, tuple(range(len(windows))))
    assert group_layers(windows, [64] * len(windows), CONTEXT, PAGE_SIZE) == (group,)


WINDOWS: list[Window] = [None, 8, 64, 999, AttentionChunk(64), AttentionChunk(100)]


@given(st.lists(st.tuples(st.sampled_from(WINDOWS), st.sampled_from([64, 128])), min_size=1, max_size=30))
def test_every_layer_is_in_one_group_that_keeps_what_the_layer_sees(layers: list[tuple[Window, int]]) -> None:
    windows, token_bytes = [window for window, _ in layers], [size for _, size in layers]
    groups = group_layers(windows, token_bytes, 1000, PAGE_SIZE)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(layers)))
    for group in groups:
        for layer, position in product(group.layers, (0, 63, 64, 99, 100, 500, 999)):
            kept, seen = (first_visible_page(window, position, 1) for window in (group.window, windows[layer]))
            assert kept <= seen
    one = [LayerGroup(None, tuple(range(len(layers))))]
    assert held_bytes(groups, token_bytes, 1000, PAGE_SIZE) <= held_bytes(one, token_bytes, 1000, PAGE_SIZE)
    assert [group.window is not None for group in groups] == sorted(group.window is not None for group in groups)
