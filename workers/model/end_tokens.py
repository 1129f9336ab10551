"""The token that a tokenizer calls its end, which ends an answer beside those that the model's files name."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crossdock.workers.model.weights.untrusted import read_json, read_json_if_any

_NAMES = ("tokenizer_config.json", "special_tokens_map.json")
_ADDED = '"added_tokens"'


def end_of_tokenizer(folder: Path | None, vocab_size: int) -> frozenset[int]:
    """Return the end token of the tokenizer in a directory, if the files name one that the model has.

    Finetuned models often have an end of turn there, and in config.json still the base model's end of a text. The
    files are read without transformers, whose tokenizers take seconds to load.

    Raises:
        ValueError: a file cannot be read; the message names the file.
    """
    text = None if folder is None else _text_of_end(folder)
    if folder is None or text is None:
        return frozenset()
    found = next((token for token, content in _tokens(folder) if content == text), None)
    return frozenset() if found is None or not 0 <= found < vocab_size else frozenset([found])


def _text_of_end(folder: Path) -> str | None:
    for name in _NAMES:
        token = read_json_if_any(folder / name).get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            return text
    return None


def _tokens(folder: Path) -> Iterator[tuple[int, str]]:
    """Yield token ids with their texts, added tokens first: most end tokens are among them."""
    added = read_json_if_any(folder / _NAMES[0]).get("added_tokens_decoder")
    for number, token in added.items() if isinstance(added, dict) else ():
        if isinstance(token, dict) and number.isdecimal():
            yield int(number), token.get("content", "")
    if not (folder / "tokenizer.json").is_file():
        return
    yield from _ids(_added_tokens(folder / "tokenizer.json"))
    model = read_json(folder / "tokenizer.json").get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        yield from ((token, text) for text, token in vocabulary.items() if isinstance(token, int))
    elif isinstance(vocabulary, list):  # of pairs (text, score)
        yield from ((token, pair[0]) for token, pair in enumerate(vocabulary) if isinstance(pair, list) and pair)


def _added_tokens(file: Path) -> Any:
    """Return the list of added tokens, which stands before a vocabulary of many megabytes."""
    text = file.read_text(encoding="utf-8", errors="replace")
    start = text.find("[", text.find(_ADDED))
    try:
        return json.JSONDecoder().raw_decode(text, start)[0] if _ADDED in text and start >= 0 else []
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from None


def _ids(tokens: Any) -> Iterator[tuple[int, str]]:
    for token in tokens if isinstance(tokens, list) else ():
        if isinstance(token, dict) and isinstance(token.get("id"), int):
            yield token["id"], token.get("content", "")
