"""Fields of a tokenizer's files: tokens and text are those of transformers' tokenizer, and the log names the rest."""

import json
import logging
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from transformers import AutoTokenizer

from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.api.text.tokenizer_fields import reasons
from tests.cluster.small_tokenizers import TOKENIZERS

TEXTS = ("The quick brown fox .", " lazy  dog", "Größe <tool>x <|im_end|>y", "it does n't , x\n\n\ty", "")

# Classes that build their tokenizer themselves, with a small tokenizer whose vocabulary fits.
CLASSES = {
    "GPT2Tokenizer": "byte_level",
    "Qwen2Tokenizer": "byte_level",
    "GPTNeoXTokenizer": "byte_level",
    "LlamaTokenizer": "llama2",
    "GemmaTokenizer": "gemma",
    "BertTokenizer": "wordpiece",
    "XLNetTokenizer": "metaspace",
}
KINDS = {name: (name, None) for name in TOKENIZERS} | {name: (kind, name) for name, kind in CLASSES.items()}


@cache
def files(kind: str) -> dict[str, str]:
    """Return the files of a small tokenizer, by name."""
    tokenizer = TOKENIZERS[kind]()
    tokenizer.add_special_tokens({"bos_token": "<|im_start|>"})
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {file.name: file.read_text() for file in Path(folder).iterdir()}


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    kind, class_name = KINDS[request.param]
    for name, text in files(kind).items():
        (tmp_path / name).write_text(text)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_neox"}))
    write(tmp_path, "tokenizer_class", class_name or "PreTrainedTokenizerFast")
    if kind == "wordpiece":
        write(tmp_path, "unk_token", "<unk>")
    return tmp_path


def write(folder: Path, name: str, value: Any) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))


def load(folder: Path) -> tuple[Any, list[str]]:
    """Compare tokens and text with transformers' own. Returns transformers' tokenizer, and the reasons."""
    expected = AutoTokenizer.from_pretrained(folder)
    asked = json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"]
    assert asked not in CLASSES or type(expected).__name__ == asked
    tokenizer = ModelTokenizer(expected)
    found = list(reasons(folder, expected))
    # The decoder of WordPiece moves spaces of tokens before it, which a stream has shown.
    is_plain = type(expected.backend_tokenizer.model).__name__ != "WordPiece"
    for text in TEXTS:
        for adds in (True, False):
            ids = expected.encode(text, add_special_tokens=adds)
            assert tokenizer.encode(text, add_special_tokens=adds) == ids
            assert tokenizer.encode(text, add_special_tokens=adds, salt="") == ids
            if named(found, "clean_up_tokenization_spaces"):
                continue
            assert tokenizer.decode(ids) == expected.decode(ids)
            detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
            shown = "".join(map(detokenizer.add, ids)) + detokenizer.flush()
            assert not is_plain or shown == expected.decode(ids)
    return expected, found


def named(found: list[str], field: str) -> bool:
    return any(f": {field} is " in reason for reason in found)


@pytest.mark.parametrize("field", ["add_bos_token", "add_eos_token", "add_prefix_space", "do_lower_case"])
def test_field_of_tokens_changes_them_as_in_transformers_or_is_named(folder: Path, field: str) -> None:
    outcomes, is_named = [], []
    for value in (True, False):
        write(folder, field, value)
        tokenizer, found = load(folder)
        outcomes.append([tokenizer.encode(text) for text in TEXTS])
        is_named.append(named(found, field))
    if outcomes[0] == outcomes[1]:
        assert sorted(is_named) == [False, True], "one of the values is not what the tokenizer does"
    else:
        assert is_named == [False, False]


def test_published_fields_give_the_tokens_of_transformers(folder: Path) -> None:
    write(folder, "split_special_tokens", True)
    load(folder)
    write(folder, "split_special_tokens", False)
    write(folder, "clean_up_tokenization_spaces", True)
    _, found = load(folder)
    assert named(found, "clean_up_tokenization_spaces") is not is_pairs(folder)
    write(folder, "clean_up_tokenization_spaces", False)
    for field, value in {
        "extra_special_tokens": ["fox", "quick"],
        "image_token": "lazy",
        "legacy": False,
        "model_max_length": 2,
        "padding_side": "left",
        "truncation_side": "right",
        "trim_offsets": False,
        "backend": "tokenizers",
        "response_schema": {"a": 1},
    }.items():
        write(folder, field, value)
    tokenizer, found = load(folder)
    assert found == []
    assert {"fox", "quick", "lazy"} <= {token.content for token in tokenizer.added_tokens_decoder.values()}


def is_pairs(folder: Path) -> bool:
    """Return whether the tokenizer has byte pairs, whose text transformers does not clean up."""
    return json.loads((folder / "tokenizer.json").read_text())["model"]["type"] == "BPE"


def test_truncation_and_padding_in_tokenizer_json_change_no_token(folder: Path) -> None:
    file = folder / "tokenizer.json"
    found = json.loads(file.read_text())
    found["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    found["padding"] = {
        "strategy": {"Fixed": 40},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    file.write_text(json.dumps(found))
    load(folder)


def published(folder: Path) -> None:
    for name, value in {
        "add_prefix_space": False,
        "additional_special_tokens": ["<|im_start|>"],
        "boi_token": "<boi>",
        "clean_up_tokenization_spaces": False,
        "device_map": "auto",
        "eoi_token": "<eoi>",
        "errors": "replace",
        "extra_special_tokens": {},
        "fix_mistral_regex": True,
        "from_slow": True,
        "image_token": "<image>",
        "is_local": True,
        "language": "en",
        "legacy": False,
        "mask_token": "<|endoftext|>",
        "max_length": 512,
        "model_input_names": ["input_ids"],
        "model_max_length": 10**30,
        "name_or_path": "org/model",
        "pad_token": "<|endoftext|>",
        "processor_class": "Processor",
        "sp_model_kwargs": {},
        "spaces_between_special_tokens": True,
        "special_tokens_map_file": "/tmp/map.json",
        "split_special_tokens": False,
        "stride": 2,
        "task": "transcribe",
        "transformers_version": "5.0.0",
        "trim_offsets": True,
        "truncation_strategy": "longest_first",
        "unk_token": "<|endoftext|>",
        "use_default_system_prompt": True,
    }.items():
        write(folder, name, value)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    TOKENIZERS["byte_level"]().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path


def test_published_fields_are_not_named(plain: Path) -> None:
    published(plain)
    assert list(reasons(plain, AutoTokenizer.from_pretrained(plain))) == []


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("something_new", 3, "something_new is 3: .* does not read this field"),
        ("sp_model_kwargs", {"enable_sampling": True}, "sp_model_kwargs .* always has the same tokens"),
        ("truncation_side", "left", 'truncation_side is "left", but texts for vectors lose their end'),
        ("errors", "ignore", 'errors is "ignore", but bytes'),
        ("tokenizer_class", "OwnTokenizer", 'tokenizer_class is "OwnTokenizer", but transformers has no such class'),
        ("auto_map", {"AutoTokenizer": [None, "own.OwnFast"]}, "auto_map names own.OwnFast, whose code is not run"),
    ],
)
def test_field_that_is_not_followed_is_named_in_the_log(
    plain: Path, name: str, value: Any, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(plain, name, value)
    with caplog.at_level(logging.WARNING):
        ModelTokenizer.load(plain)
    assert [record for record in caplog.records if "tokenizer_fields" in record.name]
    assert re.search(expected, caplog.text)


def test_chance_in_tokenizer_json_is_named_and_an_unknown_part_refused(
    plain: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = plain / "tokenizer.json"
    found = json.loads(file.read_text())
    found["model"]["dropout"] = 0.1
    file.write_text(json.dumps(found))
    with caplog.at_level(logging.WARNING):
        ModelTokenizer.load(plain)
    assert "dropout of the model is not 0" in caplog.text
    file.write_text(json.dumps({**found, "something_new": [2]}))
    with pytest.raises(ValueError, match=rf"{plain}.* cannot be read"):
        ModelTokenizer.load(plain)


def test_tokenizer_whose_class_comes_with_the_model_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(_: str) -> str:
        raise AssertionError("asked on the terminal")

    monkeypatch.setattr("builtins.input", ask)
    config = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unknown_to_transformers"}))
    with pytest.raises(ValueError, match=r"asks for own\.OwnTokenizer, a class whose code comes with the model"):
        ModelTokenizer.load(tmp_path)
