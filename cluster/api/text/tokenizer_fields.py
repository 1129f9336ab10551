"""Fields of a tokenizer's files whose value changes nothing here, for the log.

Tokens are those of transformers' `AutoTokenizer`. It passes over some fields where tokenizer.json is there, because
that file says all that they say. A server whose files disagree starts: many published tokenizers have such a field.
The log names the field, what the field asks for, and what is done.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from crossdock.cluster.api.body.file_fields import asks_for_nothing, names_in_code, passed_over
from crossdock.workers.model.weights.untrusted import read_json_if_any

logger = logging.getLogger(__name__)

CONFIG = "tokenizer_config.json"
BACKEND = "tokenizer.json"

HARMLESS: Mapping[str, str] = {
    "_*": "private to the program that wrote the file",
    "*_version": "which program wrote the file",
    "unsloth_*": "settings of another program",
    "name_or_path": "a description",
    "*_file": "where the program that wrote the file had its files",
    "processor_class": "the processor's files say that",
    "tokenizer_type": "tokenizer_class says that",
    "use_fast": "every tokenizer is a fast one",
    "from_slow": "every tokenizer is a fast one",
    "device_map": "where the model is, and not its tokenizer",
    "trust_remote_code": "code that comes with a model is never run",
    "is_local": "where the file came from",
    "local_files_only": "where the file came from",
    "init_inputs": "arguments of the program that wrote the file",
    "*_token_id": "the tokenizer's tokens say that",
    "vocab_size": "the vocabulary says that",
    "vocab": "tokenizer.json has the vocabulary",
    "special_tokens_map": "the fields of each special token say that",
    "max_length": "a length for training; each request says where it is cut",
    "max_len": "a length for training; each request says where it is cut",
    "model_max_length": "a length; max_position_embeddings of config.json counts",
    "stride": "how long texts are divided for training",
    "truncation*": "each request says where it is cut",
    "padding*": "prompts are not padded",
    "pad_to_multiple_of": "prompts are not padded",
    "pad_token_type_id": "prompts are not padded",
    "return_*": "what transformers returns in Python",
    "model_input_names": "what transformers returns in Python",
    "trim_offsets": "places of tokens in a text, which no answer has",
    "response_schema": "answers are parsed here",
    "response_template": "answers are parsed here",
    "use_default_system_prompt": "the chat template says that",
    "chat_control_tokens": "the chat template says that",
    "language": "of tokenizers of speech and translation",
    "task": "of tokenizers of speech and translation",
    "src_lang": "of tokenizers of speech and translation",
    "tgt_lang": "of tokenizers of speech and translation",
    "predict_timestamps": "of tokenizers of speech and translation",
    "legacy*": "tokenizer.json was made with it",
    "remove_space": "tokenizer.json was made with it",
    "keep_accents": "tokenizer.json was made with it",
    "strip_accents": "tokenizer.json was made with it",
    "*_chinese_chars": "tokenizer.json was made with it",
    "do_basic_tokenize": "tokenizer.json was made with it",
    "never_split": "tokenizer.json was made with it",
    "wordpieces_prefix": "tokenizer.json was made with it",
    "spaces_between_special_tokens": "of tokenizers that are not fast",
}
"""Fields of tokenizer_config.json that change no token and no text, by pattern."""


def log_passed_over(folder: Path, tokenizer: Any) -> None:
    """Name in the log each field of a tokenizer's files that is not followed."""
    for reason in reasons(folder, tokenizer):
        logger.warning("%s: %s", folder, reason)


def reasons(folder: Path, tokenizer: Any) -> Iterator[str]:
    """Yield a sentence for each field of the files in `folder` that `tokenizer`, made of them, does not follow."""
    config = _config(folder)
    kind = type(tokenizer)
    for name, observe in OBSERVED.items():
        if name in config and (seen := observe(tokenizer, config[name])):
            yield f"{CONFIG}: {name} is {json.dumps(config[name])}, but {seen}"
    if (asked := class_with_code(folder)) is not None:
        yield f"{CONFIG}: auto_map names {asked}, whose code is not run: transformers' {kind.__name__} is used"
    fields = {name: value for name, value in config.items() if not name.endswith("_token")}  # each is a special token
    for name, value in passed_over(fields, names_in_code(kind) | OBSERVED.keys() | {"auto_map"}, HARMLESS):
        yield (
            f"{CONFIG}: {name} is {json.dumps(value):.100}: transformers' code of {kind.__name__} does not read this "
            f"field, so prompts may have other tokens than the model expects"
        )
    if tokenizer.is_fast and getattr(tokenizer.backend_tokenizer.model, "dropout", None):
        yield f"{BACKEND}: dropout of the model is not 0, so chance decides the tokens of each prompt"


def class_with_code(folder: Path) -> str | None:
    """Return the name of the tokenizer's class whose code comes with the model, as tokenizer_config.json has it."""
    found = _config(folder).get("auto_map")
    names = found.get("AutoTokenizer") if isinstance(found, dict) else found
    given = [name for name in (names if isinstance(names, list) else [names]) if isinstance(name, str)]
    return given[-1] if given else None


def _config(folder: Path) -> dict[str, Any]:
    return read_json_if_any(folder / CONFIG)


def _end(tokenizer: Any, value: Any, token: int | None, place: int, name: str) -> str | None:
    """Describe how a prompt differs at `place` from what the boolean `value` asks for. None: it does not."""
    if token is None or not isinstance(value, bool):
        return None
    ids = tokenizer.encode("a", verbose=False)
    has = bool(ids) and ids[place] == token
    if has is value:
        return None
    does = "puts it there" if has else "does not put it there"
    return f"{BACKEND} {does}: prompts without a chat template have {'the' if has else 'no'} {name}"


def _begin_token(tokenizer: Any, value: Any) -> str | None:
    return _end(tokenizer, value, tokenizer.bos_token_id, 0, "bos_token")


def _end_token(tokenizer: Any, value: Any) -> str | None:
    return _end(tokenizer, value, tokenizer.eos_token_id, -1, "eos_token")


def _prefix_space(tokenizer: Any, value: Any) -> str | None:
    if not tokenizer.is_fast or not isinstance(value, bool):
        return None
    tokens = tokenizer.backend_tokenizer.encode("the", add_special_tokens=False).tokens
    if not tokens or (tokens[0][:1] in ("Ġ", "▁")) is value:
        return None
    return f"{BACKEND} {'puts no' if value else 'puts a'} space before a text"


def _lower_case(tokenizer: Any, value: Any) -> str | None:
    if not tokenizer.is_fast or not isinstance(value, bool):
        return None
    normalizer = tokenizer.backend_tokenizer.normalizer
    lowers = normalizer is not None and "a" in normalizer.normalize_str("A")
    return None if lowers is value else f"{BACKEND} {'changes' if lowers else 'keeps'} capital letters"


def _errors(tokenizer: Any, value: Any) -> str | None:
    return None if value in (None, "replace") else "bytes that are no character are shown as U+FFFD"


def _sampling(tokenizer: Any, value: Any) -> str | None:
    return None if asks_for_nothing(value) else "SentencePiece is not used: a text always has the same tokens"


def _clean_up(tokenizer: Any, value: Any) -> str | None:
    """Byte pair encodings are not cleaned up by transformers either."""
    if value is not True or not tokenizer.is_fast or type(tokenizer.backend_tokenizer.model).__name__ == "BPE":
        return None
    return "answers are shown as their tokens say: spaces before punctuation stay"


def _clean_up_all(tokenizer: Any, value: Any) -> str | None:
    if value is not True or not tokenizer.clean_up_tokenization_spaces:
        return None
    return "answers are shown as their tokens say: spaces before punctuation stay"


def _class(tokenizer: Any, value: Any) -> str | None:
    """A class that transformers does not know is replaced by one that follows tokenizer.json."""
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    if not isinstance(value, str):
        return None
    names = {value, value.removesuffix("Fast"), f"{value}Fast"}
    if any(tokenizer_class_from_name(name) is not None for name in names):
        return None
    return f"transformers has no such class: {type(tokenizer).__name__} follows {BACKEND}"


def _truncation_side(tokenizer: Any, value: Any) -> str | None:
    return "texts for vectors lose their end, unless a request says truncation_side" if value == "left" else None


OBSERVED: Mapping[str, Callable[[Any, Any], str | None]] = {
    "add_bos_token": _begin_token,
    "add_eos_token": _end_token,
    "add_prefix_space": _prefix_space,
    "do_lower_case": _lower_case,
    "errors": _errors,
    "sp_model_kwargs": _sampling,
    "clean_up_tokenization_spaces": _clean_up,
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": _clean_up_all,
    "tokenizer_class": _class,
    "truncation_side": _truncation_side,
}
"""Fields that are compared with what the tokenizer does. Each function returns what differs, or None."""
