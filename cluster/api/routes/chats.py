"""POST /v1/chat/completions: answer a conversation."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import lru_cache
from typing import Any

from fastapi import Request, Response

from crossdock.cluster.api.body.bodies import ChatCompletionRequest
from crossdock.cluster.api.body.messages import last_assistant_text
from crossdock.cluster.api.errors import to_json
from crossdock.cluster.api.http.answers import DONE, SILENCE_S, AnswerEvents
from crossdock.cluster.api.http.http_json import event_stream, json_answer, long_json, long_json_answer
from crossdock.cluster.api.routes.conversations import Conversations
from crossdock.cluster.api.routes.generation import Generation, Generations
from crossdock.cluster.api.text.choices import Output
from crossdock.cluster.api.text.logprobs import LogprobWriter, num_entries
from crossdock.cluster.api.text.message_parser import ChatMessage
from crossdock.cluster.api.text.tokenizer import ModelTokenizer

_LONG_EVENT = 4096  # log-probabilities, or tokens of a prompt: a longer event is written in slices


class Chats:
    def __init__(
        self,
        conversations: Conversations,
        generations: Generations,
        tokenizer: ModelTokenizer,
        *,
        forces_usage: bool = False,
    ) -> None:
        """`forces_usage`: streams end with their usage, also where the request does not ask for it."""
        self._forces_usage = forces_usage
        self._conversations = conversations
        self._generations = generations
        self._tokenizer = tokenizer

    async def create(self, request: Request, body: ChatCompletionRequest) -> Response:
        body = body.with_usage() if self._forces_usage else body
        begun = await self._conversations.begin(request, body)
        generation = begun.generation
        messages = begun.messages
        writer = LogprobWriter(self._tokenizer, as_ids=body.return_tokens_as_token_ids)
        if body.stream:
            return await event_stream(self._events(body, generation, writer, messages))
        outputs = await self._generations.whole_outputs(generation, messages)
        answer = generation.head("chatcmpl", "chat.completion")
        pairs = zip(outputs, messages, strict=True)
        answer["choices"] = [await self._choice(body, writer, output, message) for output, message in pairs]
        answer["usage"] = _with_reasoning(generation.usage(), messages)
        if body.is_answer_plain:
            return json_answer(answer)
        if body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = await writer.prompt(outputs[0].prompt_logprobs or ())
        if body.return_token_ids:
            answer["prompt_token_ids"] = begun.choice.prompt.token_ids
        return await long_json_answer(answer)

    async def _choice(
        self, body: ChatCompletionRequest, writer: LogprobWriter, output: Output, message: ChatMessage
    ) -> dict[str, Any]:
        fields = message.whole()
        if echoed := _echoed(body):
            fields["content"] = echoed + (fields["content"] or "")
        return {
            "index": output.index,
            "message": {"role": "assistant", **fields, "refusal": None},
            **await self._extras(body, writer, output),
            "finish_reason": message.finish_reason(output.finish_reason),
            "stop_reason": output.stop_reason,
            **output.weight_versions,
        }

    async def _extras(self, body: ChatCompletionRequest, writer: LogprobWriter, output: Output) -> dict[str, Any]:
        extras: dict[str, Any] = {"logprobs": None}
        if body.logprobs:
            positions = [position for _, position in output.positions if position is not None]
            extras["logprobs"] = await writer.chat(positions, body.num_top())
        if body.return_token_ids:
            extras["token_ids"] = output.token_ids
        return extras

    async def _events(
        self,
        body: ChatCompletionRequest,
        generation: Generation,
        writer: LogprobWriter,
        messages: Sequence[ChatMessage],
    ) -> AsyncGenerator[bytes, None]:
        head = generation.head("chatcmpl", "chat.completion.chunk")
        events = AnswerEvents(head, is_chat=True, include_usage=body.includes_usage)
        has_begun = False
        repeats_usage = body.repeats_usage
        clock = asyncio.get_running_loop().time
        shown_at = clock()

        def plain_event(output: Output) -> bytes:
            """Return the event of an output; empty if it adds nothing, unless the stream has been silent for long."""
            nonlocal shown_at
            message = messages[output.index]
            now = clock()
            event = b""
            delta = message.delta(output.texts, output.finish_reason)
            usage = _usage_of(generation, output, [message]) if repeats_usage else None
            if delta.keys() == {"content"}:
                event = events.text(output.index, delta["content"], usage)
            elif delta or now - shown_at > SILENCE_S:
                shape = {"index": output.index, "delta": delta, "logprobs": None, "finish_reason": None}
                event = events.choice(shape, usage)
            shown_at = now if event else shown_at
            return event

        direct = plain_event if body.is_answer_plain else None
        async with aclosing(self._generations.outputs(generation, direct)) as outputs:
            async for output in outputs:
                if not has_begun:
                    has_begun = True
                    async for event in self._beginning(body, generation, events):
                        yield event
                message = messages[output.index]
                if (body.logprobs or body.return_token_ids) and output.token_ids:
                    shown_at = clock()
                    yield await self._event_with_extras(body, generation, events, writer, output, message)
                elif event := plain_event(output):
                    yield event
                if output.finish_reason is not None:
                    usage = _usage_of(generation, output, [message])
                    reason = message.finish_reason(output.finish_reason)
                    if output.stop_reason is None and not output.weight_versions:
                        yield events.written_choice(_usual_end(output.index, reason), usage)
                    else:
                        last = _end(output.index, reason, output.stop_reason)
                        yield events.choice({**last, **output.weight_versions}, usage)
        if body.includes_usage:
            yield events.usage(_with_reasoning(generation.usage(), messages))
        yield DONE

    async def _event_with_extras(
        self,
        body: ChatCompletionRequest,
        generation: Generation,
        events: AnswerEvents,
        writer: LogprobWriter,
        output: Output,
        message: ChatMessage,
    ) -> bytes:
        """Return the event of an output whose tokens, or their log-probabilities, the client wants."""
        delta = message.delta(output.texts, output.finish_reason)
        extras = await self._extras(body, writer, output)
        choice = {"index": output.index, "delta": delta, **extras, "finish_reason": None}
        is_long = num_entries(output.positions) > _LONG_EVENT
        written = await long_json(choice) if is_long else to_json(choice)
        return events.written_choice(written, _usage_of(generation, output, [message]))

    async def _beginning(
        self, body: ChatCompletionRequest, generation: Generation, events: AnswerEvents
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events before any output: the role of each choice, then the text that the answer repeats.

        The first event of all has the ids of the prompt, if asked for: all choices continue the same.
        """
        fields = b""
        if body.return_token_ids:
            fields = await long_json({"prompt_token_ids": generation.choices[0].prompt.token_ids})
        for choice in generation.choices:
            role = _role(choice.index)
            usage = _usage_of(generation, Output(choice.index))
            yield events.first_choice(fields, role, usage) if fields else events.written_choice(role, usage)
            fields = b""
        if text := _echoed(body):
            for choice in generation.choices:
                yield events.text(choice.index, text, _usage_of(generation, Output(choice.index)))


@lru_cache(maxsize=256)  # these are equal in nearly all answers
def _role(index: int) -> bytes:
    """Return the first choice of a streamed answer, as JSON."""
    role = {"role": "assistant", "content": ""}
    return to_json({"index": index, "delta": role, "logprobs": None, "finish_reason": None})


@lru_cache(maxsize=256)
def _usual_end(index: int, reason: str | None) -> bytes:
    """Return the last choice of a streamed answer, as JSON, where no stop string or token ended it."""
    return to_json(_end(index, reason, None))


def _end(index: int, reason: str | None, stop_reason: Any) -> dict[str, Any]:
    """Return the last choice of a streamed answer."""
    return {"index": index, "delta": {}, "logprobs": None, "finish_reason": reason, "stop_reason": stop_reason}


def _usage_of(generation: Generation, output: Output, messages: Sequence[ChatMessage] = ()) -> dict[str, Any] | None:
    """Return the usage for an output's event; None: the client did not ask. `messages`: its own, if that has begun."""
    usage = generation.usage_of(output)
    return None if usage is None else _with_reasoning(usage, messages)


def _with_reasoning(usage: dict[str, Any], messages: Sequence[ChatMessage]) -> dict[str, Any]:
    """Return the usage of these messages with the number of their tokens that are reasoning."""
    reasoning_tokens = sum(message.reasoning_tokens for message in messages)
    return {**usage, "completion_tokens_details": {"reasoning_tokens": reasoning_tokens}}


def _echoed(body: ChatCompletionRequest) -> str:
    """Return the text with which the answer begins: that of the assistant's last message, if asked for."""
    return last_assistant_text(body.messages) if body.echo else ""
