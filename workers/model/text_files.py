"""Text encoders, such as BERT: which directories hold one, what its answers are, and how long its texts may be.

A text encoder reads a whole text at once, every token sees all others, and no token follows. No torch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from crossdock.workers.model.architecture import LABELS
from crossdock.workers.model.weights.untrusted import read_config_file, read_json_if_any

TextAnswer: TypeAlias = Literal["vectors", "labels"]
"""The answer of a text encoder to a text: pooled hidden states, or a number for each label of its head."""

_BIDIRECTIONAL = "gemma3_text"  # with use_bidirectional_attention, as EmbeddingGemma; else a decoder
_BEFORE_FIRST = {
    **dict.fromkeys(("bert", "distilbert", "electra", "gte", "modernbert", "nomic_bert", _BIDIRECTIONAL), False),
    **dict.fromkeys(("roberta", "xlm-roberta", "mpnet"), True),
}
"""The model types that are served, and whether positions begin behind the padding token's id."""
_VECTORS = ("Model", "ForMaskedLM", "ForPreTraining")  # the head of the last two is not read


def text_answer(folder: Path) -> TextAnswer | None:
    """Return the answers of the text encoder in a directory; None: the model there is none.

    Raises:
        ValueError: the encoder has a head for another task; the message names the class.
    """
    return answer_of(read_config_file(folder), folder)


def answer_of(fields: Mapping[str, Any], folder: Path) -> TextAnswer | None:
    """Find the answers as `text_answer` does, for the fields of the config.json in `folder`."""
    kind = fields.get("model_type")
    if kind not in _BEFORE_FIRST or fields.get("is_decoder"):
        return None
    if kind == _BIDIRECTIONAL and fields.get("use_bidirectional_attention") is not True:
        return None
    names = fields.get("architectures") or ["Model"]
    name = str(names[0]) if isinstance(names, list) else ""
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return None
    if name.endswith(LABELS) and kind != _BIDIRECTIONAL:
        return "labels"
    if name.endswith(_VECTORS):
        return "vectors"
    raise ValueError(
        f"model: {folder / 'config.json'} has architectures {name!r}; of text encoders are served …Model, …ForMaskedLM "
        f"and …{LABELS}"
    )


def begins_behind_padding(model_type: str) -> bool:
    """Return whether positions of a model type begin behind the padding token's id, and leave out such tokens."""
    return _BEFORE_FIRST[model_type]


def longest_text(folder: Path, fields: Mapping[str, Any], asked: int | None) -> int:
    """Return the most tokens of a text: `asked`, else as Sentence Transformers' file says, else the model's positions.

    Raises:
        ValueError: `asked` is more than the model's positions, or a file cannot be followed; the message names it.
    """
    positions = fields.get("max_position_embeddings")
    if not isinstance(positions, int) or isinstance(positions, bool) or positions < 1:
        raise ValueError(f"model: {folder / 'config.json'} has no max_position_embeddings")
    if _BEFORE_FIRST[str(fields["model_type"])]:
        padding = fields.get("pad_token_id", 1)
        positions -= (padding if isinstance(padding, int) else 1) + 1
    own = read_json_if_any(folder / "sentence_bert_config.json")
    if own.get("do_lower_case") and not read_json_if_any(folder / "tokenizer_config.json").get("do_lower_case"):
        raise ValueError(
            f"model: {folder / 'sentence_bert_config.json'} has do_lower_case, and the tokenizer keeps capitals: "
            "vectors would be those of other texts; send texts in small letters, and take the field out in a copy"
        )
    if asked and asked > positions:
        raise ValueError(f"max_model_len ({asked}) is more than the model's own {positions} positions")
    length = own.get("max_seq_length")
    return asked or (min(length, positions) if isinstance(length, int) and length > 0 else positions)
