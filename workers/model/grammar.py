"""Structured output: which tokens keep a request inside its grammar. The parser and the token trie are llguidance's.

A state holds the request's tokens so far and lives as long as the request: a preemption keeps both.
"""

import json
from collections.abc import Callable, Collection
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits
from llguidance.hf import from_tokenizer
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from crossdock.workers.schedule.request import Grammar, InvalidField

# Between JSON tokens. llguidance's own default has no bound, and a small model can then fill its answer with newlines.
# Twenty characters are a line break and an indent four levels deep.
_JSON_WHITESPACE = r"[ \n\t\r]{1,20}"

_NUM_CACHED = 128  # compiled grammars, for the next request with the same text; compiling takes 1 ms to seconds


class GrammarState:
    """How far one request is in its grammar. No method raises: a parser that fails ends only its own request."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def mask(self) -> Tensor:
        """Return the tokens that may come next, [V] bool on the CPU.

        End-of-sequence tokens are allowed exactly where the grammar may end. They are the only ones once it must end
        or `error` is set. Ids past the tokenizer's own are never allowed: models pad their vocabulary.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return torch.from_numpy(np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_))

    def accept(self, token_id: int) -> None:
        """Advance by the sampled token. A token that `mask` does not allow sets `error`."""
        self._matcher.consume_token(token_id)

    @property
    def finished(self) -> bool:
        """Whether no text may follow: the grammar cannot continue, its end was accepted, or `error` is set."""
        return bool(self._matcher.is_stopped())

    @property
    def error(self) -> str | None:
        """Why the parser failed: a token outside the mask, or a step beyond llguidance's limits. None: it has not."""
        return _error(self._matcher)


class GrammarCompiler:
    """Compiles grammars for one tokenizer. `compile` may run in any thread; llguidance releases the GIL."""

    def __init__(
        self,
        tokenizer: Path | str | PreTrainedTokenizerBase,
        vocab_size: int,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        """Prepare a fast Hugging Face tokenizer, or the one in a directory.

        `vocab_size` is the width of the model's logits. `eos_token_ids` end a text; empty, they are the tokenizer's.

        Raises:
            ValueError: the tokenizer is a slow one, whose vocabulary does not tell the bytes of each token.
        """
        if isinstance(tokenizer, Path | str):
            tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        self._vocab_size = vocab_size
        self._tokenizer = from_tokenizer(tokenizer, eos_token=sorted(eos_token_ids) or None)
        self._limits = LLParserLimits(verbose_errors=False)  # else an error has the parser's state, and with it text
        self._compiled: Callable[[Grammar], LLMatcher] = lru_cache(_NUM_CACHED)(self._compile)

    def compile(self, grammar: Grammar) -> GrammarState:
        """Return a state at the grammar's beginning.

        Raises:
            InvalidField: the grammar is malformed or beyond llguidance's limits; the message gives the reason.
        """
        return GrammarState(self._compiled(grammar).deep_copy(), self._vocab_size)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        try:
            matcher = LLMatcher(self._tokenizer, _to_llguidance(grammar), log_level=0, limits=self._limits)
        except ValueError as error:
            raise InvalidField(f"grammar: {grammar.kind}: {error}", "grammar") from error
        matcher.compute_bitmask()  # some limits are checked only here, and every request needs the first mask
        if matcher.is_error():
            raise InvalidField(f"grammar: {grammar.kind}: {_error(matcher)}", "grammar")
        return matcher


def _error(matcher: LLMatcher) -> str | None:
    if not matcher.is_error():
        return None
    reason = str(matcher.get_error()).removesuffix("<non-verbose/>").strip()
    return {"NoExtensionBias": "no text matches it"}.get(reason, reason)


def _to_llguidance(grammar: Grammar) -> str:
    """Translate a grammar to llguidance's. ValueError if `source` does not have the form of its kind."""
    match grammar.kind:
        case "json_object":
            return _json('{"type": "object"}')
        case "json_schema":
            return _json(grammar.source)
        case "regex":
            return str(LLMatcher.grammar_from_regex(grammar.source))
        case "choice":
            return str(LLMatcher.grammar_from_lark(_choice(grammar.source)))
        case "lark":
            return str(LLMatcher.grammar_from_lark(grammar.source))
        case _:
            raise ValueError("kind must be json_object, json_schema, regex, choice or lark")


def _json(schema: str) -> str:
    if schema.strip() == "true":  # any value; llguidance takes whitespace_pattern with an object only
        schema = "{}"
    return str(LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _JSON_WHITESPACE}))


def _choice(source: str) -> str:
    choices = json.loads(source)  # its JSONDecodeError is a ValueError
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("source must be a JSON list of one or more strings")
    return "start: " + " | ".join(json.dumps(choice) for choice in choices)  # Lark's strings are escaped as JSON's are
