"""The OpenAI API over HTTP: requests in, submissions to the dispatcher, tokens out as JSON or as server-sent events."""

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar, cast

from fastapi import FastAPI, Request, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from crossdock.cluster.api import bodies
from crossdock.cluster.api.bodies import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationBody,
    TokenizeRequest,
)
from crossdock.cluster.api.choices import Choice, Output, Prompt, merge
from crossdock.cluster.api.errors import ApiError, to_json
from crossdock.cluster.api.http_config import HttpConfig
from crossdock.cluster.api.http_guard import EventStream, HttpGuard, refusal
from crossdock.cluster.api.keys import ApiKey, KeyRing
from crossdock.cluster.api.limits import Ledger
from crossdock.cluster.api.openapi import document
from crossdock.cluster.api.playground import Scenario, play
from crossdock.cluster.api.tiers import HEADER, Tiers
from crossdock.cluster.api.tokenizer import ModelTokenizer, TextStream
from crossdock.cluster.api.tracing import Tracing, otlp_exporter
from crossdock.cluster.api.web_assets import ASSET_HEADERS, WebAsset, web_assets
from crossdock.cluster.dispatch.dispatch import Dispatcher, ModelCard
from crossdock.workers.schedule.request import InvalidField, Submission, TokenDelta

_LONG_TEXT = 4096  # characters; about 1 ms to tokenise. Longer ones leave the event loop for a thread.
_DEFAULT_MAX_TOKENS = 16  # of completions, as OpenAI has it; a chat may fill the context
_NOT_TEMPLATE_VARIABLES = {
    "add_generation_prompt",  # these have fields of their own
    "chat_template",
    "continue_final_message",
    "conversation",
    "return_dict",
    "tokenize",
    "tools",
}

# Without a key: they say nothing of anyone's requests.
_OPEN = ("/health", "/ready", "/metrics", "/version", "/openapi.json")

_GENERATES = ("/v1/completions", "/v1/chat/completions")

_Asked = TypeVar("_Asked", bound=bodies.Body)


def build_api(dispatcher: Dispatcher, text: ModelTokenizer, http: HttpConfig, tiers: Tiers | None = None) -> FastAPI:
    """The ASGI application. `text` must be the tokenizer of the model that the dispatcher's replicas serve, `tiers`
    their SLO classes (None: the default ones)."""
    app = FastAPI(title="Crossdock", openapi_url=None, redirect_slashes=False)
    tiers = tiers or Tiers()
    api = _Endpoints(dispatcher, text, http, tiers)
    for path, endpoint, method in (
        ("/v1/completions", api.completions, "POST"),
        ("/v1/chat/completions", api.chat_completions, "POST"),
        ("/v1/models", api.models, "GET"),
        ("/v1/models/{name:path}", api.model, "GET"),
        ("/v1/requests", api.live_requests, "GET"),
        ("/v1/requests/{name:path}", api.request_timeline, "GET"),
        ("/v1/replicas", api.replicas, "GET"),
        ("/v1/playground/scheduler", api.play, "GET"),
        ("/tokenize", api.tokenize, "POST"),
        ("/detokenize", api.detokenize, "POST"),
        ("/health", api.health, "GET"),
        ("/ready", api.ready, "GET"),
        ("/metrics", api.metrics, "GET"),
        ("/version", api.version, "GET"),
        ("/openapi.json", api.description, "GET"),
    ):
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    for path, page in web_assets().items():
        app.add_api_route(path, partial(_page, page), methods=["GET"], response_model=None)
    app.add_exception_handler(HTTPException, _unrouted)
    if http.otlp_endpoint is not None:
        app.add_middleware(
            Tracing,
            exporter=otlp_exporter(http.otlp_endpoint),
            sample_ratio=http.trace_sample_ratio,
            timelines=dispatcher.timelines,
            paths=_GENERATES,
        )
    app.add_middleware(
        HttpGuard,
        keys=KeyRing(http.api_keys, None if http.api_keys_file is None else Path(http.api_keys_file), tiers.names),
        open_paths={*_OPEN, *web_assets()},
        ledger=Ledger(http.replicas),
        max_body_bytes=http.max_body_bytes,
        request_timeout_s=http.request_timeout_s,
    )
    return app


async def _unrouted(request: Request, error: Exception) -> Response:
    """What the router itself refuses: an unknown path, a wrong method."""
    assert isinstance(error, HTTPException)
    reason = f"{error.detail}: {request.method} {request.url.path}"
    return refusal(ApiError(reason, status=error.status_code, headers=error.headers))


async def _page(page: WebAsset, request: Request) -> Response:
    return Response(page.content, media_type=page.media_type, headers=ASSET_HEADERS)


def _json(value: Any) -> Response:
    return Response(to_json(value), media_type="application/json")


async def _event_stream(events: AsyncGenerator[bytes, None]) -> Response:
    """Waits for the first event, so that whatever fails before the first token still has its own HTTP status."""
    return EventStream(await anext(events), events)


# -- endpoints ---------------------------------------------------------------------------------------------------------


class _Endpoints:
    def __init__(self, dispatcher: Dispatcher, text: ModelTokenizer, http: HttpConfig, tiers: Tiers) -> None:
        self._dispatcher = dispatcher
        self._text = text
        self._http = http
        self._tiers = tiers
        self._playing = asyncio.Lock()  # one at a time: it is a game, on cores that others serve from

    # -- generation --

    async def completions(self, request: Request) -> Response:
        asked = await self._body(request, CompletionRequest)
        card = self._card(asked.model)
        slo_class = self._slo_class(request, asked)
        if asked.suffix:
            raise ApiError("'suffix' is not supported.", param="suffix", code="unsupported_parameter")
        if asked.best_of is not None and asked.best_of != asked.n:
            reason = f"'best_of' ({asked.best_of}) must equal 'n' ({asked.n}): outputs are not ranked."
            raise ApiError(reason, param="best_of", code="unsupported_value")
        given = asked.prompts()
        if len(given) * asked.n > bodies.MAX_CHOICES:
            reason = f"{len(given)} prompts times n={asked.n} is more than {bodies.MAX_CHOICES} outputs."
            raise ApiError(reason, param="prompt", code="invalid_value")
        prompts = [await self._completion_prompt(asked, card, prompt) for prompt in given]
        choices = self._choices(request, asked, card, prompts, asked.max_tokens, slo_class)
        head = self._head(request, asked, card, slo_class, "cmpl", "text_completion")
        if asked.stream:
            return await _event_stream(self._completion_events(asked, choices, head))
        wholes = await self._wholes(choices)
        return _json(
            {
                **head,
                "choices": [
                    self._completion_choice(asked, choice, whole) for choice, whole in zip(choices, wholes, strict=True)
                ],
                "usage": _usage(choices, asked.n),
            }
        )

    async def chat_completions(self, request: Request) -> Response:
        asked = await self._body(request, ChatCompletionRequest)
        card = self._card(asked.model)
        slo_class = self._slo_class(request, asked)
        if asked.top_logprobs is not None and not asked.logprobs:
            raise ApiError("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs", code="invalid_value")
        limit = asked.token_limit()
        truncates = asked.truncate_prompt_tokens is not None
        token_ids = await self._chat_tokens(asked, asked.template_tools(), card, truncates)
        prompt = Prompt(_truncated(token_ids, asked, card, limit, "messages"))
        choices = self._choices(request, asked, card, [prompt], limit, slo_class)
        if asked.stream:
            head = self._head(request, asked, card, slo_class, "chatcmpl", "chat.completion.chunk")
            return await _event_stream(self._chat_events(asked, choices, head))
        wholes = await self._wholes(choices)
        answer = self._head(request, asked, card, slo_class, "chatcmpl", "chat.completion")
        answer["choices"] = [self._chat_choice(asked, whole) for whole in wholes]
        answer["usage"] = _usage(choices, asked.n)
        if asked.prompt_logprobs is not None:
            answer["prompt_logprobs"] = bodies.prompt_logprobs(self._text, wholes[0].prompt_logprobs or ())
        if asked.return_token_ids:
            answer["prompt_token_ids"] = prompt.token_ids
        return _json(answer)

    def _card(self, name: str | None) -> ModelCard:
        card = self._dispatcher.model
        if name is not None and name != card.name and name not in self._http.model_aliases:
            raise ApiError(
                f"The model '{name[:200]}' does not exist.", status=404, param="model", code="model_not_found"
            )
        return card

    def _slo_class(self, request: Request, asked: GenerationBody) -> str:
        return self._tiers.choose(asked.service_tier, request.headers.get(HEADER), request.state.api_key)

    def _head(
        self, request: Request, asked: GenerationBody, card: ModelCard, slo_class: str, prefix: str, kind: str
    ) -> dict[str, Any]:
        return {
            "id": f"{prefix}-{request.state.request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": asked.model or card.name,
            "service_tier": slo_class,
        }

    async def _completion_prompt(self, asked: CompletionRequest, card: ModelCard, prompt: str | list[int]) -> Prompt:
        if isinstance(prompt, str):
            truncates = asked.truncate_prompt_tokens is not None
            token_ids = await self._encode(prompt, asked.add_special_tokens, card, "prompt", truncates)
        else:
            bodies.check_token_ids(prompt, card.vocab_size, "prompt")
            token_ids = prompt
        limit = _DEFAULT_MAX_TOKENS if asked.max_tokens is None else asked.max_tokens
        result = Prompt(_truncated(token_ids, asked, card, limit, "prompt"))
        if asked.echo:
            detokenizer = self._text.detokenizer(skip_special_tokens=asked.skip_special_tokens)
            texts: list[str] = []
            length = 0
            for token_id in result.token_ids:
                result.offsets.append(length)
                texts.append(detokenizer.add(token_id))
                length += len(texts[-1])
            is_whole = isinstance(prompt, str) and len(result.token_ids) == len(token_ids)
            result.echo = cast(str, prompt) if is_whole else "".join(texts)
        return result

    async def _chat_tokens(
        self,
        asked: ChatCompletionRequest | TokenizeRequest,
        tools: list[dict[str, Any]] | None,
        card: ModelCard,
        truncates: bool,
    ) -> list[int]:
        if asked.chat_template is not None and not self._http.trust_request_chat_template:
            raise ApiError(
                "'chat_template' is not accepted: this server does not trust the templates of requests.",
                param="chat_template",
                code="unsupported_parameter",
            )
        if asked.continue_final_message and asked.add_generation_prompt:
            raise ApiError(
                "'continue_final_message' and 'add_generation_prompt' cannot both be true.",
                param="continue_final_message",
                code="invalid_value",
            )
        if reserved := _NOT_TEMPLATE_VARIABLES & asked.chat_template_kwargs.keys():
            reason = f"'chat_template_kwargs' must not set {', '.join(sorted(reserved))}."
            raise ApiError(reason, param="chat_template_kwargs", code="invalid_value")
        messages = bodies.template_messages(asked.messages or ())
        adds = asked.add_generation_prompt
        try:
            prompt = self._text.render_chat(
                messages,
                tools=tools,
                add_generation_prompt=not asked.continue_final_message if adds is None else adds,
                continue_final_message=asked.continue_final_message,
                chat_template=asked.chat_template,
                variables=asked.chat_template_kwargs,
            )
        except ValueError as error:
            raise ApiError(str(error), param="messages", code="invalid_value") from error
        return await self._encode(prompt, bool(asked.add_special_tokens), card, "messages", truncates)

    async def _encode(
        self, text: str, add_special_tokens: bool, card: ModelCard, param: str, truncates: bool
    ) -> list[int]:
        """Tokenises, but not what is certain to be refused: no token is longer than the longest."""
        least = len(text) // self._text.longest_token
        if least > card.max_model_len and not truncates:
            raise _too_long(card, f"at least {least}", param)
        if len(text) <= _LONG_TEXT:
            return self._text.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self._text.encode, text, add_special_tokens=add_special_tokens)

    def _choices(
        self,
        request: Request,
        asked: CompletionRequest | ChatCompletionRequest,
        card: ModelCard,
        prompts: Sequence[Prompt],
        limit: int | None,
        slo_class: str,
    ) -> list[Choice]:
        """One choice for each prompt and each of `n`, in OpenAI's order. Raises ApiError unless all can be served."""
        if asked.stream_options is not None and not asked.stream:
            reason = "'stream_options' needs 'stream' to be true."
            raise ApiError(reason, param="stream_options", code="invalid_value")
        if asked.prompt_logprobs is not None and asked.stream:
            reason = "'prompt_logprobs' cannot be streamed."
            raise ApiError(reason, param="prompt_logprobs", code="invalid_value")
        echoes_logprobs = isinstance(asked, CompletionRequest) and asked.echo and asked.logprobs is not None
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        request_id, key = request.state.request_id, request.state.api_key
        tenant, salt = ("", asked.cache_salt) if key is None else (key.tenant, key.cache_salt(asked.cache_salt))
        account = request.state.account
        choices: list[Choice] = []
        for prompt in prompts:
            max_tokens = _max_tokens(card, len(prompt.token_ids), limit, asked)
            sampling = asked.sampling(
                max_tokens,
                defaults=self._text.defaults,
                vocab_size=card.vocab_size,
                max_logprobs=self._http.max_logprobs,
            )
            if echoes_logprobs:
                sampling = replace(sampling, prompt_logprobs=max(sampling.prompt_logprobs or 0, sampling.logprobs or 0))
            for i in range(asked.n):
                # A client may use an id twice, and there are several submissions in a request.
                name = f"{request_id}-{uuid.uuid4().hex}"
                own = replace(sampling, max_tokens=max(1, max_tokens), seed=(seed + i) % 2**63)
                submission = Submission(
                    name, prompt.token_ids, own, salt, slo_class, request_id=request_id, tenant=tenant
                )
                detokenizer = self._text.detokenizer(
                    after=prompt.token_ids, skip_special_tokens=asked.skip_special_tokens
                )
                stream = TextStream(
                    detokenizer,
                    asked.stop,
                    include_stop=asked.include_stop_str_in_output,
                    min_tokens=asked.min_tokens,
                )
                is_prompt_only = max_tokens == 0
                shows = asked.include_stop_str_in_output
                choices.append(Choice(len(choices), prompt, submission, stream, shows, is_prompt_only, account))
        if account is not None:
            account.prompt(sum(len(prompt.token_ids) for prompt in prompts))
        request.state.submission_ids = {choice.submission.id for choice in choices}
        return choices

    async def _outputs(self, choice: Choice) -> AsyncGenerator[Output, None]:
        """The outputs of one choice up to its end, wherever that comes from; the first may be an acceptance. Closing it
        aborts the request."""
        deltas = cast(AsyncGenerator[TokenDelta, None], self._dispatcher.generate(choice.submission))
        async with aclosing(deltas):
            while True:
                try:
                    delta = await anext(deltas, None)
                except ValueError as error:
                    raise _engine_refusal(error) from error
                if delta is None:
                    raise RuntimeError(f"{choice.submission.id} ended without a finish reason")
                if not delta.token_ids and delta.finish_reason is None:
                    yield Output(choice.index)
                    continue
                output = choice.read(delta)
                yield output
                if output.finish_reason is not None:
                    return

    async def _all_outputs(self, choices: Sequence[Choice]) -> AsyncGenerator[Output, None]:
        """The outputs of all choices as they come, but none before replicas have taken every one: until then, the
        refusal of one must still be able to become the status of the whole answer."""
        streams = [self._outputs(choice) for choice in choices]
        refusable = {choice.index for choice in choices}
        held: list[Output] = []
        async with aclosing(streams[0] if len(streams) == 1 else merge(streams)) as outputs:
            async for output in outputs:
                if not output.is_acceptance:
                    held.append(output)
                if refusable:
                    refusable.discard(output.index)
                    if refusable:
                        continue
                for ready in held:
                    yield ready
                held.clear()

    async def _wholes(self, choices: Sequence[Choice]) -> list[Output]:
        wholes = [Output(choice.index) for choice in choices]
        async with aclosing(self._all_outputs(choices)) as outputs:
            async for output in outputs:
                wholes[output.index].extend(output)
        return wholes

    # -- how outputs are written down --

    def _completion_choice(self, asked: CompletionRequest, choice: Choice, output: Output) -> dict[str, Any]:
        """Of a whole answer and of a chunk alike: completions have one shape for both."""
        result: dict[str, Any] = {"index": output.index, "text": output.text, "logprobs": None}
        if asked.logprobs is not None:
            result["logprobs"] = bodies.completion_logprobs(self._text, output.positions, output.offsets)
        result["finish_reason"] = output.finish_reason
        result["stop_reason"] = output.stop_reason
        if asked.prompt_logprobs is not None:
            result["prompt_logprobs"] = bodies.prompt_logprobs(self._text, output.prompt_logprobs or ())
        if asked.return_token_ids:
            result["token_ids"] = output.token_ids
            result["prompt_token_ids"] = choice.prompt.token_ids
        return result

    async def _completion_events(
        self, asked: CompletionRequest, choices: Sequence[Choice], head: dict[str, Any]
    ) -> AsyncGenerator[bytes, None]:
        includes_usage = asked.stream_options is not None and asked.stream_options.include_usage
        chunks = bodies.Chunks(head, is_chat=False, include_usage=includes_usage)
        is_plain = asked.logprobs is None and not asked.return_token_ids
        async with aclosing(self._all_outputs(choices)) as outputs:
            async for output in outputs:
                if output.finish_reason is not None or not is_plain:
                    yield chunks.choice(self._completion_choice(asked, choices[output.index], output))
                elif output.texts:
                    yield chunks.text(output.index, output.text)
        if includes_usage:
            yield chunks.usage(_usage(choices, asked.n))
        yield bodies.DONE

    def _chat_extras(self, asked: ChatCompletionRequest, output: Output) -> dict[str, Any]:
        extras: dict[str, Any] = {"logprobs": None}
        if asked.logprobs:
            positions = [position for _, position in output.positions if position is not None]
            extras["logprobs"] = bodies.chat_logprobs(self._text, positions, asked.top_logprobs or 0)
        if asked.return_token_ids:
            extras["token_ids"] = output.token_ids
        return extras

    def _chat_choice(self, asked: ChatCompletionRequest, output: Output) -> dict[str, Any]:
        return {
            "index": output.index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            **self._chat_extras(asked, output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    async def _chat_events(
        self, asked: ChatCompletionRequest, choices: Sequence[Choice], head: dict[str, Any]
    ) -> AsyncGenerator[bytes, None]:
        includes_usage = asked.stream_options is not None and asked.stream_options.include_usage
        chunks = bodies.Chunks(head, is_chat=True, include_usage=includes_usage)
        is_plain = not asked.logprobs and not asked.return_token_ids
        has_begun = False
        async with aclosing(self._all_outputs(choices)) as outputs:
            async for output in outputs:
                if not has_begun:
                    has_begun = True
                    for choice in choices:
                        delta = {"role": "assistant", "content": ""}
                        first = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
                        if asked.return_token_ids:
                            first["prompt_token_ids"] = choice.prompt.token_ids
                        yield chunks.choice(first)
                if not is_plain and output.token_ids:
                    extras = self._chat_extras(asked, output)
                    delta = {"content": output.text}
                    yield chunks.choice({"index": output.index, "delta": delta, **extras, "finish_reason": None})
                elif output.texts:
                    yield chunks.text(output.index, output.text)
                if output.finish_reason is not None:
                    reasons = {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
                    yield chunks.choice({"index": output.index, "delta": {}, "logprobs": None, **reasons})
        if includes_usage:
            yield chunks.usage(_usage(choices, asked.n))
        yield bodies.DONE

    # -- the rest --

    async def models(self, request: Request) -> Response:
        card = self._dispatcher.model
        names = [card.name, *self._http.model_aliases]
        return _json({"object": "list", "data": [_model(card, name) for name in names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        return _json(_model(self._card(name), name))

    async def live_requests(self, request: Request) -> Response:
        return _json({"object": "list", "data": await self._dispatcher.live_requests(_sees(request))})

    async def request_timeline(self, request: Request) -> Response:
        """By the request's id (the header X-Request-Id of its answer), or by the `id` in the answer's body."""
        name, sees = request.path_params["name"], _sees(request)
        for request_id in dict.fromkeys((name, name.removeprefix("chatcmpl-").removeprefix("cmpl-"))):
            if found := await self._dispatcher.timelines(request_id, sees):
                return _json({"id": request_id, "object": "request.timeline", "requests": found})
        reason = f"No request '{name[:200]}' is known: it never came, ended long ago, or was another key's."
        raise ApiError(reason, status=404, param="id", code="request_not_found")

    async def replicas(self, request: Request) -> Response:
        """Every replica now, and its steps after those that were seen: `?after=INCARNATION:NUMBER`, for each."""
        seen: dict[str, int] = {}
        for value in request.query_params.getlist("after"):
            incarnation, _, number = value.partition(":")
            if not (number.isascii() and number.isdigit() and len(number) < 16):
                reason = f"Invalid value for 'after': {value[:100]!r} is not of the form INCARNATION:NUMBER."
                raise ApiError(reason, param="after", code="invalid_value")
            seen[incarnation] = int(number)
        return _json({"object": "list", "data": await self._dispatcher.replicas(seen, _sees(request))})

    async def play(self, request: Request) -> Response:
        """What the scheduler does in a scenario, whose fields are the query's."""
        try:
            scenario = Scenario.model_validate(dict(request.query_params))
        except ValidationError as error:
            raise bodies.refusal_of(error) from None
        async with self._playing:
            return _json(await asyncio.to_thread(play, scenario))

    async def tokenize(self, request: Request) -> Response:
        asked = await self._body(request, TokenizeRequest)
        card = self._card(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise ApiError("Either 'prompt' or 'messages' must be given.", param="prompt", code="invalid_value")
        if asked.prompt is not None:
            adds = asked.add_special_tokens is not False
            token_ids = await self._encode(asked.prompt, adds, card, "prompt", truncates=True)
        else:
            token_ids = await self._chat_tokens(asked, asked.tools or None, card, truncates=True)
        answer: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": card.max_model_len,
            "tokens": token_ids,
            "token_strs": None,
        }
        if asked.return_token_strs:
            answer["token_strs"] = [self._text.vocabulary_name(token_id) for token_id in token_ids]
        return _json(answer)

    async def detokenize(self, request: Request) -> Response:
        asked = await self._body(request, DetokenizeRequest)
        card = self._card(asked.model)
        bodies.check_token_ids(asked.tokens, card.vocab_size, "tokens")
        return _json({"prompt": self._text.decode(asked.tokens)})

    async def health(self, request: Request) -> Response:
        return Response()

    async def ready(self, request: Request) -> Response:
        if not self._dispatcher.ready():
            raise ApiError("No replica is up yet.", status=503, kind="server_error", code="not_ready")
        return Response()

    async def metrics(self, request: Request) -> Response:
        return Response(await self._dispatcher.metrics_text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self, request: Request) -> Response:
        return _json({"version": version("crossdock")})

    async def description(self, request: Request) -> Response:
        return _json(document(_OPEN))

    async def _body(self, request: Request, kind: type[_Asked]) -> _Asked:
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            reason = f"Unsupported content type {content_type[:100]!r}: send application/json."
            raise ApiError(reason, status=415, code="unsupported_media_type")
        return kind.parse(await request.body())


def _sees(request: Request) -> str | None:
    """The tenant whose requests this one may look at; None: all. Where no keys are asked for, everyone sees all."""
    key: ApiKey | None = request.state.api_key
    return None if key is None or key.sees_all_requests else key.tenant


def _truncated(
    token_ids: list[int], asked: GenerationBody, card: ModelCard, limit: int | None, param: str
) -> list[int]:
    """The end of the prompt, where the request asks for it; -1 asks for as much as there is room for."""
    keep = asked.truncate_prompt_tokens
    if keep == -1:
        keep = card.max_model_len - max(1, limit or 1)
    result = token_ids if keep is None else token_ids[max(0, len(token_ids) - keep) :]
    if not result:
        raise ApiError(f"'{param}' must have at least one token.", param=param, code="invalid_value")
    return result


def _max_tokens(
    card: ModelCard, num_prompt_tokens: int, limit: int | None, asked: CompletionRequest | ChatCompletionRequest
) -> int:
    """How many tokens the output may have. At least one must fit: even without output, the engine samples one."""
    is_chat = isinstance(asked, ChatCompletionRequest)
    left = card.max_model_len - num_prompt_tokens
    if left < max(1, limit or 1):
        param = "messages" if is_chat else "prompt"
        raise _too_long(card, str(num_prompt_tokens), param, limit)
    if limit is not None:
        return limit
    return left if is_chat else min(_DEFAULT_MAX_TOKENS, left)


def _too_long(card: ModelCard, num_tokens: str, param: str, limit: int | None = None) -> ApiError:
    if limit is not None and num_tokens.isdigit():
        total = int(num_tokens) + limit
        what = f"you requested {total} tokens ({num_tokens} in the {param}, {limit} in the completion)"
    else:
        what = f"your {param} resulted in {num_tokens} tokens, which leaves none for the completion"
    reason = f"This model's maximum context length is {card.max_model_len} tokens. However, {what}."
    return ApiError(f"{reason} Please reduce the length.", param=param, code="context_length_exceeded")


def _engine_refusal(error: ValueError) -> ApiError:
    """Turn an engine's error into the client's.

    Ray wraps an error of another process in one whose text is a traceback: the first argument is the error itself.
    """
    reason = str(error.args[0]) if error.args else "The engine refuses the request."
    fields = CompletionRequest.model_fields.keys() | ChatCompletionRequest.model_fields.keys()
    param = error.field if isinstance(error, InvalidField) and error.field in fields else None
    return ApiError(reason, param=param, code="invalid_value")


def _model(card: ModelCard, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": card.created,
        "owned_by": "crossdock",
        "root": card.name,
        "parent": None,
        "max_model_len": card.max_model_len,
    }


def _usage(choices: Sequence[Choice], n: int) -> dict[str, Any]:
    """A prompt counts once, however many outputs it has."""
    firsts = choices[::n]
    return bodies.usage(
        sum(len(choice.prompt.token_ids) for choice in firsts),
        sum(choice.num_tokens for choice in choices),
        sum(choice.num_cached_tokens for choice in firsts),
    )
