"""The tokenizer that a GGUF file describes, or why none can be made that gives the tokens of the original model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crossdock.workers.model.weights.gguf_keys import Metadata

NO_TOKENIZER = "no_tokenizer.txt"
"""The file that stands in a model's directory in place of a tokenizer, and says why."""

_LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
_WHOLE_WORDS = (*_LLAMA3, "tekken")
"""Names whose vocabularies take a word that is a token as it is, and whose prompts begin with a token, if no key says
otherwise. llama.cpp has both by these names too."""
_SPLIT = (*_WHOLE_WORDS, "smaug-bpe", "dbrx", "qwen2", "deepseek-r1-qwen", "megrez", "qwen35", "gpt-4o", "llama4")
"""Names whose division of text transformers has."""
_GPT2 = ("gpt-2", "phi-2")
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")
"""Names of GPT-2's division after each digit stands alone."""
PRE_TOKENIZERS = (*_SPLIT, *_GPT2, *_DIGITS)
"""Names in tokenizer.ggml.pre that are read. transformers would take GPT-2's division for all others."""
_GEMMAS = ("gemma2", "gemma3")


def tokenizer_fault(metadata: Metadata) -> str:
    """Return why no tokenizer can be made of a file, or ''."""
    vocabulary = metadata.take_all("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.add_space_prefix")
    found = {key.removeprefix("tokenizer.ggml."): value for key, value in vocabulary.items()}
    flags = metadata.take_all("tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.precompiled_charsmap")
    names = ("tokens", "token_type", "scores", "merges", "unknown_token_id", "add_bos_token", "add_eos_token")
    metadata.leave(*(f"tokenizer.ggml.{name}" for name in names), "tokenizer.chat_templates")
    _templates(metadata)
    reason = _reason(metadata.architecture, found, flags)
    return f"{reason}; name the original model's tokenizer by --tokenizer" if reason else ""


def _reason(architecture: str, found: Mapping[str, Any], flags: Mapping[str, Any]) -> str:
    kind = found.get("model")
    pre = found.get("pre")
    for key, value in flags.items():
        if value:
            return f"the tokenizer has {key}, which is not read"
    if kind is None:
        return "the file has no tokenizer (tokenizer.ggml.model)"
    if kind == "gpt2":
        known = ", ".join(PRE_TOKENIZERS)
        return "" if pre in PRE_TOKENIZERS else f"tokenizer.ggml.pre is {pre!r}, which is not read; read are {known}"
    if kind != "llama":
        return f"tokenizer.ggml.model is {kind!r}, which is not read; read are gpt2 and llama"
    has_prefix = found.get("add_space_prefix", architecture not in _GEMMAS)
    if has_prefix == (architecture in _GEMMAS):
        return f"tokenizer.ggml.add_space_prefix is {has_prefix}, which is not read for {architecture}"
    return ""


def save_tokenizer(gguf: Path, target: Path, metadata: Metadata, max_length: int) -> None:
    """Write the tokenizer of a GGUF file, of which `tokenizer_fault` says nothing, with its chat templates."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, described, options = get_gguf_tokenizer(str(gguf))
    pre = described.get("pre_tokenizer_type") if described.get("tokenizer_type") == "gpt2" else None
    backend, _ = convert_gguf_tokenizer(architecture, described)
    if pre in _DIGITS:
        backend.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
        )
    if pre in _WHOLE_WORDS:
        backend.model.ignore_merges = True
        options.setdefault("add_bos_token", options.get("bos_token") is not None)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=max_length, **options)
    templates = _templates(metadata)
    if templates:
        tokenizer.chat_template = templates if set(templates) != {"default"} else templates["default"]
    tokenizer.save_pretrained(target)


def _templates(metadata: Metadata) -> dict[str, str]:
    """Return the chat templates of a file by name."""
    prefix = "tokenizer.chat_template"
    found = {"default": metadata.take(prefix)} | {
        key.removeprefix(f"{prefix}."): value for key, value in metadata.take_all(f"{prefix}.{{name}}").items()
    }
    return {name: template for name, template in found.items() if isinstance(template, str)}
