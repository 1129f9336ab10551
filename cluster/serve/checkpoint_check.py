"""Check a checkpoint by its files alone, before Ray starts and without torch."""

import json
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from crossdock.workers.model.weights.scheme import scheme_at

_TOKENIZERS = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken", "tekken.json")  # files of which one is enough


def check_checkpoint(folder: Path, *, needs_tokenizer: bool = True) -> None:
    """Check the kind of model in `folder`, how its weights are stored, and that a tokenizer is beside it.

    Raises:
        ValueError: config.json is none, transformers does not know its `model_type`, weights stored so are not read, or
            there is no tokenizer.
    """
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"model: {file} is not JSON: {error}") from None
    kind = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(kind, str):
        raise ValueError(f"model: {file} has no model_type; a Hugging Face checkpoint has one")
    if not _is_known(kind):
        raise ValueError(
            f"model: {file} has model_type {kind!r}, which transformers {version('transformers')} does not know; "
            "models that bring code of their own are not served (docs/models.md)"
        )
    scheme_at(folder)
    if needs_tokenizer and not any(file for pattern in _TOKENIZERS for file in folder.glob(pattern)):
        raise ValueError(f"model: {folder} has no tokenizer.json and no other tokenizer; name one with --tokenizer")


def _is_known(kind: str) -> bool:
    """Report whether transformers names a model type in its tables, without the seconds that importing them takes."""
    found = find_spec("transformers")
    assert found is not None
    assert found.origin is not None
    tables = (Path(found.origin).parent / "models" / "auto").glob("*_*.py")
    return any(f"{quote}{kind}{quote}" in table for table in map(Path.read_text, tables) for quote in "'\"")
