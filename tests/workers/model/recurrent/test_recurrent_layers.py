"""Recurrent states live in pages of the KV pool, and chunks of any size give the logits of one pass."""

from typing import Any

import pytest
import torch
from torch import Tensor

from crossdock.workers.model.forward.state_pages import LayerStates, StateLayout, StateShape, StepStates
from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.load_options import LoadOptions
from tests.sweeps import rest_in_soak
from tests.workers.architectures import RECURRENT, SERVED, build
from tests.workers.model.paged import assert_near, monolithic, random_prompts, through_pages

CONVOLUTION = StateShape(0, 0, True, (3, 5), torch.bfloat16)
RECURRENT_STATE = StateShape(0, 0, False, (2, 7), torch.float32)


@pytest.mark.parametrize("name", rest_in_soak(RECURRENT, "qwen3_next", "bamba", "lfm2 conv", "falcon_h1"))
def test_chunks_of_equal_sizes_give_the_logits_of_one_pass(name: str) -> None:
    module = build(name, SERVED[name])
    prompts = random_prompts(29, 40)
    expected = [monolithic(module, prompt) for prompt in prompts]
    model = wrap_module(module)
    for size in (1, 2, 7, 40):
        steps = [
            [(s, start, min(start + size, len(prompt))) for s, prompt in enumerate(prompts) if start < len(prompt)]
            for start in range(0, 40, size)
        ]
        assert_near(through_pages(model, prompts, steps), expected)


def test_state_that_is_not_read_changes_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutation that the comparisons above must detect."""
    module = build("lfm2 conv", SERVED["lfm2 conv"])
    prompt = torch.arange(3, 40)
    expected = monolithic(module, prompt)
    model = wrap_module(module)
    read = StepStates.__init__

    def forget(self: StepStates, layout: StateLayout, pool: Tensor, pages: Tensor, *rest: Any) -> None:
        read(self, layout, pool, torch.full_like(pages, -1), *rest)

    monkeypatch.setattr(StepStates, "__init__", forget)
    got = through_pages(model, [prompt], [[(0, 0, 20)], [(0, 20, 37)]])[0]
    assert_near([got[:20]], [expected[:20]])
    assert not torch.allclose(got[20:], expected[20:], atol=1e-2)


def step_states(pool: Tensor, read: list[list[int]], write: list[list[int]], lengths: list[int]) -> StepStates:
    layout = StateLayout((CONVOLUTION, RECURRENT_STATE, StateShape(4, 0, False, (11,), torch.float32)))
    num_decodes = next((part for part, length in enumerate(lengths) if length > 1), len(lengths))
    return StepStates(layout, pool, torch.tensor(read).int(), torch.tensor(write).int(), lengths, num_decodes)


def tensors_of(parts: slice, states: LayerStates) -> list[list[Tensor]]:
    """Return the tensors of each part's state."""
    tensors = [*states.convolutions.values(), *states.recurrent.values()]
    return [[tensor[number] for tensor in tensors] for number in range(parts.stop - parts.start)]


@pytest.mark.parametrize("layer", [0, 4])
@pytest.mark.parametrize("page_bytes", [1, 6, 20, 40, 48, 144, 1000])
def test_states_of_any_layer_are_kept_in_pages_of_any_size(page_bytes: int, layer: int) -> None:
    """The other layers' bytes of the pages stay as they are."""
    layout = step_states(torch.zeros(1, 8, dtype=torch.uint8), [[0]], [[0]], [1]).layout
    assert layout.num_bytes == 32 + 64 + 48
    width, generator = layout.num_pages(page_bytes), torch.Generator().manual_seed(0)
    pool = torch.randint(0, 255, (9 * width, page_bytes), dtype=torch.uint8, generator=generator)
    places = torch.randperm(9 * width, generator=generator).view(9, width).tolist()
    begin, shapes = layout.by_layer[layer]
    stored = [[torch.randn(shape.shape).to(shape.dtype) for shape in shapes] for _ in range(3)]
    seen: list[list[Tensor]] = []
    before = pool.clone()

    def write(parts: slice, states: LayerStates) -> None:
        for tensors, values in zip(tensors_of(parts, states), stored[parts], strict=True):
            for tensor, value in zip(tensors, values, strict=True):
                assert (tensor == 0).all(), "nothing was computed"
                tensor.copy_(value)

    def read(parts: slice, states: LayerStates) -> None:
        seen.extend([tensor.clone() for tensor in tensors] for tensors in tensors_of(parts, states))

    step_states(pool, [[-1] * width] * 3, places[:3], [1, 1, 5]).update(layer, write)
    step_states(pool, places[:3], places[3:6], [1, 1, 5]).update(layer, read)
    for ours, theirs in zip(seen, stored, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    end = begin + sum(shape.num_bytes for shape in shapes)
    rows, rows_before = (each[torch.tensor(places)].flatten(1) for each in (pool, before))
    assert torch.equal(rows[:3, begin:end], rows[3:6, begin:end])
    rows[:6, begin:end] = rows_before[:6, begin:end]
    assert torch.equal(rows, rows_before)


def test_part_that_reads_what_another_writes_sees_the_state_before_the_step() -> None:
    pool = torch.zeros(3, 200, dtype=torch.uint8)
    seen = []

    def count(parts: slice, states: LayerStates) -> None:
        seen.extend(states.recurrent[0][:, 0].tolist())
        states.recurrent[0] += 1

    for _ in range(2):
        step_states(pool, [[0], [0], [1]], [[0], [1], [2]], [1, 5, 7]).update(4, count)
    assert seen == [0, 0, 0, 1, 1, 1]


def test_model_whose_kernels_ignore_earlier_states_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerStates, "get_recurrent_state", lambda *_, **__: None)
    with pytest.raises(ValueError, match="chunks of a prompt give logits that differ"):
        wrap_module(build("bamba", SERVED["bamba"]))


def test_layers_with_attention_have_the_only_pages_of_keys() -> None:
    model = wrap_module(build("qwen3_next", SERVED["qwen3_next"]))
    assert model.places == {1: 0, 3: 1}
    assert len(model.layers) == 2
    assert model.states is not None
    assert {shape.layer for shape in model.states.shapes} == {0, 2}
    both = wrap_module(build("falcon_h1", SERVED["falcon_h1"]))
    assert len(both.layers) == 4
    assert both.states is not None
    assert {shape.layer for shape in both.states.shapes} == {0, 1, 2, 3}


def test_states_have_one_layout_per_dtype_and_model() -> None:
    def layout(name: str, dtype: torch.dtype) -> StateLayout:
        states = wrap_module(build(name, SERVED[name]).to(dtype)).states
        assert states is not None
        return states

    whole, half = layout("granitemoehybrid", torch.float32), layout("granitemoehybrid", torch.bfloat16)
    assert {shape.dtype for shape in half.shapes if not shape.is_convolution} == {torch.float32}
    assert half.num_bytes < whole.num_bytes
    assert len({each.name for each in (whole, half, layout("lfm2 conv", torch.float32))}) == 3


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear"])
def test_states_keep_their_dtype_beside_pages_of_e4m3(name: str) -> None:
    """Keys are stored before attention reads them, so that chunks of any size see the same ones."""
    model = wrap_module(build(name, SERVED[name]), LoadOptions(kv_cache_dtype="fp8"))
    assert model.kv_dtype is torch.float8_e4m3fn
    assert model.states is not None
    assert {shape.dtype for shape in model.states.shapes} == {torch.float32}
    prompts = random_prompts(40)
    whole = through_pages(model, prompts, [[(0, 0, 40)]])
    chunks = through_pages(model, prompts, [[(0, 0, 3)], [(0, 3, 20)], [(0, 20, 21)], [(0, 21, 40)]])
    assert_near(chunks, whole)
