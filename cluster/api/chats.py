"""POST /v1/chat/completions: answer a conversation."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import Request, Response

from crossdock.cluster.api.answers import DONE, AnswerEvents, chat_logprobs, prompt_logprobs
from crossdock.cluster.api.bodies import ChatCompletionRequest
from crossdock.cluster.api.choices import Choice, Output, Prompt
from crossdock.cluster.api.generation import Generation, Generations
from crossdock.cluster.api.http_json import event_stream, json_answer, long_json_answer
from crossdock.cluster.api.prompts import PromptEncoder, truncate
from crossdock.cluster.api.slices import slices
from crossdock.cluster.api.tokenizer import ModelTokenizer

_TOKENS_AT_ONCE = 256  # log-probabilities; about a millisecond with 20 alternatives each


class Chats:
    def __init__(
        self, generations: Generations, encoder: PromptEncoder, tokenizer: ModelTokenizer, *, forces_usage: bool = False
    ) -> None:
        """`forces_usage`: streams end with their usage, also where the request does not ask for it."""
        self._forces_usage = forces_usage
        self._generations = generations
        self._encoder = encoder
        self._tokenizer = tokenizer

    async def create(self, request: Request, body: ChatCompletionRequest) -> Response:
        body = body.with_usage() if self._forces_usage else body
        generation = self._generations.begin(request, body)
        body.check_logprobs()
        truncates = body.truncate_prompt_tokens is not None
        token_ids = await self._encoder.encode_chat(body, body.template_tools(), generation.card, truncates=truncates)
        prompt = Prompt(truncate(token_ids, body, generation.card))
        await self._generations.add_choices(generation, [prompt])
        if body.stream:
            return await event_stream(self._events(body, generation))
        outputs = await self._generations.whole_outputs(generation)
        answer = generation.head("chatcmpl", "chat.completion")
        answer["choices"] = [await self._choice(body, output) for output in outputs]
        answer["usage"] = generation.usage()
        if body.is_answer_plain:
            return json_answer(answer)
        if body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = listed = []
            async for positions in slices(outputs[0].prompt_logprobs or (), _TOKENS_AT_ONCE):
                listed += prompt_logprobs(self._tokenizer, positions)
        if body.return_token_ids:
            answer["prompt_token_ids"] = prompt.token_ids
        return await long_json_answer(answer)

    async def _choice(self, body: ChatCompletionRequest, output: Output) -> dict[str, Any]:
        return {
            "index": output.index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            **await self._extras(body, output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    async def _extras(self, body: ChatCompletionRequest, output: Output) -> dict[str, Any]:
        extras: dict[str, Any] = {"logprobs": None}
        if body.logprobs:
            positions = [position for _, position in output.positions if position is not None]
            extras["logprobs"] = logprobs = chat_logprobs(self._tokenizer, (), 0)
            async for some in slices(positions, _TOKENS_AT_ONCE):
                logprobs["content"] += chat_logprobs(self._tokenizer, some, body.top_logprobs or 0)["content"]
        if body.return_token_ids:
            extras["token_ids"] = output.token_ids
        return extras

    async def _events(self, body: ChatCompletionRequest, generation: Generation) -> AsyncGenerator[bytes, None]:
        head = generation.head("chatcmpl", "chat.completion.chunk")
        events = AnswerEvents(head, is_chat=True, include_usage=body.includes_usage)
        is_plain = not body.logprobs and not body.return_token_ids
        has_begun = False
        async with aclosing(self._generations.outputs(generation)) as outputs:
            async for output in outputs:
                if not has_begun:
                    has_begun = True
                    for choice in generation.choices:
                        yield events.choice(_role(body, choice))
                if not is_plain and output.token_ids:
                    delta = {"content": output.text}
                    extras = await self._extras(body, output)
                    yield events.choice({"index": output.index, "delta": delta, **extras, "finish_reason": None})
                elif output.texts:
                    yield events.text(output.index, output.text)
                if output.finish_reason is not None:
                    reasons = {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
                    yield events.choice({"index": output.index, "delta": {}, "logprobs": None, **reasons})
        if body.includes_usage:
            yield events.usage(generation.usage())
        yield DONE


def _role(body: ChatCompletionRequest, choice: Choice) -> dict[str, Any]:
    """Return the first event of a choice: its role, before any text."""
    delta = {"role": "assistant", "content": ""}
    result: dict[str, Any] = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
    if body.return_token_ids:
        result["prompt_token_ids"] = choice.prompt.token_ids
    return result
