"""The part that completions and chats share: prompts become submissions, and replicas' deltas become outputs."""

import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, cast

from fastapi import Request
from starlette.datastructures import State

from crossdock.cluster.api.body.embedding_body import PooledCompletion
from crossdock.cluster.api.body.generation_body import GenerationBody
from crossdock.cluster.api.body.generation_defaults import GenerationDefaults
from crossdock.cluster.api.body.stop_strings import StopTable
from crossdock.cluster.api.errors import ApiError, shown, wrong
from crossdock.cluster.api.http.answers import usage
from crossdock.cluster.api.http.http_json import header
from crossdock.cluster.api.http.keys import cache_salt, owner_of
from crossdock.cluster.api.http.limits import UNSTATED_OUTPUT
from crossdock.cluster.api.http.request_memory import LOGPROB_BYTES, TOKEN_BYTES
from crossdock.cluster.api.http.service_tiers import SLO_CLASS_HEADER, ServiceTier, ServiceTiers
from crossdock.cluster.api.routes.models import Models
from crossdock.cluster.api.slices import slices
from crossdock.cluster.api.text.bad_words import encode_bad_words
from crossdock.cluster.api.text.choices import Choice, ChoiceReader, EventWriter, Output, Prompt, merge
from crossdock.cluster.api.text.message_format import MessageReading
from crossdock.cluster.api.text.message_parser import ChatMessage
from crossdock.cluster.api.text.prompts import output_limit
from crossdock.cluster.api.text.tokenizer import ModelTokenizer, TextStream
from crossdock.cluster.dispatch.dispatcher import ModelCard, TokenSource
from crossdock.workers.schedule.request.failures import failure_of
from crossdock.workers.schedule.request.items import salted
from crossdock.workers.schedule.request.request import FinishReason, TokenDelta
from crossdock.workers.schedule.request.submission import (
    Adapter,
    InvalidField,
    LogprobsMode,
    SamplingParams,
    Submission,
)

_CHOICES_AT_ONCE = 32  # made between two looks at other requests; about 20 µs each


@dataclass(slots=True)
class Generation:
    """One HTTP request for generated text, and the choices of its answer."""

    body: GenerationBody
    card: ModelCard
    tier: ServiceTier
    adapter: Adapter | None  # the adapter that the request names as its model
    state: State  # of the HTTP request: its id, its API key, and that key's account
    choices: list[Choice] = field(default_factory=list)

    @property
    def salt(self) -> str:
        """Return the salt of everything that the request may share with others: cached pages, and pictures."""
        return cache_salt(self.state.api_key, self.body.cache_salt)

    @property
    def owner(self) -> str:
        """Return the owner of the request's key."""
        return owner_of(self.state.api_key)

    def head(self, prefix: str, kind: str) -> dict[str, Any]:
        """Return the fields with which the answer and each of its events begin."""
        return {
            "id": f"{prefix}-{self.state.request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": self.body.model or self.card.name,
            "service_tier": self.tier.openai_name,
        }

    def usage_of(self, output: Output) -> dict[str, Any] | None:
        """Count the tokens of a choice up to an output, for the output's event; None: the client did not ask."""
        if not self.body.repeats_usage:
            return None
        choice = self.choices[output.index]
        return usage(len(choice.prompt.token_ids), output.num_tokens, choice.num_cached_tokens)

    def usage(self) -> dict[str, Any]:
        """Count tokens. A prompt counts once, however many outputs it has."""
        firsts = self.choices[:: self.body.n]
        return usage(
            sum(len(choice.prompt.token_ids) for choice in firsts),
            sum(choice.num_tokens for choice in self.choices),
            sum(choice.num_cached_tokens for choice in firsts),
        )


class Generations:
    """Begins generations, and follows each to its end."""

    def __init__(
        self,
        source: TokenSource,
        tokenizer: ModelTokenizer,
        models: Models,
        tiers: ServiceTiers,
        defaults: GenerationDefaults,
        *,
        max_logprobs: int,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        placeholders: Mapping[str, int] | None = None,
        why_no_text: str = "",
    ) -> None:
        """`placeholders`: the token that stands for rows of an item, by its kind; None: the model reads text only.
        `why_no_text`: what the model does instead of generating text, and where; empty: it generates."""
        self._source = source
        self._tokenizer = tokenizer
        self._models = models
        self._tiers = tiers
        self._defaults = defaults
        self._max_logprobs = max_logprobs
        self._logprobs_mode = logprobs_mode
        self._placeholders = dict(placeholders or {})
        self._why_no_text = why_no_text

    def begin(self, request: Request, body: GenerationBody) -> Generation:
        """Begin a generation. Raises ApiError for an unknown model, or what the API key may not use."""
        card = self._models.card(body.model)
        if self._why_no_text and not isinstance(body, PooledCompletion):
            raise ApiError(self._why_no_text, param="model", code="unsupported_value")
        if body.request_id is not None and request.headers.get("x-request-id") != request.state.request_id:
            request.state.request_id = body.request_id  # as in vLLM the header wins
        if body.priority < 0 and request.state.api_key is not None:
            reason = "'priority' must be 0 or more: an API key's requests may go after those of others, not before."
            raise ApiError(reason, param="priority", code="invalid_value")
        by_header = header(request, SLO_CLASS_HEADER.lower().encode())
        tier = self._tiers.choose(body.service_tier, by_header, request.state.api_key)
        request.state.slo_class = tier.slo_class
        if request.state.account is not None:
            request.state.account.check()  # a key without tokens is refused before its prompts cost anything
        return Generation(body, card, tier, self._models.adapter(body.model), request.state)

    async def add_choices(
        self, generation: Generation, prompts: Sequence[Prompt], reading: MessageReading | None = None
    ) -> None:
        """Add one choice for each prompt and each of `n`, in OpenAI's order, and charge the prompts to the API key.

        `reading`: of the answers of a chat.

        Raises:
            ApiError: a choice cannot be served, or the key has used up its tokens. Nothing has been submitted yet.
        """
        body = generation.body
        card = generation.card
        state = generation.state
        body.check_streaming()
        for prompt in prompts:
            self._check_placeholders(prompt, body)
        limits = [self._defaults.limit(output_limit(len(prompt.token_ids), body, card), body) for prompt in prompts]
        seed = secrets.randbits(63) if body.seed is None else body.seed
        sampling = body.sampling(
            min(limits),
            defaults=self._defaults.sampling,
            vocab_size=card.vocab_size,
            max_logprobs=self._max_logprobs,
            bad_words=await encode_bad_words(body.bad_words, self._tokenizer) if body.bad_words else (),
            logprobs_mode=self._logprobs_mode,
            seed=seed % 2**63,
            **({} if reading is None else {"grammar": reading.grammar}),
        )
        shown = None if reading is None else reading.shown
        num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        num_logprobs = body.count_logprobs(sampling, num_prompt_tokens, sum(limits))
        state.memory.hold(TOKEN_BYTES * num_prompt_tokens + LOGPROB_BYTES * num_logprobs)
        stops = body.stop_table()
        if state.account is not None:
            is_stated = body.token_limit() is not None
            outputs = body.n * sum(limit if is_stated else min(limit, UNSTATED_OUTPUT) for limit in limits)
            await state.account.prompt(num_prompt_tokens, outputs)
        wanted = ((prompt, limit, i) for prompt, limit in zip(prompts, limits, strict=True) for i in range(body.n))
        async for some in slices(wanted, _CHOICES_AT_ONCE):
            for prompt, limit, i in some:
                # Even for no output, the engine samples one token, unless it is a text encoder's.
                is_equal = i == 0 and limit == sampling.max_tokens > 0
                own = (
                    sampling
                    if is_equal
                    else replace(sampling, max_tokens=max(card.least_output, limit), seed=(seed + i) % 2**63)
                )
                choice = self._choice(generation, prompt, own, stops, shown, is_prompt_only=limit == 0)
                generation.choices.append(choice)
        state.submission_ids = {choice.submission.id for choice in generation.choices}

    def _check_placeholders(self, prompt: Prompt, body: GenerationBody) -> None:
        """Raise ApiError for a prompt with placeholders that no item fills: its text or its token ids have them."""
        for token_id in set(self._placeholders.values()):
            own = (item for item in prompt.items if self._placeholders.get(item.kind) == token_id)
            if prompt.token_ids.count(token_id) != sum(item.num_embedding_tokens for item in own):
                name = self._tokenizer.vocabulary_name(token_id)
                reason = f"it contains {name!r} (token {token_id}), which stands for pictures or videos alone"
                raise wrong(body.prompt_field, reason)

    def _choice(
        self,
        generation: Generation,
        prompt: Prompt,
        sampling: SamplingParams,
        stops: StopTable | None,
        shown: Mapping[int, str] | None,
        *,
        is_prompt_only: bool,
    ) -> Choice:
        body = generation.body
        state = generation.state
        salt = generation.salt
        submission = Submission(
            # A client may use an id twice, and one HTTP request has several submissions.
            f"{state.request_id}-{secrets.token_hex(16)}",
            prompt.token_ids,
            sampling,
            salt,
            generation.tier.slo_class,
            body.priority,
            generation.tier.is_promised,
            request_id=state.request_id,
            key_owner=generation.owner,
            tenant=state.tenant.account,
            weight=state.tenant.weight,
            items=salted(prompt.items, salt),
            adapter=generation.adapter,
            start_s=getattr(state, "start_s", 0.0),
            second_text=prompt.second_text,
        )
        skips = body.skip_special_tokens
        stream = TextStream(
            self._tokenizer.detokenizer(after=prompt.token_ids, skip_special_tokens=skips, shown=shown),
            stops,
            include_stop=body.include_stop_str_in_output,
            min_tokens=body.min_tokens,
        )
        shows_stop = body.include_stop_str_in_output
        index = len(generation.choices)
        return Choice(index, prompt, submission, stream, shows_stop, is_prompt_only, state.account)

    async def whole_outputs(self, generation: Generation, messages: Sequence[ChatMessage] = ()) -> list[Output]:
        """Return the complete output of each choice. `messages`: of the choices of a chat, read as they come."""
        wholes = {choice.index: Output(choice.index) for choice in generation.choices}
        async with aclosing(self.outputs(generation)) as outputs:
            async for output in outputs:
                wholes[output.index].extend(output)
                if messages:
                    messages[output.index].read(output.texts, output.finish_reason)
        return list(wholes.values())

    async def outputs(
        self, generation: Generation, event: Callable[[Output], bytes] | None = None
    ) -> AsyncGenerator[Output, None]:
        """Yield the outputs of all choices as they come, the first only when replicas have accepted every choice.

        Until then, the refusal of one choice must still be able to become the status of the whole answer. Closing the
        iterator aborts the submissions.

        `event` makes the event of an output; empty: there is none. Where given, the events of an only choice's outputs
        may be written while the next output is waited for; these outputs are not yielded.
        """
        writer: EventWriter | None = getattr(generation.state, "event_writer", None)  # of our own listener alone
        reader: ChoiceReader | None = None
        if len(generation.choices) == 1 and event is not None and writer is not None:
            reader = ChoiceReader(generation.choices[0], event, writer)
        streams = [self._outputs_of(choice, generation.body, reader) for choice in generation.choices]
        refusable = {choice.index for choice in generation.choices}
        held: list[Output] = []
        async with aclosing(streams[0] if len(streams) == 1 else merge(streams)) as outputs:
            async for output in outputs:
                if not output.is_acceptance:
                    held.append(output)
                refusable.discard(output.index)
                if not refusable:
                    break
            for ready in held:
                yield ready
            async for output in outputs:
                if not output.is_acceptance:
                    yield output

    async def _outputs_of(
        self, choice: Choice, body: GenerationBody, reader: ChoiceReader | None
    ) -> AsyncGenerator[Output, None]:
        """Yield the outputs of one choice up to its end, whether the engine or a stop string ends it.

        The first output may be an acceptance.
        """
        deltas = cast(AsyncGenerator[TokenDelta, None], self._source.generate(choice.submission, reader))
        async with aclosing(deltas):
            while True:
                try:
                    delta = await anext(deltas, None)
                    if delta is None:
                        raise RuntimeError(f"{choice.submission.id} ended without a finish reason")
                    if delta.finish_reason is FinishReason.ERROR:
                        raise failure_of(delta)
                except ValueError as error:
                    raise _refusal(error, body) from error
                if not delta.token_ids and delta.finish_reason is None:
                    yield Output(choice.index)
                    continue
                output = choice.read(delta) if reader is None or reader.last is None else reader.last
                yield output
                if output.finish_reason is not None:
                    return


def _refusal(error: ValueError, body: GenerationBody) -> ApiError:
    """Return the client's error for an engine's.

    Ray wraps the error of another process in one whose text is a traceback: the first argument is the error itself.
    """
    reason = shown(str(error.args[0])) if error.args else "The engine refuses the request."
    param = body.param_of(error.field) if isinstance(error, InvalidField) else None
    return ApiError(reason, param=param, code="invalid_value")
