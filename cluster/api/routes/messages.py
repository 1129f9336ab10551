"""POST /v1/messages and /v1/messages/count_tokens: conversations in the form of Anthropic's API."""

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any, TypeAlias

from fastapi import Request, Response
from pydantic_core import from_json

from crossdock.cluster.api.body.messages_body import CountTokensRequest, MessagesChat, MessagesRequest
from crossdock.cluster.api.errors import ApiError, to_json
from crossdock.cluster.api.http.answers import SILENCE_S, named_event
from crossdock.cluster.api.http.http_json import event_stream, json_answer
from crossdock.cluster.api.routes.conversations import BegunChat, Conversations, Part
from crossdock.cluster.api.routes.models import Models
from crossdock.cluster.api.slices import apart
from crossdock.cluster.api.text.choices import Output
from crossdock.cluster.api.text.message_parser import CallText, ContentText, Piece, ReasoningText

_Event: TypeAlias = dict[str, Any]


class Messages:
    def __init__(self, conversations: Conversations, models: Models) -> None:
        self._conversations = conversations
        self._models = models

    async def create(self, request: Request, body: MessagesRequest) -> Response:
        begun = await self._conversations.begin(request, await apart(body.chat, body.messages, body.system))
        if body.stream:
            request.state.error_event = partial(message_error_event, request.state.request_id)
            return await event_stream(self._events(begun))
        blocks = _Blocks()
        output = Output(0)
        async with aclosing(self._conversations.parts(begun)) as parts:
            async for part in parts:
                output = part.output
                for piece in part.pieces:
                    blocks.add(piece)
        blocks.end()
        answer = {**_message(begun), "content": blocks.content, **_reasons(begun, output, blocks)}
        return json_answer({**answer, "usage": _usage(begun)})

    async def count_tokens(self, request: Request, body: CountTokensRequest) -> Response:
        card = self._models.card(body.model)
        chat = await apart(body.chat, body.messages, body.system)
        return json_answer({"input_tokens": await self._conversations.count(request, chat, card)})

    async def _events(self, begun: BegunChat) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream; events of one step of the model come together."""
        blocks = _Blocks()
        output = Output(0)
        has_begun = False
        clock = asyncio.get_running_loop().time
        shown_at = clock()

        def step(part: Part) -> bytes:
            nonlocal has_begun, shown_at
            events: list[_Event] = []
            if not has_begun:
                has_begun = True
                message = {**_message(begun), "usage": {**_usage(begun), "output_tokens": 0}}
                events.append({"type": "message_start", "message": message})
            for piece in part.pieces:
                events += blocks.add(piece)
            if not events and clock() - shown_at > SILENCE_S:
                events.append({"type": "ping"})
            if events:
                shown_at = clock()
            return b"".join(map(_written, events))

        async with aclosing(self._conversations.parts(begun, step)) as parts:
            async for part in parts:
                output = part.output
                if event := step(part):
                    yield event
        ending = {"type": "message_delta", "delta": _reasons(begun, output, blocks)}
        events = [*blocks.end(), {**ending, "usage": _usage(begun)}, {"type": "message_stop"}]
        yield b"".join(map(_written, events))


def message_error_event(request_id: str, error: ApiError) -> bytes:
    """Return the event of an error that cuts a stream."""
    return named_event("error", error.anthropic_body(request_id))


class _Blocks:
    """The content of a message, block by block: as a whole, and as events that build the whole."""

    def __init__(self) -> None:
        self.content: list[dict[str, Any]] = []
        self.has_calls = False
        self._parts: list[str] = []  # of the open block
        self._call = -1  # the index of the newest call

    def add(self, piece: Piece) -> list[_Event]:
        """Return the events that a piece of the answer causes."""
        match piece:
            case ContentText(text):
                events = self._opened("text", {"text": ""})
                delta = {"type": "text_delta", "text": text}
            case ReasoningText(text):
                events = self._opened("thinking", {"thinking": "", "signature": ""})
                delta = {"type": "thinking_delta", "thinking": text}
            case CallText(index, text, name, call_id):
                events = self._opened_call(index, name, call_id)
                delta = {"type": "input_json_delta", "partial_json": text}
        self._parts.append(text)
        if text:
            events.append({"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta})
        return events

    def end(self) -> list[_Event]:
        """Return the event that ends the open block, if there is one."""
        if not self.content:
            return []
        block = self.content[-1]
        text = "".join(self._parts)
        if block["type"] == "tool_use":
            block["input"] = _arguments(text)
        else:
            block[block["type"]] = text
        return [{"type": "content_block_stop", "index": len(self.content) - 1}]

    def _opened(self, kind: str, fields: dict[str, Any]) -> list[_Event]:
        """Open a block of a kind, unless the open one is of that kind."""
        if self.content and self.content[-1]["type"] == kind:
            return []
        return self._begun({"type": kind, **fields})

    def _opened_call(self, index: int, name: str | None, call_id: str | None) -> list[_Event]:
        if index == self._call:
            return []
        self._call = index
        self.has_calls = True
        call_id = call_id or f"toolu_{uuid.uuid4().hex}"
        return self._begun({"type": "tool_use", "id": call_id, "name": name, "input": {}})

    def _begun(self, block: dict[str, Any]) -> list[_Event]:
        events = self.end()
        self._parts = []
        self.content.append(block)
        return [*events, {"type": "content_block_start", "index": len(self.content) - 1, "content_block": dict(block)}]


def _message(begun: BegunChat) -> dict[str, Any]:
    """Return the message without content, which has not ended."""
    generation = begun.generation
    return {
        "id": f"msg_{generation.state.request_id}",
        "type": "message",
        "role": "assistant",
        "model": generation.body.model or generation.card.name,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _reasons(begun: BegunChat, output: Output, blocks: _Blocks) -> dict[str, Any]:
    """Return why the message has ended, in Anthropic's words."""
    sequence = output.stop_reason if isinstance(output.stop_reason, str) else None
    if output.finish_reason == "length":
        is_limit = begun.choice.num_tokens == begun.chat.token_limit()
        reason = "max_tokens" if is_limit or not begun.fills_context() else "model_context_window_exceeded"
    elif blocks.has_calls:
        reason = "tool_use"
    else:
        reason = "end_turn" if sequence is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": sequence, **output.weight_versions}


def _usage(begun: BegunChat) -> dict[str, Any]:
    """Count tokens. As at Anthropic, two kinds of prompt tokens count apart: tokens that were in the cache, and tokens
    that a `cache_control` has put there."""
    choice = begun.choice
    size = begun.generation.card.cache_page_size
    uncached = len(choice.prompt.token_ids) - choice.num_cached_tokens
    asked = isinstance(begun.chat, MessagesChat) and begun.chat.has_cache_control
    written = max(uncached - len(choice.prompt.token_ids) % size, 0) if size and asked else 0
    return {
        "input_tokens": uncached - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": choice.num_cached_tokens,
        "output_tokens": choice.num_tokens,
    }


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call, as far as they were written: a call may have been cut."""
    try:
        found = from_json(text, allow_partial=True) if text else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _written(event: _Event) -> bytes:
    return named_event(event["type"], to_json(event))
