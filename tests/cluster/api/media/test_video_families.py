"""Each family's videos: ids and tensors against transformers' own parts."""

import asyncio
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoImageProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

from crossdock.cluster.api.body.bodies import ChatCompletionRequest
from crossdock.cluster.api.media.families import NoPictures
from crossdock.cluster.api.media.preparation import VideoPreparation
from crossdock.cluster.api.media.processes import as_ready
from crossdock.cluster.api.media.video_families import number_in_words, read_video_family
from crossdock.cluster.api.text.prompts import PromptEncoder
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import ModelCard
from crossdock.workers.schedule.pictures.families import PICTURE_FAMILIES
from crossdock.workers.schedule.request.items import with_levels
from tests.cluster.api.media.picture_models import MODELS, encoded, image_part, picture, process_settings, saved
from tests.cluster.api.media.picture_oracle import PreparedHere
from tests.cluster.api.media.video_models import (
    FAMILIES,
    in_container,
    moving,
    their_frames,
    their_tensors,
    video_file,
    video_part,
)

CARD = ModelCard("tiny", 0, 10_000, 1000)
CLIPS = [(12, 64, 48, 6), (7, 40, 120, 7), (1, 30, 30, 6), (9, 200, 56, 5)]  # frames, width, height, shown


@pytest.mark.parametrize(
    ("kind", "clip"), [*((kind, CLIPS[0]) for kind in FAMILIES), *(("qwen3_vl", clip) for clip in CLIPS[1:])]
)
def test_prompt_with_videos_equals_that_of_transformers(
    kind: str, clip: tuple[int, int, int, int], tmp_path: Path
) -> None:
    """A picture, a video, and the video's reverse, with text around and between."""
    count, width, height, shown = clip
    theirs = MODELS[kind].save(tmp_path)
    tokenizer = ModelTokenizer(theirs)
    clips = [video_file(frames) for frames in (moving(count, width, height), moving(count, width, height)[::-1])]
    files = {"data:p": encoded(picture()), "data:0": clips[0], "data:1": clips[1]}
    names = {token_id: text for text, token_id in tokenizer.added_tokens().items()}
    media: Any = PreparedHere(tmp_path, names, files, shown)
    parts = [image_part("data:p"), {"type": "text", "text": "See "}, video_part("data:0"), video_part("data:1")]
    content = [*parts, {"type": "text", "text": "Which?"}]
    encoder = PromptEncoder(tokenizer, trusts_templates=False, media=media)
    body = ChatCompletionRequest.of({"messages": [{"role": "user", "content": content}]})
    prompt = asyncio.run(encoder.encode_chat(body, CARD, truncates=False, salt=""))

    model = MODELS[kind]
    seen = [{"role": "user", "content": [{**part, "type": part["type"].removesuffix("_url")} for part in content]}]
    text = str(theirs.apply_chat_template(seen, tokenize=False, add_generation_prompt=True))
    processor = AutoImageProcessor.from_pretrained(str(tmp_path), backend="pil")
    outputs = processor(picture(), return_tensors="np", **(model.arguments or {}))
    written = model.video_written if kind in ("qwen3_vl", "internvl", "smolvlm") else "<|video_pad|>"
    pairs = [their_tensors(kind, *their_frames(file, shown, tmp_path)) for file in clips]
    replaced = [(model.tokens[-1 if kind.startswith("qwen") else 0], model.expand(outputs, 0))]
    for token, replacement in [*replaced, *((written, replacement) for _, replacement in pairs)]:
        assert token in text
        text = text.replace(token, replacement.replace("<", "\0"), 1)
    assert prompt.token_ids == theirs.encode(text.replace("\0", "<"), add_special_tokens=False)
    tensors = [own for own, _ in pairs]
    rest = iter(prompt.items[1:])
    for own in tensors:
        items = list(islice(rest, num_items(kind, own)))
        found = [with_levels(item.tensors) for item in items]
        assert found[0].keys() == own.keys()
        for name in own:
            joined = np.concatenate([tensors[name] for tensors in found])
            if name == "video_grid_thw":
                joined = np.array([[joined[:, 0].sum(), *joined[0, 1:]]])
            assert np.allclose(joined, own[name].numpy(), rtol=1e-5, atol=1e-5), name
        for item in items:
            assert item.kind == ("image" if kind in ("internvl", "smolvlm") else "video")
            placeholder = media.placeholders[item.kind]
            assert prompt.token_ids[item.start : item.end].count(placeholder) == item.num_embedding_tokens > 0
            assert prompt.token_ids[item.start] == prompt.token_ids[item.end - 1] == placeholder
        assert len({item.content_hash for item in items}) == len(items)
    assert not list(rest)


def num_items(kind: str, tensors: Mapping[str, Any]) -> int:
    """Return how many items a video is: its groups of frames, where text stands between them."""
    if kind == "qwen3_vl":
        return int(tensors["video_grid_thw"][0, 0])
    return len(tensors["pixel_values"]) if kind == "internvl" else 1


def tried(folder: Path, **arguments: Any) -> VideoPreparation:
    """Return a preparation of videos that has been tried."""
    sampling = {"num_frames": 8, "fps": None}
    prepare = VideoPreparation({**process_settings("qwen2_5_vl", folder, **arguments), "sampling": sampling})
    assert prepare.tried() == {"is_ready": True, "passed_over": []}
    return prepare


def test_hash_covers_frames_and_their_times(tmp_path: Path) -> None:
    prepare = tried(tmp_path)
    same, slow, other = (video_file(moving(8, seed=seed), fps=fps) for seed, fps in ((0, 4), (0, 8), (1, 4)))
    again = in_container(same, "matroska")
    hashes = [as_ready(prepare({"data": data})).content_hash for data in (same, again, slow, other)]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


def test_arguments_of_the_configuration_bound_the_size_of_frames(tmp_path: Path) -> None:
    data = video_file(moving(8, 64, 64))
    few = tried(tmp_path, size={"shortest_edge": 64, "longest_edge": 256})({"data": data})
    assert sum(few["runs"]) == 4 * 4  # groups of frames, and tokens of each
    assert sum(tried(tmp_path)({"data": data})["runs"]) == 4 * 25


@pytest.mark.parametrize("kind", [kind for kind, family in PICTURE_FAMILIES.items() if family.video is None])
def test_other_families_see_no_videos(kind: str, tmp_path: Path) -> None:
    names = saved(kind, tmp_path)[1]
    with pytest.raises(NoPictures, match="internvl, qwen2_5_vl, qwen2_vl, qwen3_vl, qwen3_vl_moe, smolvlm see videos"):
        read_video_family(tmp_path, names, {})


def test_size_of_frames_equals_that_of_transformers(tmp_path: Path) -> None:
    size = MODELS["qwen3_vl"].video_processor["size"]  # type: ignore[index]
    resize = read_video_family(tmp_path, saved("qwen3_vl", tmp_path)[1], {}).resize
    for width, height in ((640, 360), (8, 8), (3, 9), (1920, 1080), (50, 9000)):
        for count in (1, 2, 3, 7, 32):
            theirs = smart_resize(max(count, 2), height, width, 2, 8, size["shortest_edge"], size["longest_edge"])
            assert resize(count, width, height) == theirs[::-1]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (1, "one"),
        (13, "thirteen"),
        (20, "twenty"),
        (32, "thirty-two"),
        (100, "one hundred"),
        (119, "one hundred and nineteen"),
        (768, "seven hundred and sixty-eight"),
    ],
)
def test_numbers_are_written_as_smolvlm_reads_them(number: int, words: str) -> None:
    assert number_in_words(number) == words
