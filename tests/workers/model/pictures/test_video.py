"""Logits of prompts with videos through our pages, in any chunks, beside transformers' own single pass."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.pictures.encoder_calls import shared_levels, values_of
from crossdock.workers.schedule.request.items import LEVELS, Item, with_levels
from crossdock.workers.schedule.request.submission import InvalidField
from tests.sweeps import rest_in_soak
from tests.workers.model.pictures.test_vision import logits_of, requests_of
from tests.workers.multimodal import (
    BEGIN,
    END,
    IMAGE,
    PLAIN,
    VIDEO,
    PicturePrompt,
    build_multimodal,
    one_pass,
    paged_multimodal,
    picture,
)

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl")


def video(family: str, seed: int, frames: int, size: tuple[int, int] = (2, 2), seconds: float = 1.0) -> Any:
    """Return the tokens that stand for a random video, and its item, as the family's processor would write it.

    `frames`: groups of frames, of two with Qwen's models. `seconds`: from one group to the next.
    """
    rng = np.random.default_rng([seed, frames, *size])
    if family == "internvl":  # each frame after some tokens of text
        tokens = [token for frame in range(frames) for token in (50 + frame, BEGIN, *[IMAGE] * 4, END)][2:-1]
        pixels = {"pixel_values": rng.standard_normal((frames, 3, 32, 32)).astype(np.float32)}
        return tokens, Item(0, len(tokens), 4 * frames, "image", rng.bytes(16), pixels)
    grid, rows = np.array([[frames, 2 * size[0], 2 * size[1]]]), size[0] * size[1]
    tensors: dict[str, NDArray[Any]] = {
        "pixel_values_videos": rng.standard_normal((int(grid.prod()), 3 * 2 * 4 * 4)).astype(np.float32),
        "video_grid_thw": grid,
    }
    tokens = [VIDEO] * (frames * rows)
    if family == "qwen3_vl":  # the second of each group as text
        tokens = [token for frame in range(frames) for token in (60 + frame, 61, BEGIN, *[VIDEO] * rows, END)][3:-1]
    if family == "qwen2_5_vl":
        tensors["second_per_grid_ts"] = np.array([seconds], np.float32)
    return tokens, Item(0, len(tokens), frames * rows, "video", rng.bytes(16), tensors)


@pytest.fixture(scope="module", params=rest_in_soak(FAMILIES, "qwen2_5_vl"))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[{}, PLAIN], ids=["fused", "plain"])
def models(request: pytest.FixtureRequest, family: str) -> tuple[LoadedModel, Any]:
    return paged_multimodal(family, **request.param), build_multimodal(family, **request.param)


def test_videos_and_pictures_cut_at_every_boundary_equal_one_pass(family: str, models: tuple[LoadedModel, Any]) -> None:
    model, module = models
    parts = (3, video(family, 1, 3), 2, picture(family, 2, (1, 2)), 5, video(family, 2, 2, (1, 2)), 1)
    prompt = PicturePrompt.of(*parts)
    expected, length = one_pass(module, prompt), len(prompt.token_ids)
    other = PicturePrompt.of(3, video(family, 3, 3), *parts[2:])
    assert not torch.allclose(expected, one_pass(module, other))
    for cut in range(1, length):
        (logits,) = logits_of(model, [prompt], [[(0, 0, cut)], [(0, cut, length)]])
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


def test_seconds_between_frames_decide_positions_of_qwen2_5() -> None:
    model, module = paged_multimodal("qwen2_5_vl"), build_multimodal("qwen2_5_vl")
    slow, fast = (PicturePrompt.of(3, video("qwen2_5_vl", 1, 4, seconds=each), 5) for each in (4.0, 0.5))
    expected = [one_pass(module, prompt) for prompt in (slow, fast)]
    assert not torch.allclose(*expected)
    for prompt, theirs in zip((slow, fast), expected, strict=True):
        (logits,) = logits_of(model, [prompt], [[(0, 0, 7)], [(0, 7, len(prompt.token_ids))]])
        torch.testing.assert_close(logits, theirs, rtol=1e-3, atol=1e-3)


def test_videos_and_pictures_are_encoded_together_as_alone(family: str, models: tuple[LoadedModel, Any]) -> None:
    encoder = models[0].encoder
    assert encoder is not None
    encoder.clear()
    items: Sequence[Item] = [video(family, 1, 3)[1], picture(family, 2)[1], video(family, 3, 2)[1]]
    encoder.encode(items)
    for item in items:
        torch.testing.assert_close(encoder.embeddings_of(item), encoder.features([item]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["pixel_values", "pixel_values_videos"])
def test_levels_of_pixels_are_encoded_as_their_values(name: str) -> None:
    model = paged_multimodal("qwen2_vl")
    encoder = model.encoder
    assert encoder is not None
    item = (video("qwen2_vl", 1, 3) if "videos" in name else picture("qwen2_vl", 1))[1]
    rng = np.random.default_rng(0)
    levels = rng.integers(0, 256, item.tensors[name].shape, dtype=np.uint8)
    table = rng.standard_normal((3, 256)).astype(np.float32)
    whole = np.stack([table[channel][levels.reshape(len(levels), 3, -1)[:, channel]] for channel in range(3)], 1)
    values = replace(item, tensors={**item.tensors, name: whole.reshape(levels.shape)})
    leveled = replace(item, tensors={**item.tensors, name: levels, LEVELS: table})
    assert np.array_equal(with_levels(leveled.tensors)[name], values.tensors[name])
    assert torch.equal(encoder.features([leveled]), encoder.features([values]))
    assert torch.equal(encoder.features([leveled, values]), encoder.features([values, values]))


@pytest.mark.parametrize("shape", [(2, 3, 8, 4), (1, 2, 3, 8, 4), (20, 96)])
def test_device_looks_up_the_same_values(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    levels, table = rng.integers(0, 256, shape, dtype=np.uint8), rng.standard_normal((3, 256)).astype(np.float32)
    expected = with_levels({"pixel_values": levels, LEVELS: table})["pixel_values"]
    assert np.array_equal(values_of(torch.from_numpy(levels), torch.from_numpy(table)).numpy(), expected)


def test_only_items_with_one_table_share_it() -> None:
    def item(table: NDArray[np.float32] | None) -> Item:
        return Item(0, 1, 1, "image", b"", {} if table is None else {LEVELS: table})

    one, same, other = np.zeros((3, 256), np.float32), np.zeros((3, 256), np.float32), np.ones((3, 256), np.float32)
    assert shared_levels([item(one), item(same)]) is one
    assert shared_levels([item(one), item(other)]) is shared_levels([item(one), item(None)]) is None
    assert shared_levels([item(None)]) is None


def test_video_whose_grid_is_not_that_of_its_placeholders_is_an_error() -> None:
    model = paged_multimodal("qwen3_vl")
    tokens, item = video("qwen3_vl", 1, 3)
    prompt = PicturePrompt.of(3, (tokens, item), 3)
    wrong = {**item.tensors, "video_grid_thw": np.array([[2, 4, 4]])}
    for change in ({"tensors": wrong}, {"num_embedding_tokens": 11}, {"kind": "image"}):
        changed = PicturePrompt(prompt.token_ids, [replace(prompt.items[0], **change)])  # type: ignore[arg-type]
        with pytest.raises(InvalidField, match=r"grids|placeholders"):
            requests_of(model, [changed])


def test_placeholder_of_a_video_without_an_item_is_an_error() -> None:
    with pytest.raises(InvalidField, match="token 3 is a placeholder of video"):
        requests_of(paged_multimodal("qwen2_vl"), [PicturePrompt.of(3, [VIDEO], picture("qwen2_vl", 1))])
