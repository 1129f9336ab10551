"""POST /v1/completions: continue one prompt or several."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, cast

from fastapi import Request, Response

from crossdock.cluster.api.answers import DONE, AnswerEvents, completion_logprobs, prompt_logprobs
from crossdock.cluster.api.bodies import MAX_CHOICES, CompletionRequest, check_token_ids
from crossdock.cluster.api.choices import Choice, Output, Prompt
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.generation import Generation, Generations
from crossdock.cluster.api.http_json import event_stream, json_answer
from crossdock.cluster.api.prompts import PromptEncoder, truncate
from crossdock.cluster.api.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import ModelCard


class Completions:
    def __init__(self, generations: Generations, encoder: PromptEncoder, tokenizer: ModelTokenizer) -> None:
        self._generations = generations
        self._encoder = encoder
        self._tokenizer = tokenizer

    async def create(self, request: Request, body: CompletionRequest) -> Response:
        generation = self._generations.begin(request, body)
        body.check_supported()
        prompts = await self._prompts(body, generation.card)
        self._generations.add_choices(generation, prompts)
        head = generation.head("cmpl", "text_completion")
        if body.stream:
            return await event_stream(self._events(body, generation, head))
        outputs = await self._generations.whole_outputs(generation)
        choices = [
            self._choice(body, choice, output) for choice, output in zip(generation.choices, outputs, strict=True)
        ]
        return json_answer({**head, "choices": choices, "usage": generation.usage()})

    async def _prompts(self, body: CompletionRequest, card: ModelCard) -> list[Prompt]:
        given = body.prompts()
        if len(given) * body.n > MAX_CHOICES:
            reason = f"{len(given)} prompts times n={body.n} is more than {MAX_CHOICES} outputs."
            raise ApiError(reason, param="prompt", code="invalid_value")
        return [await self._prompt(prompt, body, card) for prompt in given]

    async def _prompt(self, given: str | list[int], body: CompletionRequest, card: ModelCard) -> Prompt:
        if isinstance(given, str):
            token_ids = await self._encoder.encode(
                given,
                card,
                "prompt",
                add_special_tokens=body.add_special_tokens,
                truncates=body.truncate_prompt_tokens is not None,
            )
        else:
            check_token_ids(given, card.vocab_size, "prompt")
            token_ids = given
        prompt = Prompt(truncate(token_ids, body, card))
        if body.echo:
            is_whole = isinstance(given, str) and len(prompt.token_ids) == len(token_ids)
            self._add_echo(prompt, body, cast(str, given) if is_whole else None)
        return prompt

    def _add_echo(self, prompt: Prompt, body: CompletionRequest, text: str | None) -> None:
        """Set the text that the answer repeats, and where in it each token begins. `text`: the prompt as it came."""
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens=body.skip_special_tokens)
        parts: list[str] = []
        num_chars = 0
        for token_id in prompt.token_ids:
            prompt.offsets.append(num_chars)
            parts.append(detokenizer.add(token_id))
            num_chars += len(parts[-1])
        prompt.echo = "".join(parts) if text is None else text

    async def _events(
        self, body: CompletionRequest, generation: Generation, head: dict[str, Any]
    ) -> AsyncGenerator[bytes, None]:
        events = AnswerEvents(head, is_chat=False, include_usage=body.includes_usage)
        is_plain = body.logprobs is None and not body.return_token_ids
        async with aclosing(self._generations.outputs(generation)) as outputs:
            async for output in outputs:
                if output.finish_reason is not None or not is_plain:
                    yield events.choice(self._choice(body, generation.choices[output.index], output))
                elif output.texts:
                    yield events.text(output.index, output.text)
        if body.includes_usage:
            yield events.usage(generation.usage())
        yield DONE

    def _choice(self, body: CompletionRequest, choice: Choice, output: Output) -> dict[str, Any]:
        """Return an output as JSON. Whole answers and events have one shape."""
        result: dict[str, Any] = {"index": output.index, "text": output.text, "logprobs": None}
        if body.logprobs is not None:
            result["logprobs"] = completion_logprobs(self._tokenizer, output.positions, output.offsets)
        result["finish_reason"] = output.finish_reason
        result["stop_reason"] = output.stop_reason
        if body.prompt_logprobs is not None:
            result["prompt_logprobs"] = prompt_logprobs(self._tokenizer, output.prompt_logprobs or ())
        if body.return_token_ids:
            result["token_ids"] = output.token_ids
            result["prompt_token_ids"] = choice.prompt.token_ids
        return result
