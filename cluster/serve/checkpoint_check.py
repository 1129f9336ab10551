"""Check a checkpoint by its files alone, before Ray starts and without torch."""

from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from crossdock.workers.model.architecture import decoder_fields
from crossdock.workers.model.loaders.objects import bytes_of_weights
from crossdock.workers.model.text_files import text_answer
from crossdock.workers.model.weights.scheme import PLAIN, Scheme, check_asked, scheme_at
from crossdock.workers.model.weights.untrusted import check_index, read_config_file

_TOKENIZERS = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken", "tekken.json")  # files of which one is enough

_TASKS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT")  # of transformers' tables of classes
_SIZES = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_key_value_heads")
_MEANINGS = ("num_attention_heads", "head_dim", "intermediate_size", "rope_theta", "rms_norm_eps")  # if in both


def check_checkpoint(folder: Path, *, needs_tokenizer: bool = True, quantization: str | None = None) -> Scheme:
    """Check the kind of model in `folder` and that a tokenizer is beside it. Returns how its weights are stored.

    Raises:
        ValueError: config.json is none, transformers does not know its `model_type`, weights stored so are not read or
            not what `quantization` asks for, or there is no tokenizer.
    """
    file = folder / "config.json"
    try:
        kind = read_config_file(folder).get("model_type")
        check_index(folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"model: {error}") from None
    if not isinstance(kind, str):
        raise ValueError(f"model: {file} has no model_type; a Hugging Face checkpoint has one")
    if not _is_known(kind):
        raise ValueError(
            f"model: {file} has model_type {kind!r}, which transformers {version('transformers')} does not know; "
            "models that bring code of their own are not served (docs/models.md)"
        )
    if text_answer(folder) is None and not _generates_text(kind):
        raise ValueError(
            f"model: {file} has model_type {kind!r}, for which transformers {version('transformers')} has no model "
            "that generates text (AutoModelForCausalLM, AutoModelForImageTextToText); docs/models.md has what is served"
        )
    scheme = scheme_at(folder)
    check_asked(quantization, scheme)
    if needs_tokenizer and not any(file for pattern in _TOKENIZERS for file in folder.glob(pattern)):
        raise ValueError(f"model: {folder} has no tokenizer.json and no other tokenizer; name one with --tokenizer")
    return scheme


def require_same_model(folder: Path, other: Path) -> None:
    """Check that two checkpoints are one model in two formats, as far as config.json says.

    Raises:
        ValueError: a size, or what a vector means, differs; the message names the field.
    """
    ours, theirs = (decoder_fields(read_config_file(each)) for each in (folder, other))
    for field in (*_SIZES, *(field for field in _MEANINGS if field in ours and field in theirs)):
        if ours.get(field) != theirs.get(field):
            raise ValueError(
                f"{other} has {field} {theirs.get(field)!r} and {folder} {ours.get(field)!r}; pools serve one model, "
                f"in formats of their own"
            )


def describe_weights(folder: Path, scheme: Scheme) -> str:
    """Return how the weights in `folder` are stored and their bytes, as text for the terminal."""
    num_bytes = bytes_of_weights(folder)
    return f"{'plain floats' if scheme is PLAIN else scheme}, {num_bytes / (1 << 30):.2f} GiB in files"


def _is_known(kind: str) -> bool:
    """Report whether transformers names a model type in its tables, without the seconds that importing them takes."""
    return any(f"{quote}{kind}{quote}" in text for text in _tables().values() for quote in "'\"")


def _generates_text(kind: str) -> bool:
    """Report whether transformers' tables have a class for a model type that predicts tokens."""
    text = _tables()["modeling_auto.py"]
    parts = [text.partition(f"\nMODEL_FOR_{task}_MAPPING_NAMES = ")[2].partition("\n)\n")[0] for task in _TASKS]
    return any(f'("{kind}", ' in part for part in parts) or not all(parts)


@lru_cache
def _tables() -> dict[str, str]:
    """Return the texts of transformers' files that list its model types, by the files' names."""
    found = find_spec("transformers")
    assert found is not None
    assert found.origin is not None
    files = (Path(found.origin).parent / "models" / "auto").glob("*_*.py")
    return {file.name: file.read_text() for file in files}
