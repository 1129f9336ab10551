"""How one model writes messages: the family that its chat template shows, or that the configuration names."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from crossdock.cluster.api.body.bodies import ChatCompletionRequest
from crossdock.cluster.api.body.messages import last_assistant_text
from crossdock.cluster.api.body.parser_names import AUTO, REASONING_PARSERS, TOOL_PARSERS, family_of
from crossdock.cluster.api.body.tool_calls import ForcedCall
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.text import harmony
from crossdock.cluster.api.text.call_ids import CALL_IDS, CallIds, NewIds, num_calls
from crossdock.cluster.api.text.call_values import Schemas
from crossdock.cluster.api.text.families import FAMILIES, family_in
from crossdock.cluster.api.text.forced_call import ForcedCallText, plain_openings
from crossdock.cluster.api.text.harmony import HarmonyText
from crossdock.cluster.api.text.marked_text import MarkedFamily, MarkedText
from crossdock.cluster.api.text.message_parser import ChatMessage, MessageParser, PlainText, ReasonedText
from crossdock.cluster.api.text.open_calls import SIGN
from crossdock.cluster.api.text.reasoning_grammar import ReasoningGrammar
from crossdock.cluster.api.text.strict_calls import (
    GPT_OSS,
    calls_or_format,
    forced_calls,
    form_of,
    harmony_call,
    strict_calls,
    tagged_calls,
)
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.workers.schedule.request.submission import Grammar

_PYTHONIC = "llama4_pythonic"  # its calls have no marker
_TAIL = 32  # tokens at the end of a prompt, where a template begins the answer


@dataclass(frozen=True, slots=True)
class MessageReading:
    """How the answers of one request are read. `shown`: special tokens that texts show; `grammar`: of each answer."""

    new_parser: Callable[[], MessageParser]
    shown: Mapping[int, str]
    grammar: Grammar | None
    body: ChatCompletionRequest
    is_named: bool
    call_ids: CallIds | None = None  # the form of the family's; None: any id will do

    def message(self) -> ChatMessage:
        """Return the message of one choice, which has not begun."""
        return ChatMessage(
            self.new_parser(),
            shows_reasoning=self.body.include_reasoning,
            most_calls=None if self.body.parallel_tool_calls else 1,
            is_named=self.is_named,
            ids=None if self.call_ids is None else NewIds(self.call_ids, num_calls(self.body.messages)),
        )


class MessageFormat:
    """Tells how the answers to each request are read."""

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        *,
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        reads_unforced_calls: bool = True,
    ) -> None:
        """Take names of parsers. `reads_unforced_calls`: calls are read though `tool_choice` forces none."""
        self._tokenizer = tokenizer
        self._reads_unforced_calls = reads_unforced_calls
        found = family_in(tokenizer.chat_template)
        tools = found if tool_parser == AUTO else family_of(tool_parser, TOOL_PARSERS)
        reasoning = found if reasoning_parser == AUTO else family_of(reasoning_parser, REASONING_PARSERS)
        self._tools, self._call_form = tools, form_of(tools, tokenizer.chat_template)
        self.call_ids = CALL_IDS.get(tools or "")
        self._reasoning_family = reasoning
        self._special = tokenizer.special_tokens()
        self._is_gpt_oss = GPT_OSS in (tools, reasoning)
        calls = FAMILIES.get(tools or "", MarkedFamily())
        thoughts = FAMILIES.get(reasoning or "", MarkedFamily())
        self._family = replace(calls, thinks=thoughts.thinks, answers=thoughts.answers)
        tokens = tokenizer.added_tokens()
        # Grammars name these by their ids: llguidance allows no special token, and none in angle brackets, as a text.
        bracketed = {text: i for text, i in tokens.items() if text.startswith("<") and text.endswith(">")}
        self._tokens = self._special | bracketed
        self._opens, self._closes = (
            next((tokens[mark] for mark in marks if mark in tokens), None)
            for marks in (thoughts.thinks, thoughts.answers)
        )
        # What the texts show: markers of calls only where calls are read.
        self._shown_always = self._shown_tokens(replace(self._family, calls=(), sections=(), inner=()))
        self._shown_for_calls = self._shown_tokens(self._family)
        self._signed = self._family.signed({text.removeprefix(SIGN) for text in self._shown_for_calls.values()})

    @property
    def families(self) -> dict[str, str | None]:
        """Return the family as which tool calls are read, and that of the reasoning; None: they stay content."""
        tools = self._tools
        reasoning = self._reasoning_family
        has_calls = tools == GPT_OSS or bool(self._family.calls)
        has_thoughts = reasoning == GPT_OSS or bool(self._family.thinks)
        return {"tool_family": tools if has_calls else None, "reasoning_family": reasoning if has_thoughts else None}

    def can_bound_reasoning(self, body: ChatCompletionRequest, prompt_token_ids: Sequence[int]) -> bool:
        """Return whether a grammar can end the reasoning of an answer to this prompt.

        One token must end it, and one must begin it unless the prompt has begun it.
        """
        if self._closes is None:
            return False
        return self._opens is not None or self._is_thinking(body, self._end(prompt_token_ids))

    def answers_at_once(self, prompt_token_ids: Sequence[int]) -> bool:
        """Return whether the first token after a prompt is content: no reasoning and no channel comes before."""
        end = self._end(prompt_token_ids).rstrip()
        return not (self._is_gpt_oss or end.endswith(tuple(self._family.thinks) or "\0"))

    def reading(self, body: ChatCompletionRequest, prompt_token_ids: Sequence[int]) -> MessageReading:
        """Return how the answers of a request are read.

        Raises ApiError for a bound of reasoning that strict tools do not leave.
        """
        end = self._end(prompt_token_ids)
        is_thinking = self._is_thinking(body, end)
        given = body.grammar()
        call = body.forced_call()
        if call is not None and (own := self._own_reading(call, body, end, is_thinking=is_thinking)) is not None:
            return own
        openings = None if call is None else plain_openings(call)
        if call is not None and (native := self._native(call, body)) is not None:
            given, openings = native
        strict = None if call is not None else self._with_calls(body, given, end)
        if strict is not None:
            given = None  # the answer may be calls
        grammar = strict or given
        if (around := self._reasoning(body, is_thinking=is_thinking)) is not None:
            if strict is not None and around.opens is not None and around.budget is not None:
                param = "thinking_token_budget"
                reason = "the prompt does not begin the reasoning, which then has no bound beside strict tools"
                raise ApiError(f"'{param}' is not supported: {reason}.", param=param, code="unsupported_parameter")
            grammar = around.around(grammar, has_rules=call is not None or strict is not None)
        parser: Callable[[], MessageParser] = partial(
            self._parser, body, end, openings, is_thinking=is_thinking, is_constrained=given is not None
        )
        shown = self._shown_for_calls if openings is not None or self._reads_calls(body) else self._shown_always
        if given is not None and grammar is given:  # the answer is constrained from its first token
            parser = PlainText if openings is None else partial(ForcedCallText, openings)
            shown = {} if openings is None else shown
        elif not (self._is_gpt_oss or self._family.thinks or (self._family.calls and self._reads_calls(body))):
            parser = PlainText
            shown = {}
        is_named = call is not None and call.is_named
        return MessageReading(parser, shown, grammar, body, is_named, self.call_ids)

    def _end(self, prompt_token_ids: Sequence[int]) -> str:
        """Return the end of a prompt, where a template begins the answer; empty where nothing there matters."""
        reads_end = self._is_gpt_oss or self._family.thinks
        return self._tokenizer.decode(prompt_token_ids[-_TAIL:]) if reads_end else ""

    def _is_thinking(self, body: ChatCompletionRequest, end: str) -> bool:
        """Return whether the reasoning has begun at the end of a prompt."""
        if end.rstrip().endswith(tuple(self._family.thinks) or "\0"):
            return True
        return body.continue_final_message and _is_unanswered(last_assistant_text(body.messages), self._family)

    def _reads_calls(self, body: ChatCompletionRequest) -> bool:
        return self._reads_unforced_calls and bool(body.template_tools())

    def _with_calls(self, body: ChatCompletionRequest, given: Grammar | None, end: str) -> Grammar | None:
        """Return the grammar of an answer that may have calls; None where no grammar is needed for these.

        `given`: the constraint of the request. That of `response_format` is about content alone.
        """
        if not self._reads_calls(body):
            return None
        if given is None:
            return strict_calls(self._call_form, body.tools, self._tokens)
        form = body.content_format()
        if form is None or (self._is_gpt_oss and not end.endswith("<|start|>assistant")):
            return None
        is_single = not body.parallel_tool_calls
        openers = self._family.call_openers()
        if self._tools == _PYTHONIC:
            openers = [f"[{tool['function']['name']}(" for tool in body.tools]
        return calls_or_format(self._call_form, openers, body.tools, form, self._tokens, is_single=is_single)

    def _native(self, call: ForcedCall, body: ChatCompletionRequest) -> tuple[Grammar, dict[str, str]] | None:
        """Return the grammar of forced calls in the family's own form; None: they have the form for any model."""
        is_single = call.is_named or not body.parallel_tool_calls
        return forced_calls(self._call_form, call, self._tokens, is_single=is_single)

    def _own_reading(
        self, call: ForcedCall, body: ChatCompletionRequest, end: str, *, is_thinking: bool
    ) -> MessageReading | None:
        """Return the reading of forced calls in the form in which the model writes calls by itself.

        Such a call appears once it is complete. None: the arguments are JSON, which comes while it is written.
        """
        schemas = _schemas(body.tools)
        parser: Callable[[], MessageParser]
        if self._tools == GPT_OSS and end.endswith("<|start|>assistant"):
            grammar = harmony_call(call, self._tokens)
            parser = partial(HarmonyText, schemas, "", SIGN if self._shown_always else "")
        else:
            is_single = call.is_named or not body.parallel_tool_calls
            grammar = tagged_calls(self._tools, call, self._tokens, is_single=is_single)
            parser = partial(MarkedText, self._signed, schemas, is_thinking=is_thinking)
        if grammar is None:
            return None
        body.grammar()  # refuses another constraint beside the call
        if (around := self._reasoning(body, is_thinking=is_thinking)) is not None:
            grammar = around.around(grammar, has_rules=True)
        return MessageReading(parser, self._shown_for_calls, grammar, body, call.is_named, self.call_ids)

    def _reasoning(self, body: ChatCompletionRequest, *, is_thinking: bool) -> ReasoningGrammar | None:
        """Return the grammar of the reasoning; None where the reasoning has no single token that ends it."""
        if self._closes is None or (self._opens is None and not is_thinking):
            return None
        budget = None if body.thinking_token_budget == -1 else body.thinking_token_budget
        return ReasoningGrammar(None if is_thinking else self._opens, self._closes, budget)

    def _parser(
        self,
        body: ChatCompletionRequest,
        end: str,
        openings: Mapping[str, str] | None,
        *,
        is_thinking: bool,
        is_constrained: bool,
    ) -> MessageParser:
        """Return the parser of an answer after a prompt with this end. `openings`: of forced calls."""
        if openings is not None:
            return ReasonedText(MarkedText(self._signed, None, is_thinking=is_thinking), ForcedCallText(openings))
        schemas = _schemas(body.tools) if self._reads_calls(body) and not is_constrained else None
        if self._is_gpt_oss:
            sign = SIGN if self._shown_always else ""
            prefix = end.rpartition("<|start|>assistant")[2] if "<|start|>assistant" in end else ""
            return HarmonyText(schemas, re.sub(r"<\|\w+\|>", rf"{sign}\g<0>", prefix), sign)
        return MarkedText(self._signed, schemas, is_thinking=is_thinking)

    def _shown_tokens(self, family: MarkedFamily) -> Mapping[int, str]:
        """Return the special tokens that markers consist of. Those that begin or end something have a sign before."""
        markers = harmony.MARKERS if self._is_gpt_oss else family.markers()
        shown: dict[int, str] = {}
        for text, token_id in self._special.items():
            if any(text in marker for marker in markers):
                shown[token_id] = SIGN + text
            elif text in family.inner:
                shown[token_id] = text
        return shown


def _schemas(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    parameters = ((tool["function"]["name"], tool["function"].get("parameters")) for tool in tools)
    return {name: schema if isinstance(schema, dict) else {} for name, schema in parameters}


def _is_unanswered(text: str, family: MarkedFamily) -> bool:
    """Return whether the reasoning of a message that the model continues has begun and not ended."""
    begun = max((text.rfind(mark) for mark in family.thinks), default=-1)
    return begun > max((text.rfind(mark) for mark in family.answers), default=-1)
