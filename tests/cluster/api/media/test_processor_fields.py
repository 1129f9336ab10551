"""Fields of a processor's files that no code reads are named when pictures or videos are first prepared."""

import json
from pathlib import Path
from typing import Any

import pytest

from crossdock.cluster.api.media.preparation import Preparation, VideoPreparation
from crossdock.workers.schedule.pictures.families import PICTURE_FAMILIES
from tests.cluster.api.media.picture_models import MODELS

VIDEOS = [
    name
    for name, model in MODELS.items()
    if model.video_processor is not None and PICTURE_FAMILIES[str(model.config["model_type"])].video
]


def settings_of(name: str, folder: Path) -> dict[str, Any]:
    tokenizer = MODELS[name].save(folder)
    names = {str(token): added.content for token, added in tokenizer.added_tokens_decoder.items()}
    return {"folder": str(folder), "names": names, "arguments": {}, "most_pixels": 1 << 20, "sampling": {}}


def change(file: Path, name: str, value: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))


@pytest.mark.parametrize("name", MODELS)
def test_field_of_a_processor_that_no_code_reads_is_named_and_published_ones_are_not(name: str, tmp_path: Path) -> None:
    settings = settings_of(name, tmp_path)
    for field, value in {"processor_class": "P", "auto_map": {"AutoProcessor": "own.P"}, "image_token": "<i>"}.items():
        change(tmp_path / "processor_config.json", field, value)
    change(tmp_path / "preprocessor_config.json", "_valid_processor_keys", ["a"])
    assert Preparation(settings).tried() == {"is_ready": True, "passed_over": []}
    change(tmp_path / "processor_config.json", "something_new", 7)
    change(tmp_path / "preprocessor_config.json", "something_else", "x")
    found = "\n".join(Preparation(settings).tried()["passed_over"])
    assert "processor_config.json: something_new is 7" in found
    assert 'preprocessor_config.json: something_else is "x"' in found


@pytest.mark.parametrize("name", VIDEOS)
def test_field_of_videos_that_frames_do_not_follow_is_named(name: str, tmp_path: Path) -> None:
    settings = settings_of(name, tmp_path)
    assert VideoPreparation(settings).tried() == {"is_ready": True, "passed_over": []}
    change(tmp_path / "video_preprocessor_config.json", "fps", 4)
    change(tmp_path / "video_preprocessor_config.json", "rescale_factor", 0.5)
    found = VideoPreparation(settings).tried()["passed_over"]
    assert [reason for reason in found if "rescale_factor is 0.5: frames of videos are prepared as pictures" in reason]
    assert len(found) == 1
