"""Each family's videos: ids and tensors against transformers' own parts."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import AutoImageProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

from crossdock.cluster.api.body.bodies import ChatCompletionRequest
from crossdock.cluster.api.body.pictures import Picture
from crossdock.cluster.api.media.families import NoPictures, read_family
from crossdock.cluster.api.media.media import Place
from crossdock.cluster.api.media.preparation import Preparation, VideoPreparation
from crossdock.cluster.api.media.processes import ReadyPicture
from crossdock.cluster.api.media.video_families import number_in_words, read_video_family, smart_size
from crossdock.cluster.api.text.prompts import PromptEncoder
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import ModelCard
from crossdock.workers.schedule.pictures.families import PICTURE_FAMILIES
from crossdock.workers.schedule.pictures.items import with_levels
from tests.cluster.api.media.picture_models import MODELS, encoded, image_part, picture
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


class PreparedHere:
    """Media whose pictures and videos are prepared in this process, where the oracle runs as well."""

    def __init__(self, folder: Path, names: dict[int, str], files: dict[str, bytes], num_frames: int) -> None:
        settings = {"folder": str(folder), "names": {str(key): name for key, name in names.items()}, "arguments": {}}
        settings["most_pixels"] = 1 << 20
        sampling = {"num_frames": num_frames, "fps": None}
        families = {"image": read_family(folder, names), "video": read_video_family(folder, names, {}).family}
        self.places = {
            kind: Place(each.written, each.placeholder, each.placeholder_id) for kind, each in families.items()
        }
        self.placeholders = {kind: place.token_id for kind, place in self.places.items()}
        self._prepare: Mapping[str, Any] = {
            "image": Preparation(settings),
            "video": VideoPreparation({**settings, "sampling": sampling}),
        }
        assert [each.tried() for each in self._prepare.values()] == [{"is_ready": True}] * 2
        self._files = files

    def check(self, pictures: list[Picture]) -> None:
        """Accept all."""

    async def prepare(
        self, pictures: list[Picture], most_rows: int | None, *, salt: str, tenant: str
    ) -> list[ReadyPicture]:
        asked = [(each, {"data": self._files[each.url], "detail": each.detail}) for each in pictures]
        answers = [self._prepare[each.kind](given) for each, given in asked]
        return [
            ReadyPicture(each["text"], tuple(each["runs"]), each["hash"], _arrays(each), each["kind"])
            for each in answers
        ]


def _arrays(answer: dict[str, Any]) -> dict[str, NDArray[Any]]:
    return {
        name: np.frombuffer(body, np.dtype(kind)).reshape(shape)
        for name, (kind, shape, body) in answer["tensors"].items()
    }


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("kind", FAMILIES)
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
    prompt = asyncio.run(encoder.encode_chat(body, None, CARD, truncates=False, salt=""))

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
    for item, own in zip(prompt.items[1:], tensors, strict=True):
        assert item.kind == ("image" if kind in ("internvl", "smolvlm") else "video")
        assert item.tensors.keys() - {"pixel_levels"} == own.keys()
        for name, tensor in with_levels(item.tensors).items():
            assert np.allclose(tensor, own[name].numpy(), rtol=1e-5, atol=1e-5), name
        placeholder = media.placeholders[item.kind]
        assert prompt.token_ids[item.start : item.end].count(placeholder) == item.num_rows > 0
        assert prompt.token_ids[item.start] == prompt.token_ids[item.end - 1] == placeholder


def tried(folder: Path, kind: str = "qwen2_5_vl", arguments: Mapping[str, Any] | None = None) -> VideoPreparation:
    """Return a preparation of videos that has been tried."""
    tokenizer = ModelTokenizer(MODELS[kind].save(folder))
    names = {str(token_id): text for text, token_id in tokenizer.added_tokens().items()}
    settings = {"folder": str(folder), "names": names, "arguments": arguments or {}, "most_pixels": 1 << 20}
    prepare = VideoPreparation({**settings, "sampling": {"num_frames": 8, "fps": None}})
    assert prepare.tried() == {"is_ready": True}
    return prepare


def test_hash_covers_frames_and_their_times(tmp_path: Path) -> None:
    prepare = tried(tmp_path)
    same, slow, other = (video_file(moving(8, seed=seed), fps=fps) for seed, fps in ((0, 4), (0, 8), (1, 4)))
    again = in_container(same, "matroska")
    hashes = [prepare({"data": data})["hash"] for data in (same, again, slow, other)]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


def test_arguments_of_the_configuration_bound_the_size_of_frames(tmp_path: Path) -> None:
    data = video_file(moving(8, 64, 64))
    few = tried(tmp_path, arguments={"size": {"shortest_edge": 64, "longest_edge": 256}})({"data": data})
    assert sum(few["runs"]) == 4 * 4  # groups of frames, and tokens of each
    assert sum(tried(tmp_path)({"data": data})["runs"]) == 4 * 25


@pytest.mark.parametrize("kind", [kind for kind, family in PICTURE_FAMILIES.items() if family.video is None])
def test_other_families_see_no_videos(kind: str, tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(MODELS[kind].save(tmp_path))
    names = {token_id: text for text, token_id in tokenizer.added_tokens().items()}
    with pytest.raises(NoPictures, match="internvl, qwen2_5_vl, qwen2_vl, qwen3_vl, qwen3_vl_moe, smolvlm see videos"):
        read_video_family(tmp_path, names, {})


@pytest.mark.parametrize("count", [1, 2, 3, 7, 32])
@pytest.mark.parametrize(("width", "height"), [(640, 360), (8, 8), (3, 9), (1920, 1080), (50, 9000)])
def test_size_of_frames_equals_that_of_transformers(count: int, width: int, height: int, tmp_path: Path) -> None:
    size = MODELS["qwen3_vl"].video_processor["size"]  # type: ignore[index]
    names = {
        token_id: text for text, token_id in ModelTokenizer(MODELS["qwen3_vl"].save(tmp_path)).added_tokens().items()
    }
    resize = read_video_family(tmp_path, names, {}).resize
    theirs = smart_resize(max(count, 2), height, width, 2, 8, size["shortest_edge"], size["longest_edge"])
    assert resize(count, width, height) == theirs[::-1]


def test_frame_too_narrow_for_the_model_has_no_size() -> None:
    with pytest.raises(ValueError, match="200 times"):
        smart_size(1000, 4, 8, 64, 6400)


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
