"""Prompts as token ids: a text or a chat is encoded, truncated where the request asks for that, and must fit."""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from crossdock.cluster.api.body.bodies import ChatCompletionRequest, TokenizeRequest, check_tools
from crossdock.cluster.api.body.generation_body import GenerationBody
from crossdock.cluster.api.body.messages import call_arguments, template_messages
from crossdock.cluster.api.body.pictures import Kind, Picture
from crossdock.cluster.api.bounds import TEMPLATE_CHARS, TRUNCATED_CHARS, TRUNCATED_PER_TOKEN
from crossdock.cluster.api.errors import ApiError, shown, to_json, wrong
from crossdock.cluster.api.heap import Heap
from crossdock.cluster.api.http.http_config import NOT_TEMPLATE_VARIABLES
from crossdock.cluster.api.http.json_size import check_texts_size
from crossdock.cluster.api.http.request_memory import RequestMemory
from crossdock.cluster.api.media.media import Media, place
from crossdock.cluster.api.text.call_ids import CALL_IDS, CallIds
from crossdock.cluster.api.text.carried import Carrier
from crossdock.cluster.api.text.choices import Prompt
from crossdock.cluster.api.text.families import family_in
from crossdock.cluster.api.text.tokenizer import ModelTokenizer, template_reads
from crossdock.cluster.dispatch.dispatcher import ModelCard

LONG_TEXT = 4096  # characters; 1 to 5 ms to encode. A longer text leaves the event loop for a thread.
_HUGE_TEXT = 1 << 16  # characters; about 0.1 s and 10 MiB to encode. Such texts are encoded one at a time.
_FEW_MESSAGES = 32  # a template takes about 20 µs for each
Frame: TypeAlias = tuple[int, int]
"""How many tokens stand before and after a text that are not its own, such as BOS and EOS."""

_PROBE_TOOLS = [  # for a look at what a template shows of messages
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "f",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "string", "description": "x"}},
                "required": [],
            },
        },
    }
]
_BEGINNING = 8  # characters per token of the context: a text of so many more is tried by its beginning first


class Rendered(NamedTuple):
    """The text of a chat, and the kinds of texts of its messages that the template leaves out, see `Carried`."""

    text: str
    unread: Sequence[str]


class PromptEncoder:
    """Encodes texts and chats.

    `trusts_templates`: requests may bring chat templates of their own. `variables`: those of the template in all chats.
    `media`: pictures; None: the model reads text only. `call_ids`: the form of ids in the model's template.
    """

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        *,
        trusts_templates: bool,
        variables: Mapping[str, Any] | None = None,
        media: Media | None = None,
        call_ids: CallIds | None = None,
    ) -> None:
        self._carrier = Carrier()
        self._own_ids = call_ids
        self._variables = dict(variables or {})
        self._media = media
        self._tokenizer = tokenizer
        self._trusts_templates = trusts_templates
        self._huge = ThreadPoolExecutor(1, "huge-texts")
        self._heap = Heap()

    def frame(self, *, add_special_tokens: bool) -> Frame:
        """Return how many tokens `encode` puts before and after a text."""
        return self._tokenizer.frame if add_special_tokens else (0, 0)

    async def encode(
        self,
        text: str,
        card: ModelCard,
        param: str,
        *,
        add_special_tokens: bool,
        truncates: bool,
        salt: str | None = None,
    ) -> list[int]:
        """Return the tokens of a text.

        A text that is certain to be too long is refused before it is encoded: no token has more characters than the
        longest. `truncates`: the prompt will be cut or only counted, so it may have more tokens than the context.
        `salt`: see `ModelTokenizer.encode`.
        """
        self._check_length(len(text), card, param, truncates=truncates)
        encode = partial(self._tokenizer.encode, add_special_tokens=add_special_tokens, salt=salt)
        if len(text) <= LONG_TEXT:
            return encode(text)
        if len(text) <= _HUGE_TEXT:
            return await asyncio.to_thread(encode, text)
        if not truncates:
            await self._check_beginning(text, card, param)
        try:
            return await self._alone(encode, text)
        finally:
            self._heap.trim_later()

    def _check_length(self, num_chars: int, card: ModelCard, param: str, *, truncates: bool) -> None:
        least = num_chars // self._tokenizer.longest_token
        if not truncates and least > card.max_model_len:
            raise _too_long(card, f"at least {least}", param)
        most = max(TRUNCATED_CHARS, TRUNCATED_PER_TOKEN * card.max_model_len)
        if truncates and num_chars > most:
            reason = f"{num_chars} characters are more than the {most} that are accepted, even if the text is truncated"
            raise wrong(param, reason, "context_length_exceeded")

    async def _check_beginning(self, text: str, card: ModelCard, param: str) -> None:
        """Refuse a text whose beginning has twice the tokens of the context: the whole cannot fit, and costs more.

        Twice, because the tokens of a beginning are not exactly the first tokens of the whole.
        """
        num_chars = _BEGINNING * card.max_model_len
        while 2 * num_chars <= len(text):
            beginning = await self._alone(partial(self._tokenizer.encode, add_special_tokens=False), text[:num_chars])
            if len(beginning) > 2 * card.max_model_len:
                raise _too_long(card, f"more than {len(beginning) // 2}", param)
            num_chars *= 4

    async def _alone(self, encode: Callable[[str], list[int]], text: str) -> list[int]:
        """Encode a huge text in the one thread for these: a client that leaves cannot make them overlap."""
        return await asyncio.get_running_loop().run_in_executor(self._huge, encode, text)

    async def encode_chat(
        self,
        body: ChatCompletionRequest | TokenizeRequest,
        card: ModelCard,
        *,
        truncates: bool,
        salt: str,
        owner: str = "",
        memory: RequestMemory | None = None,
    ) -> Prompt:
        """Return the prompt that the chat template makes of the messages, with their pictures.

        `salt`: only requests with the same one share processed pictures, and tokens of pieces of their texts. `owner`:
        owners' pictures take turns.
        `memory`: of the request; it counts what the arguments of calls become.
        """
        self._check_template_fields(body)
        if arguments := call_arguments(body.messages or ()):
            size = await check_texts_size(arguments, "messages")
            if memory is not None:
                memory.hold_values(*size)
        pictures: list[Picture] | None = None if self._media is None else []
        text, unread = await self.rendered(body, pictures)
        encode = partial(
            self.encode,
            card=card,
            param="messages",
            add_special_tokens=bool(body.add_special_tokens),
            truncates=truncates,
            salt=salt,
        )
        if self._media is None or not pictures:
            return Prompt(await encode(text), unread=unread)
        self._media.check(pictures)
        if (reading := body.media_io_kwargs.get("video")) is not None and reading.model_fields_set:
            pictures = [replace(each, reading=reading) if each.kind == "video" else each for each in pictures]
        kinds = [picture.kind for picture in pictures]
        places = self._media.places.items()
        pieces, found = _divided(text, {kind: place.written for kind, place in places if kind in kinds})
        if found != kinds:
            raise _misplaced(self._media, kinds, len(found))
        most_embedding_tokens = None if truncates else card.max_model_len
        ready = await self._media.prepare(pictures, most_embedding_tokens, salt=salt, owner=owner)
        parts = [part for piece, picture in zip(pieces, ready, strict=False) for part in (piece, picture.text)]
        try:
            token_ids, items = place(await encode("".join([*parts, pieces[-1]])), self._media.placeholders, ready)
        except ValueError:
            raise _misplaced(self._media, kinds) from None
        return Prompt(token_ids, items=items, unread=unread)

    async def rendered(
        self, body: ChatCompletionRequest | TokenizeRequest, pictures: list[Picture] | None = None
    ) -> Rendered:
        """Return the text that the chat template makes of the messages, as `encode_chat` encodes it."""
        render = partial(self._render, body, body.template_tools(), pictures)
        return render() if _is_short(body) else await asyncio.to_thread(render)

    def _render(
        self,
        body: ChatCompletionRequest | TokenizeRequest,
        tools: list[dict[str, Any]] | None,
        pictures: list[Picture] | None,
    ) -> Rendered:
        """Return the text that the chat template makes of the messages. Their pictures are added to `pictures`."""
        takes_parts = self._tokenizer.takes_parts
        messages = template_messages(body.messages or (), keeps_parts=takes_parts, pictures=pictures)
        adds = body.add_generation_prompt
        continues = body.continue_final_message
        try:
            template = self._template(body, tools)
            variables = self._variables | _template_fields(body, template) | body.chat_template_kwargs
            render = partial(self._tokenizer.render_chat, chat_template=template)
            adds = not continues if adds is None else adds

            def rendered_probe(messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
                some = None if tools is None else _PROBE_TOOLS
                return render(messages, tools=some, add_generation_prompt=adds, variables=variables)

            key = [tools is None, adds, bool(body.documents)] if body.chat_template is None else None
            ids = self._call_ids(template, body)
            carried = self._carrier.carried(messages, template, rendered_probe, variables, ids=ids, key=key)
            text = render(
                carried.messages,
                tools=tools,
                add_generation_prompt=adds,
                continue_final_message=continues,
                variables=variables,
            )
            return Rendered(text, carried.unread)
        except ValueError as error:
            roles = ", ".join(dict.fromkeys(shown(message["role"], 64) for message in messages))
            reason = f"{shown(str(error))} (roles of the messages: {shown(roles)})"
            raise ApiError(reason, param="messages", code="invalid_value") from error

    def unread_fields(self, body: ChatCompletionRequest) -> list[str]:
        """Return the fields of a chat that its template does not read: they change nothing. The chat has been encoded.

        Clients set them once for all models, so they are no error.
        """
        effort = body.reasoning_effort not in (None, "none")
        verbosity = body.verbosity not in (None, "medium")
        if not (effort or verbosity):
            return []
        template = self._template(body, body.template_tools())
        unread = []
        if effort and not any(template_reads(template, name) for name in ("reasoning_effort", "enable_thinking")):
            unread.append("reasoning_effort")
        if verbosity and not template_reads(template, "verbosity"):
            unread.append("verbosity")
        return unread

    def _template(self, body: ChatCompletionRequest | TokenizeRequest, tools: list[dict[str, Any]] | None) -> str:
        """Return the chat template for a request with these tools. ValueError: the model has no such template."""
        return self._tokenizer.template_for(
            body.chat_template, has_tools=tools is not None, has_documents=bool(body.documents)
        )

    def _call_ids(self, template: str, body: ChatCompletionRequest | TokenizeRequest) -> CallIds | None:
        """Return the form of the ids of calls in a template: a request's own may be another family's."""
        return self._own_ids if body.chat_template is None else CALL_IDS.get(family_in(template) or "")

    def _check_template_fields(self, body: ChatCompletionRequest | TokenizeRequest) -> None:
        if body.chat_template is not None and not self._trusts_templates:
            raise ApiError(
                "'chat_template' is not accepted: this server does not trust the templates of requests "
                "(--trust-request-chat-template).",
                param="chat_template",
                code="unsupported_parameter",
            )
        if body.continue_final_message and body.add_generation_prompt:
            raise ApiError(
                "'continue_final_message' and 'add_generation_prompt' cannot both be true.",
                param="continue_final_message",
                code="invalid_value",
            )
        if reserved := NOT_TEMPLATE_VARIABLES & body.chat_template_kwargs.keys():
            reason = f"'chat_template_kwargs' must not set {', '.join(sorted(reserved))}."
            raise ApiError(reason, param="chat_template_kwargs", code="invalid_value")
        if body.chat_template_kwargs and len(to_json(body.chat_template_kwargs)) > TEMPLATE_CHARS:
            reason = f"'chat_template_kwargs' must not have more than {TEMPLATE_CHARS} bytes as JSON."
            raise ApiError(reason, param="chat_template_kwargs", code="invalid_value")
        check_tools(body.tools)


def _template_fields(body: ChatCompletionRequest | TokenizeRequest, template: str) -> dict[str, Any]:
    """Return the variables that fields give the template. Raises ApiError for documents that it does not read."""
    fields: dict[str, Any] = {}
    if body.documents:
        fields["documents"] = body.documents
        if not template_reads(template, "documents"):
            reason = "'documents' is not supported: this model's chat template does not read them."
            raise ApiError(reason, param="documents", code="unsupported_parameter")
    if isinstance(body, TokenizeRequest):
        return fields
    if body.reasoning_effort is not None:
        fields |= {"reasoning_effort": body.reasoning_effort, "enable_thinking": body.reasoning_effort != "none"}
    if body.verbosity is not None:
        fields["verbosity"] = body.verbosity
    return fields


def _is_short(body: ChatCompletionRequest | TokenizeRequest) -> bool:
    """Return whether the messages may be rendered on the event loop: a few, of text alone, without tools."""
    messages = body.messages or ()
    if len(messages) > _FEW_MESSAGES or body.tools or body.chat_template is not None or body.chat_template_kwargs:
        return False
    contents = [message.get("content") for message in messages if "tool_calls" not in message]
    texts = [content for content in contents if isinstance(content, str)]
    return len(texts) == len(messages) and sum(map(len, texts)) <= LONG_TEXT


def truncate_chat(prompt: Prompt, body: GenerationBody, card: ModelCard, frame: Frame) -> Prompt:
    """Truncate the prompt of a chat as `truncate` does. Raises ApiError where the prompt has pictures."""
    token_ids = truncate(prompt.token_ids, body, card, frame)
    if prompt.items and len(token_ids) != len(prompt.token_ids):
        reason = "'truncate_prompt_tokens' is not supported where it would cut a chat that has pictures."
        raise ApiError(reason, param="truncate_prompt_tokens", code="unsupported_value")
    return replace(prompt, token_ids=token_ids)


def truncate(token_ids: list[int], body: GenerationBody, card: ModelCard, frame: Frame = (0, 0)) -> list[int]:
    """Return the part of the prompt that `truncate_prompt_tokens` keeps: its end, or with `right` its beginning.

    -1 keeps all that fits beside the output. `frame`: how many tokens the tokenizer has put before and after the text.
    They count, and stay.
    """
    keep = body.truncate_prompt_tokens
    if keep == -1:
        keep = card.max_model_len - (_limit(body) or card.least_output)
    result = token_ids
    if keep is not None and len(token_ids) > keep:
        before, after = frame
        end = len(token_ids) - after
        room = room_for_text(keep, before + after)
        text = slice(before, before + room) if body.truncation_side == "right" else slice(end - room, end)
        result = [*token_ids[:before], *token_ids[text], *token_ids[end:]]
    if not result:
        reason = f"'{body.prompt_field}' must have at least one token."
        raise ApiError(reason, param=body.prompt_field, code="invalid_value")
    return result


def room_for_text(keep: int, num_around: int) -> int:
    """Return how many of the `keep` tokens that are kept may be text. Raises ApiError: not even those around it fit."""
    if keep < num_around:
        reason = f"it must be {num_around} or more, as the tokenizer puts {num_around} tokens around each text"
        raise wrong("truncate_prompt_tokens", reason)
    return keep - num_around


def output_limit(num_prompt_tokens: int, body: GenerationBody, card: ModelCard) -> int:
    """Return how many tokens the output may have. At least one must fit: even for no output, the engine samples one,
    unless it is a text encoder's."""
    limit = body.token_limit()
    left = card.max_model_len - num_prompt_tokens
    if left < (limit or card.least_output):
        raise _too_long(card, str(num_prompt_tokens), body.prompt_field, limit)
    limit = _limit(body)
    return left if limit is None else min(limit, left)


def _divided(text: str, written: Mapping[Kind, str]) -> tuple[list[str], list[Kind]]:
    """Return the pieces of a text around its pictures and videos, and the kind of each of these, in order."""
    if not written:
        return [text], []
    kinds: dict[str, Kind] = {each: kind for kind, each in written.items()}
    longest_first = sorted(kinds, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
    return parts[::2], [kinds[part] for part in parts[1::2]]


def _misplaced(media: Media, kinds: Sequence[Kind], num_places: int | None = None) -> ApiError:
    """Return the error for a prompt whose pictures or videos have no places of their own."""
    places = media.places.values() if num_places is None else map(media.places.__getitem__, kinds)
    names = [token for place in places for token in (place.written, place.token)]
    listed = " and ".join(f"'{token}'" for token in dict.fromkeys(names))
    found = "other places" if num_places in (None, len(kinds)) else f"{num_places} places"
    what = "videos" if "image" not in kinds else "pictures and videos" if "video" in kinds else "pictures"
    reason = (
        f"the chat template makes {found} for {len(kinds)} {what}. Texts must not contain {listed}, and the messages "
        f"with {what} must be of roles whose {what} the template shows"
    )
    return wrong("messages", reason)


def _limit(body: GenerationBody) -> int | None:
    limit = body.token_limit()
    return body.default_max_tokens if limit is None else limit


def _too_long(card: ModelCard, num_tokens: str, param: str, limit: int | None = None) -> ApiError:
    if not card.least_output:
        detail = f"your {param} resulted in {num_tokens} tokens"
    elif limit == 0:
        unit = "which leaves none for the token that is computed even where 'max_tokens' is 0"
        detail = f"your {param} resulted in {num_tokens} tokens, {unit}"
    elif limit is not None and num_tokens.isdigit():
        total = int(num_tokens) + limit
        detail = f"you requested {total} tokens ({num_tokens} in the {param}, {limit} in the completion)"
    else:
        detail = f"your {param} resulted in {num_tokens} tokens, which leaves none for the completion"
    reason = f"This model's maximum context length is {card.max_model_len} tokens. However, {detail}."
    return ApiError(f"{reason} Please reduce the length.", param=param, code="context_length_exceeded")
