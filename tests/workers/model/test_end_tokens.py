"""The end token of a tokenizer's files is the one that transformers reads from them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from crossdock.workers.model.end_tokens import end_of_tokenizer
from tests.cluster.small_tokenizers import TOKENIZERS, byte_level


@pytest.mark.parametrize("name", TOKENIZERS)
def test_end_token_of_every_kind_of_tokenizer_is_transformers(name: str, tmp_path: Path) -> None:
    TOKENIZERS[name]().save_pretrained(tmp_path)
    expected = AutoTokenizer.from_pretrained(tmp_path).eos_token_id
    assert isinstance(expected, int)
    assert end_of_tokenizer(tmp_path, 10**6) == {expected}
    assert end_of_tokenizer(tmp_path, expected) == frozenset(), "the model lacks it"


def as_object(config: dict[str, Any], _folder: Path) -> None:
    config["eos_token"] = {"content": config["eos_token"], "__type": "AddedToken"}


def in_the_map(config: dict[str, Any], folder: Path) -> None:
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": config.pop("eos_token")}))


def by_the_decoder(config: dict[str, Any], folder: Path) -> None:
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    config["added_tokens_decoder"] = {str(each["id"]): {"content": each["content"]} for each in added}
    (folder / "tokenizer.json").unlink()


def in_the_vocabulary(config: dict[str, Any], folder: Path) -> None:
    config["eos_token"] = "a"


@pytest.mark.parametrize("change", [as_object, in_the_map, by_the_decoder, in_the_vocabulary])
def test_end_token_is_found_in_every_form_of_the_files(
    change: Callable[[dict[str, Any], Path], None], tmp_path: Path
) -> None:
    tokenizer = byte_level()
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    change(config, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    text = "a" if change is in_the_vocabulary else "<|im_end|>"
    assert end_of_tokenizer(tmp_path, 10**6) == {tokenizer.convert_tokens_to_ids(text)}


def test_folder_without_a_tokenizer_or_without_an_end_names_none(tmp_path: Path) -> None:
    assert end_of_tokenizer(None, 100) == end_of_tokenizer(tmp_path, 100) == frozenset()
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert end_of_tokenizer(tmp_path, 100) == frozenset()


def test_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not JSON"):
        end_of_tokenizer(tmp_path, 100)
