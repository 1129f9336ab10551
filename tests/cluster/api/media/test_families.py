"""Each family's pictures: ids and tensors against transformers' processors."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig

from crossdock.cluster.api.body.bodies import ChatCompletionRequest
from crossdock.cluster.api.media.families import NoPictures, read_family
from crossdock.cluster.api.media.media import place
from crossdock.cluster.api.media.preparation import Preparation
from crossdock.cluster.api.media.processes import ReadyPicture, as_ready
from crossdock.cluster.api.text.prompts import PromptEncoder
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import ModelCard
from crossdock.workers.model.pictures.vision import why_text_alone
from crossdock.workers.schedule.pictures.families import PICTURE_FAMILIES
from crossdock.workers.schedule.request.items import with_levels
from tests.cluster.api.media.picture_models import MODELS, encoded, image_part, picture, process_settings, saved
from tests.cluster.api.media.picture_oracle import PreparedHere, prompt_of
from tests.workers.multimodal import CONFIGS

CARD = ModelCard("tiny", 0, 10_000, 1000)
SIZES = [(40, 30), (30, 70), (64, 64), (8, 8), (100, 20)]


@pytest.mark.parametrize("kind", MODELS)
def test_prompt_with_pictures_equals_that_of_transformers(kind: str, tmp_path: Path) -> None:
    theirs = MODELS[kind].save(tmp_path)
    tokenizer = ModelTokenizer(theirs)
    images = [picture(*size, seed) for seed, size in enumerate(SIZES)]
    files = {f"data:{i}": encoded(image) for i, image in enumerate(images)}
    names = {token_id: text for text, token_id in tokenizer.added_tokens().items()}
    media: Any = PreparedHere(tmp_path, names, files)
    parts: list[dict[str, Any]] = [{"type": "text", "text": "Look: "}]
    for i in range(len(images)):
        parts += [image_part(f"data:{i}"), {"type": "text", "text": f" is number {i}.\n"}]
    messages = [{"role": "user", "content": "No picture."}, {"role": "user", "content": parts}]
    body = ChatCompletionRequest.of({"messages": messages})
    encoder = PromptEncoder(tokenizer, trusts_templates=False, media=media)
    prompt = asyncio.run(encoder.encode_chat(body, CARD, truncates=False, salt=""))

    token_ids, processed = prompt_of(kind, tmp_path, theirs, messages, images)
    assert prompt.token_ids == token_ids
    for outputs, item in zip(processed, prompt.items, strict=True):
        assert item.tensors["pixel_values"].dtype == np.uint8
        for name, tensor in with_levels(item.tensors).items():
            assert np.array_equal(tensor, np.asarray(outputs[name])), name
    at = 0
    for item in prompt.items:
        span = prompt.token_ids[item.start : item.end]
        assert item.start >= at
        assert span[0] == span[-1] == media.placeholders["image"]
        assert span.count(media.placeholders["image"]) == item.num_embedding_tokens > 0
        at = item.end
    assert prompt.token_ids.count(media.placeholders["image"]) == sum(
        item.num_embedding_tokens for item in prompt.items
    )


@pytest.mark.parametrize("kind", sorted({*PICTURE_FAMILIES, *MODELS, *CONFIGS}))
def test_pictures_of_a_family_are_written_by_the_ingress_and_taken_by_the_replica(kind: str, tmp_path: Path) -> None:
    """Each side has a tiny model of each family, whose text and logits other tests compare with transformers'."""
    assert read_family(tmp_path, saved(kind, tmp_path)[1]).tokens_of
    assert not why_text_alone(AutoConfig.for_model(**{"model_type": kind, **CONFIGS[kind]}))


def prepared(folder: Path, kind: str = "qwen2_vl", **arguments: Any) -> Preparation:
    return Preparation(process_settings(kind, folder, **arguments))


def test_equal_pictures_have_equal_hashes_and_others_have_not(tmp_path: Path) -> None:
    prepare = prepared(tmp_path)

    def hash_of(width: int, height: int, seed: int, **options: Any) -> bytes:
        data = encoded(picture(width, height, seed), **options)
        return as_ready(prepare({"data": data, "detail": "auto"})).content_hash

    assert hash_of(40, 30, 0) == hash_of(40, 30, 0, compress_level=0)  # other bytes, the same pixels
    assert len({hash_of(40, 30, 0), hash_of(40, 30, 1), hash_of(30, 40, 0)}) == 3


def test_hash_is_of_the_pixels_whatever_the_process_of_the_picture_says(tmp_path: Path) -> None:
    """A process that was taken over could claim the hash of another owner's picture, and so its embeddings."""
    prepare = prepared(tmp_path)
    one, other = (prepare({"data": encoded(picture(40, 30, seed)), "detail": "auto"}) for seed in (0, 1))
    claimed = as_ready({**other, "hash": as_ready(one).content_hash})
    assert claimed.content_hash == as_ready(other).content_hash != as_ready(one).content_hash


def test_arguments_of_the_configuration_reach_the_image_processor(tmp_path: Path) -> None:
    asked = {"data": encoded(picture(200, 200)), "detail": "auto"}
    assert sum(prepared(tmp_path, size={"shortest_edge": 64, "longest_edge": 256})(asked)["runs"]) == 4
    assert sum(prepared(tmp_path)(asked)["runs"]) == 64


@pytest.mark.parametrize(
    ("config", "reason"),
    [('{"model_type": "llama"}', "text only"), ('{"model_type": "kosmos-2", "vision_config": {}}', "kosmos-2")],
)
def test_model_without_a_family_of_pictures_is_refused(tmp_path: Path, config: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(NoPictures, match=reason):
        read_family(tmp_path, {})


def test_picture_is_placed_where_its_placeholders_are() -> None:
    ready = [ReadyPicture("", (2, 3), b"a", {}), ReadyPicture("", (1,), b"b", {})]
    token_ids, items = place([5, 9, 6, 9, 7, 9], {"image": 9}, ready)
    assert token_ids == [5, 9, 9, 6, 9, 9, 9, 7, 9]
    assert [(item.start, item.length, item.num_embedding_tokens, item.content_hash) for item in items] == [
        (1, 6, 5, b"a"),
        (8, 1, 1, b"b"),
    ]
    for wrong in ([5, 9, 6, 9, 7], [9, 9, 9, 9]):
        with pytest.raises(ValueError, match="placeholders"):
            place(wrong, {"image": 9}, ready)


def test_pixels_of_a_processor_that_mixes_them_travel_as_floats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that takes each picture's own mean away: no table has its values."""
    prepare = prepared(tmp_path, "llava")
    kind = type(prepare._processor._processor)
    usual = kind.normalize
    monkeypatch.setattr(kind, "normalize", lambda self, image, *rest: usual(self, image, *rest) - image.mean())
    assert prepare.tried() == {"is_ready": True, "passed_over": []}
    answer = prepare({"data": encoded(picture()), "detail": "auto"})
    assert answer["tensors"].keys() == {"pixel_values"}
    assert answer["tensors"]["pixel_values"][0] == "<f4"
