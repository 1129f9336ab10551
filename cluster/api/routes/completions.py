"""POST /v1/completions: continue one prompt or several."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, cast

from fastapi import Request, Response

from crossdock.cluster.api.body.bodies import CompletionRequest
from crossdock.cluster.api.body.generation_body import check_token_ids
from crossdock.cluster.api.bounds import OUTPUTS
from crossdock.cluster.api.errors import ApiError, to_json
from crossdock.cluster.api.http.answers import DONE, AnswerEvents
from crossdock.cluster.api.http.http_json import event_stream, json_answer, long_json, long_json_answer
from crossdock.cluster.api.http.request_memory import TOKEN_BYTES, RequestMemory
from crossdock.cluster.api.routes.generation import Generation, Generations
from crossdock.cluster.api.slices import PAUSE_S, slices
from crossdock.cluster.api.text.choices import Choice, Output, Prompt
from crossdock.cluster.api.text.logprobs import LogprobWriter, num_entries
from crossdock.cluster.api.text.prompts import LONG_TEXT, Frame, PromptEncoder, output_limit, truncate
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import ModelCard

_TOKENS_AT_ONCE = 256  # of an echo; about a millisecond
_LONG_EVENT = 4096  # log-probabilities, or tokens of a prompt: a longer event is written in slices


class Completions:
    def __init__(
        self, generations: Generations, encoder: PromptEncoder, tokenizer: ModelTokenizer, *, forces_usage: bool = False
    ) -> None:
        """`forces_usage`: streams end with their usage, also where the request does not ask for it."""
        self._forces_usage = forces_usage
        self._generations = generations
        self._encoder = encoder
        self._tokenizer = tokenizer

    async def create(self, request: Request, body: CompletionRequest) -> Response:
        body = body.with_usage() if self._forces_usage else body
        generation = self._generations.begin(request, body)
        body.check_supported()
        prompts = await self.prompts(body, generation.card, OUTPUTS, request.state.memory)
        await self._generations.add_choices(generation, prompts)
        head = generation.head("cmpl", "text_completion")
        writer = LogprobWriter(self._tokenizer, as_ids=body.return_tokens_as_token_ids)
        if body.stream:
            return await event_stream(self._events(body, generation, head, writer))
        outputs = await self._generations.whole_outputs(generation)
        choices = [
            await self._choice(body, choice, output, writer)
            for choice, output in zip(generation.choices, outputs, strict=True)
        ]
        answer = {**head, "choices": choices, "usage": generation.usage()}
        return json_answer(answer) if body.is_answer_plain else await long_json_answer(answer)

    async def outputs(self, request: Request, body: CompletionRequest, most: int) -> tuple[Generation, list[Output]]:
        """Return the generation of a body and its outputs, all of them ended. Raises ApiError as `prompts`."""
        generation = self._generations.begin(request, body)
        prompts = await self.prompts(body, generation.card, most, request.state.memory)
        await self._generations.add_choices(generation, prompts)
        return generation, await self._generations.whole_outputs(generation)

    async def prompts(
        self, body: CompletionRequest, card: ModelCard, most: int, memory: RequestMemory | None = None
    ) -> list[Prompt]:
        """Return the prompts of a body. `memory`: of its request, in which tokens are counted before more are made.

        Raises ApiError for a prompt that cannot be served, or more than `most` outputs.
        """
        given = body.prompts()
        if len(given) * body.n > most:
            reason = f"{len(given)} prompts times n={body.n} is more than {most} outputs."
            raise ApiError(reason, param=body.prompt_field, code="invalid_value")
        prompts: list[Prompt] = []
        num_read = 0  # characters or tokens since other requests were served
        for one in given:
            prompt = await self._prompt(one, body, card)
            output_limit(len(prompt.token_ids), body, card)
            if memory is not None:
                memory.reserve(TOKEN_BYTES * len(prompt.token_ids))
            prompts.append(prompt)
            num_read += len(one)
            if num_read >= LONG_TEXT:
                await asyncio.sleep(PAUSE_S)
                num_read = 0
        return prompts

    async def _prompt(self, given: str | list[int], body: CompletionRequest, card: ModelCard) -> Prompt:
        frame: Frame = (0, 0)
        if isinstance(given, str):
            frame = self._encoder.frame(add_special_tokens=body.add_special_tokens)
            token_ids = await self._encoder.encode(
                given,
                card,
                body.prompt_field,
                add_special_tokens=body.add_special_tokens,
                truncates=body.truncate_prompt_tokens is not None,
            )
        else:
            check_token_ids(given, card.vocab_size, body.prompt_field)
            token_ids = given
        prompt = Prompt(truncate(token_ids, body, card, frame))
        if body.echo:
            is_whole = isinstance(given, str) and len(prompt.token_ids) == len(token_ids)
            await self._add_echo(prompt, body, cast(str, given) if is_whole else None)
        return prompt

    async def _add_echo(self, prompt: Prompt, body: CompletionRequest, text: str | None) -> None:
        """Set the text that the answer repeats, and where in it each token begins.

        `text`: the prompt as it came. It has the special tokens that the client wrote, and none that the tokenizer
        adds.
        """
        skips = body.skip_special_tokens or text is not None
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens=skips)
        special = {} if text is None else {i: name for name, i in self._tokenizer.special_tokens().items()}
        parts: list[str] = []
        num_chars = 0
        async for some in slices(prompt.token_ids, _TOKENS_AT_ONCE):
            for token_id in some:
                prompt.offsets.append(num_chars)
                name = special.get(token_id)
                is_written = name is not None and text is not None and text.startswith(name, num_chars)
                parts.append(name if name is not None and is_written else detokenizer.add(token_id))
                num_chars += len(parts[-1])
        prompt.echo = "".join(parts) if text is None else text

    async def _events(
        self, body: CompletionRequest, generation: Generation, head: dict[str, Any], writer: LogprobWriter
    ) -> AsyncGenerator[bytes, None]:
        events = AnswerEvents(head, is_chat=False, include_usage=body.includes_usage)
        beginning = {choice.index for choice in generation.choices}

        def text_event(output: Output) -> bytes:
            text = output.text
            return events.text(output.index, text, generation.usage_of(output)) if text else b""

        direct = text_event if body.is_answer_plain else None
        async with aclosing(self._generations.outputs(generation, direct)) as outputs:
            async for output in outputs:
                if output.finish_reason is not None or not body.is_answer_plain:
                    choice = generation.choices[output.index]
                    is_first = output.index in beginning
                    beginning.discard(output.index)
                    result = await self._choice(body, choice, output, writer, shows_prompt=is_first)
                    num_values = num_entries(output.positions) + is_first * len(choice.prompt.token_ids)
                    is_long = num_values > _LONG_EVENT
                    usage = generation.usage_of(output)
                    yield events.written_choice(await long_json(result) if is_long else to_json(result), usage)
                elif event := text_event(output):
                    yield event
        if body.includes_usage:
            yield events.usage(generation.usage())
        yield DONE

    async def _choice(
        self,
        body: CompletionRequest,
        choice: Choice,
        output: Output,
        writer: LogprobWriter,
        *,
        shows_prompt: bool = True,
    ) -> dict[str, Any]:
        """Return an output as JSON. Whole answers and events have one shape.

        `shows_prompt`: with the prompt's token ids, if asked for; of a choice's events only the first has them.
        """
        result: dict[str, Any] = {"index": output.index, "text": output.text, "logprobs": None}
        if body.logprobs is not None:
            result["logprobs"] = await writer.completion(output.positions, output.offsets)
        result["finish_reason"] = output.finish_reason
        result["stop_reason"] = output.stop_reason
        result |= output.weight_versions
        if body.prompt_logprobs is not None:
            result["prompt_logprobs"] = await writer.prompt(output.prompt_logprobs or ())
        if body.return_token_ids:
            result["token_ids"] = output.token_ids
            if shows_prompt:
                result["prompt_token_ids"] = choice.prompt.token_ids
        return result
