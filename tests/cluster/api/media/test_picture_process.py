"""The process of pictures: its limits, and what becomes of settings that cannot work."""

import faulthandler
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.media import picture_process
from crossdock.cluster.api.media.preparation import Preparation
from crossdock.cluster.api.media.processes import LIMITS
from crossdock.cluster.serve.media import open_media
from crossdock.workers.sandbox.limited_child import ChildFailed, run_limited
from crossdock.workers.sandbox.messages import pack, unpack
from tests.cluster.api.media.picture_models import process_settings, saved


def run_for_ever(_: Mapping[str, Any]) -> dict[str, Any]:
    while True:
        pass


def fill_memory(_: Mapping[str, Any]) -> dict[str, Any]:
    return {"bytes": len(bytearray(2 * LIMITS["image"].memory_bytes))}


def raise_an_error(_: Mapping[str, Any]) -> dict[str, Any]:
    raise KeyError("secret")


@pytest.fixture
def _no_faulthandler() -> Iterator[None]:
    """Signals end children: pytest's handler of faults would stay in a child, which may not remove it."""
    was_enabled = faulthandler.is_enabled()
    faulthandler.disable()
    yield
    if was_enabled:
        faulthandler.enable(sys.__stderr__)


@pytest.mark.usefixtures("_no_faulthandler")
@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (run_for_ever, "it takes too long to decode"),
        (fill_memory, "it needs more than 2048 MiB to decode"),
        (raise_an_error, "it cannot be decoded within this server's limits"),
    ],
)
def test_picture_that_ends_its_child_is_refused_alone(prepare: Any, reason: str) -> None:
    limits = replace(LIMITS["image"], cpu_seconds=0.3)
    reader, writer = os.pipe()  # of the ingress, which asks nothing meanwhile
    with os.fdopen(reader, "rb") as requests:
        with pytest.raises(ChildFailed) as failed:
            run_limited(prepare, pack({}), requests, limits)
        found = run_limited(lambda asked: {"runs": asked["runs"]}, pack({"runs": [1]}), requests, limits)
    os.close(writer)
    assert picture_process._refusal(failed.value, limits) == {"error": reason}
    assert unpack(found) == {"runs": [1]}


@pytest.mark.parametrize("wrong", [{"size": {"width": "broad"}}, {"size": 5}, {"max_pixels": -5}, {"resample": 77}])
def test_wrong_arguments_of_the_image_processor_are_found(wrong: dict[str, Any], tmp_path: Path) -> None:
    assert Preparation(process_settings("qwen2_vl", tmp_path, **wrong)).tried().keys() == {"wrong_arguments"}


def test_wrong_arguments_of_the_image_processor_are_named_at_the_start(tmp_path: Path) -> None:
    tokenizer, _ = saved("qwen2_vl", tmp_path)
    http = HttpConfig(mm_processor_kwargs={"size": 5}, limit_mm_per_prompt={"video": 0})
    with pytest.raises(ValueError, match=r"http\.mm_processor_kwargs"):
        open_media(tmp_path, tokenizer, http)


def test_model_whose_image_processor_is_unknown_serves_text(tmp_path: Path) -> None:
    tokenizer, _ = saved("qwen2_vl", tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "NoSuchProcessor"}))
    assert open_media(tmp_path, tokenizer, HttpConfig(limit_mm_per_prompt={"video": 0})) is None
    assert open_media(tmp_path, tokenizer, HttpConfig(limit_mm_per_prompt={"image": 0})) is None


def test_image_processor_may_stand_in_the_processors_file(tmp_path: Path) -> None:
    given = process_settings("smolvlm", tmp_path)
    images = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").unlink()
    processor = json.loads((tmp_path / "processor_config.json").read_text())
    (tmp_path / "processor_config.json").write_text(json.dumps({**processor, "image_processor": images}))
    assert Preparation(given).tried() == {"is_ready": True, "passed_over": []}
