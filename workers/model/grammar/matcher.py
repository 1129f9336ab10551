"""From a grammar to llguidance's matcher. The same code runs in the vetting process, so this file needs no torch."""

import json
import re
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from crossdock.workers.model.grammar.large_numbers import exact_rules
from crossdock.workers.model.grammar.prepared_schemas import prepared
from crossdock.workers.schedule.request.submission import CLOSED, Grammar, InvalidField

# Between JSON tokens. llguidance's own default has no bound, and a small model can then fill its answer with newlines.
# Twenty characters are a line break and an indent four levels deep.
_JSON_WHITESPACE = r"[ \n\t\r]{1,20}"

# A text, a comment or a regular expression of Lark, in which `%json` means nothing; else the keyword itself.
_LARK_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|(?:#|//)[^\n]*|/(?:\\.|[^/\\])+/|(?P<json>%json)\s*', re.DOTALL)

_SPECIAL = "applying '\xff'"  # in llguidance's errors: the byte with which a special token begins
_MOST_FORCED_BYTES = 1 << 13  # a mask takes about 0.4 ms for every 1,000 bytes that the grammar dictates (Intel, 1.9.1)
_MOST_REASON_CHARACTERS = 300  # llguidance repeats the grammar, which may be long

LIMITS = LLParserLimits(
    max_lexer_states=50_000,  # 0.3 to 1 KB each, for each request
    verbose_errors=False,  # else an error has the parser's state, and with it text
)


def new_matcher(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """Compile a grammar, and compute its first mask.

    Raises:
        InvalidField: the grammar is malformed, beyond llguidance's limits, or allows no text but the empty one.
    """
    try:
        matcher = LLMatcher(tokenizer, to_llguidance(grammar), log_level=0, limits=LIMITS)
    except RecursionError:
        raise invalid(grammar, "it is nested beyond the recursion limit") from None
    except ValueError as error:
        raise invalid(grammar, str(error)) from error
    mask = matcher.compute_bitmask()  # some limits are checked only here, and every request needs the first mask
    check(matcher, grammar)
    if not text_tokens(mask, tokenizer):
        raise invalid(grammar, "it allows no text but the empty one")
    return matcher


def check(matcher: LLMatcher, grammar: Grammar) -> None:
    """Refuse a matcher that has failed, or that dictates a text so long that every mask would be slow: InvalidField."""
    if reason := failure(matcher):
        raise invalid(grammar, reason)
    if len(matcher.compute_ff_bytes()) > _MOST_FORCED_BYTES:
        raise invalid(grammar, f"it dictates a text of more than {_MOST_FORCED_BYTES} bytes")


def text_tokens(mask: bytes, tokenizer: LLTokenizer) -> int:
    """Return the tokens of a mask as the bits of a number, without the tokens that end a text; 0: no token."""
    bits = int.from_bytes(mask, "little")
    for eos_token_id in tokenizer.eos_tokens:
        bits &= ~(1 << eos_token_id)
    return bits


def failure(matcher: LLMatcher) -> str | None:
    """Return why a matcher has failed; None: the matcher works."""
    if not matcher.is_error():
        return None
    reason = str(matcher.get_error()).removesuffix("<non-verbose/>").strip()
    if "forced bytes" in reason and _SPECIAL in reason:
        return "it dictates a text with the letters of a special token, which a model cannot write as letters here"
    return {"NoExtensionBias": "no text matches it"}.get(reason, reason)


def invalid(grammar: Grammar, reason: str) -> InvalidField:
    """Return the error of a grammar that cannot be served."""
    if len(reason) > _MOST_REASON_CHARACTERS:
        half = _MOST_REASON_CHARACTERS // 2
        reason = f"{reason[:half]} … {reason[-half:]}"
    return InvalidField(f"grammar: {grammar.kind}: {reason}", "grammar")


def to_llguidance(grammar: Grammar) -> str:
    """Translate a grammar to llguidance's.

    Raises ValueError if `source` does not have the form of its kind, or if llguidance would not hold it exactly.
    """
    match grammar.kind:
        case "json_object":
            return _json('{"type": "object"}')
        case "json_schema":
            return _closed(grammar.source)
        case "regex":
            return str(LLMatcher.grammar_from_regex(grammar.source))
        case "choice":
            return str(LLMatcher.grammar_from_regex(_choice(grammar.source)))
        case "lark":
            return str(LLMatcher.grammar_from_lark(_with_exact_schemas(grammar.source)))
        case _:
            raise ValueError("kind must be json_object, json_schema, regex, choice or lark")


def _closed(source: str) -> str:
    """Return llguidance's grammar of a JSON schema, closed."""
    try:
        schema = json.loads(source)
    except ValueError:
        return _json(source)  # llguidance says why
    schema = prepared(schema, is_closed=True)
    rules = exact_rules(schema, "start", {"whitespace_pattern": _JSON_WHITESPACE, **_options(schema)})
    return _json(json.dumps(schema)) if rules is None else str(LLMatcher.grammar_from_lark("\n".join(rules)))


def _with_exact_schemas(source: str) -> str:
    """Return a grammar in Lark, in which each JSON schema is closed if it is marked so, and exact."""
    if "%json" not in source:
        return source
    parts = list[str]()
    more = list[str]()
    position = 0
    while (found := _LARK_TOKEN.search(source, position)) is not None:
        parts.append(source[position : found.start()])
        position = found.end()
        if found["json"] is None:
            parts.append(found[0])
            continue
        try:
            schema, position = json.JSONDecoder().raw_decode(source, position)
        except ValueError:
            return source  # llguidance says why
        rule = f"exact-json-{len(parts)}"
        is_closed = isinstance(schema, dict) and bool(schema.pop(CLOSED, False))
        schema = prepared(schema, is_closed=is_closed)
        rules = exact_rules(schema, rule, _options(schema))
        parts.append(f"%json {json.dumps(schema)}" if rules is None else rule)
        more += rules or ()
    return "\n".join(["".join([*parts, source[position:]]), *more])


def _options(schema: Any) -> dict[str, Any]:
    """Return llguidance's options in a JSON schema."""
    given = schema.get("x-guidance") if isinstance(schema, dict) else None
    return given if isinstance(given, dict) else {}


def _json(schema: str) -> str:
    if schema.strip() == "true":  # any value; llguidance takes whitespace_pattern with an object only
        schema = "{}"
    return str(LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _JSON_WHITESPACE}))


def _choice(source: str) -> str:
    """Return the regex of a choice. As a rule of Lark, a choice of over 2,000 would exceed the parser's limits."""
    choices = json.loads(source)  # its JSONDecodeError is a ValueError
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("source must be a JSON list of one or more strings")
    return "|".join(re.escape(choice) for choice in choices)
