"""Grammars of answers that come after reasoning: the reasoning is free, and may have a budget of tokens."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crossdock.workers.schedule.request.submission import CLOSED, Grammar

# As for JSON without reasoning: a small model would fill its answer with line breaks.
_WHITESPACE = {"whitespace_pattern": r"[ \n\t\r]{1,20}"}


@dataclass(frozen=True, slots=True)
class ReasoningGrammar:
    """The grammar around an answer.

    `opens`, `closes`: the tokens around the reasoning; `opens` is None where the prompt has begun the reasoning.
    `budget`: tokens that the reasoning may have; None: any number.
    """

    opens: int | None
    closes: int
    budget: int | None = None

    def around(self, answer: Grammar | None, *, has_rules: bool) -> Grammar | None:
        """Return the grammar of reasoning and an answer; None where any text will do.

        `has_rules`: the answer is a grammar in Lark that begins with `start:`. Any other one in Lark comes back as it
        is, and then there is no reasoning.
        """
        if answer is None:
            return None if self.budget is None else self._lark(f"({self._any()})?")
        if self.opens is not None:
            return answer  # the model does not have to reason, and the answer is constrained from its first token
        rule = answer_rule(answer, has_rules=has_rules)
        return answer if rule is None else self._lark(r"/\n{0,2}/ answer", rule)

    def _any(self) -> str:
        """Return the rule of a free answer, which does not begin with reasoning again."""
        first = "<[*]>" if self.opens is None else f"<[^{self.opens}]>"
        return f"{first} <[*]>*"

    def _lark(self, rest: str, *rules: str) -> Grammar:
        thinking = f"thinking <[{self.closes}]>" if self.budget != 0 else f"<[{self.closes}]>"
        thinking = thinking if self.opens is None else f"(<[{self.opens}]> {thinking})?"
        limit = "" if self.budget is None else f"[max_tokens={self.budget}]"
        lines = ["%llguidance {}", f"start: {thinking} {rest}", *rules]
        return Grammar("lark", "\n".join([*lines, *([] if self.budget == 0 else [rf"thinking{limit}: /(.|\n)*/"])]))


def answer_rule(grammar: Grammar, *, has_rules: bool = False) -> str | None:
    """Return the rule `answer` of a grammar; None where it cannot be a rule among others."""
    match grammar.kind:
        case "json_object":
            return f"answer: {json_rule({'type': 'object'})}"
        case "json_schema":
            schema = json.loads(grammar.source)
            return f"answer: {json_rule(schema, is_closed=True)}" if isinstance(schema, dict) else None
        case "choice":
            return "answer: " + " | ".join(map(json.dumps, json.loads(grammar.source)))
        case "lark" if has_rules:
            return grammar.source.replace("start:", "answer:", 1)
        case "regex":
            return "answer: /" + re.sub(r"(?<!\\)/", r"\/", grammar.source).replace("\n", r"\n") + "/"
        case _:
            return None


def json_rule(schema: Mapping[str, Any], *, is_closed: bool = False) -> str:
    """Return a JSON schema as a part of a rule. `is_closed`: only properties that it declares are generated."""
    marked = {CLOSED: True} if is_closed else {}
    return "%json " + json.dumps({**schema, **marked, "x-guidance": _WHITESPACE})
