"""How one model writes messages: the family that its chat template shows, or that the configuration names."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from crossdock.cluster.api.body.bodies import ChatCompletionRequest
from crossdock.cluster.api.body.messages import last_assistant_text
from crossdock.cluster.api.body.parser_names import AUTO, REASONING_PARSERS, TOOL_PARSERS, family_of
from crossdock.cluster.api.text import harmony
from crossdock.cluster.api.text.call_forms import SIGN
from crossdock.cluster.api.text.call_values import Schemas
from crossdock.cluster.api.text.families import FAMILIES, TEMPLATE_SIGNS
from crossdock.cluster.api.text.forced_call import ForcedCallText
from crossdock.cluster.api.text.harmony import HarmonyText
from crossdock.cluster.api.text.marked_text import MarkedFamily, MarkedText
from crossdock.cluster.api.text.message_parser import ChatMessage, MessageParser, PlainText
from crossdock.cluster.api.text.tokenizer import ModelTokenizer

_GPT_OSS = "gpt_oss"
_TAIL = 32  # tokens at the end of a prompt, where a template begins the answer


class MessageFormat:
    """Makes the parser of each choice.

    `shown`: the special tokens that are markers, by id, as the text shows them to the parser.
    """

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
        self.is_gpt_oss = _GPT_OSS in (tools, reasoning)
        calls, thoughts = FAMILIES.get(tools or "", MarkedFamily()), FAMILIES.get(reasoning or "", MarkedFamily())
        self.reads_calls = self.is_gpt_oss or bool(calls.calls)
        self.family = replace(calls, thinks=thoughts.thinks, answers=thoughts.answers)
        self.shown = self._shown_tokens()
        self._signed = self.family.signed({text.removeprefix(SIGN) for text in self.shown.values()})

    def messages(self, body: ChatCompletionRequest, prompt_token_ids: Sequence[int]) -> Callable[[], ChatMessage]:
        """Return what makes the message of each choice of a request."""
        parser = self._parsers(body, prompt_token_ids)
        call = body.forced_call()

        def message() -> ChatMessage:
            return ChatMessage(
                parser(),
                shows_reasoning=body.include_reasoning,
                most_calls=None if body.parallel_tool_calls else 1,
                is_named=call is not None and call.is_named,
            )

        return message

    def _parsers(self, body: ChatCompletionRequest, prompt_token_ids: Sequence[int]) -> Callable[[], MessageParser]:
        call = body.forced_call()
        if call is not None:
            names = tuple(call.parameters)
            return lambda: ForcedCallText(names)
        schemas = _schemas(body.tools) if body.template_tools() and self._reads_unforced_calls else None
        family = self._signed
        if not self.is_gpt_oss and not family.thinks and (schemas is None or not self.reads_calls):
            return PlainText
        end = self._tokenizer.decode(prompt_token_ids[-_TAIL:])
        if self.is_gpt_oss:
            prefix = end.rpartition("<|start|>assistant")[2] if "<|start|>assistant" in end else ""
            sign = SIGN if self.shown else ""
            prefix = re.sub(r"<\|\w+\|>", rf"{sign}\g<0>", prefix)
            return lambda: HarmonyText(schemas, prefix, sign)
        is_thinking = end.rstrip().endswith(tuple(self.family.thinks) or "\0")
        if body.continue_final_message:
            is_thinking = is_thinking or _is_unanswered(last_assistant_text(body.messages), self.family)
        return lambda: MarkedText(family, schemas, is_thinking=is_thinking)

    def _shown_tokens(self) -> Mapping[int, str]:
        """Return the special tokens that markers consist of. Those that begin or end something have a sign before."""
        markers = harmony.MARKERS if self.is_gpt_oss else self.family.markers()
        shown: dict[int, str] = {}
        for token_id, text in self._tokenizer.special_tokens().items():
            if any(text in marker for marker in markers):
                shown[token_id] = SIGN + text
            elif text in self.family.inner:
                shown[token_id] = text
        return shown


def family_in(chat_template: str) -> str | None:
    """Return the family whose marker a chat template has; None for none of them."""
    return next((family for sign, family in TEMPLATE_SIGNS if sign in chat_template), None)


def _schemas(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    parameters = ((tool["function"]["name"], tool["function"].get("parameters")) for tool in tools)
    return {name: schema if isinstance(schema, dict) else {} for name, schema in parameters}


def _is_unanswered(text: str, family: MarkedFamily) -> bool:
    """Return whether the reasoning of a message that the model continues has begun and not ended."""
    begun = max((text.rfind(mark) for mark in family.thinks), default=-1)
    return begun > max((text.rfind(mark) for mark in family.answers), default=-1)
