"""Prompts as token ids: a text or a chat is encoded, truncated where the request asks for that, and must fit."""

import asyncio
from typing import Any

from crossdock.cluster.api.bodies import ChatCompletionRequest, GenerationBody, TokenizeRequest
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.messages import template_messages
from crossdock.cluster.api.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import ModelCard

_LONG_TEXT = 4096  # characters; about 1 ms to encode. A longer text leaves the event loop for a thread.
_NOT_TEMPLATE_VARIABLES = {
    "add_generation_prompt",  # these have fields of their own
    "chat_template",
    "continue_final_message",
    "conversation",
    "return_dict",
    "tokenize",
    "tools",
}


class PromptEncoder:
    """Encodes texts and chats. `trusts_templates`: requests may bring chat templates of their own."""

    def __init__(self, tokenizer: ModelTokenizer, *, trusts_templates: bool) -> None:
        self._tokenizer = tokenizer
        self._trusts_templates = trusts_templates

    async def encode(
        self, text: str, card: ModelCard, param: str, *, add_special_tokens: bool, truncates: bool
    ) -> list[int]:
        """Return the tokens of a text.

        A text that is certain to be too long is refused before it is encoded: no token has more characters than the
        longest. `truncates`: a prompt of any length will do.
        """
        least = len(text) // self._tokenizer.longest_token
        if least > card.max_model_len and not truncates:
            raise _too_long(card, f"at least {least}", param)
        if len(text) <= _LONG_TEXT:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)

    async def encode_chat(
        self,
        body: ChatCompletionRequest | TokenizeRequest,
        tools: list[dict[str, Any]] | None,
        card: ModelCard,
        *,
        truncates: bool,
    ) -> list[int]:
        """Return the tokens of the prompt that the chat template makes of the messages."""
        self._check_template_fields(body)
        messages = template_messages(body.messages or ())
        adds = body.add_generation_prompt
        try:
            prompt = self._tokenizer.render_chat(
                messages,
                tools=tools,
                add_generation_prompt=not body.continue_final_message if adds is None else adds,
                continue_final_message=body.continue_final_message,
                chat_template=body.chat_template,
                variables=body.chat_template_kwargs,
            )
        except ValueError as error:
            raise ApiError(str(error), param="messages", code="invalid_value") from error
        adds_special_tokens = bool(body.add_special_tokens)
        return await self.encode(prompt, card, "messages", add_special_tokens=adds_special_tokens, truncates=truncates)

    def _check_template_fields(self, body: ChatCompletionRequest | TokenizeRequest) -> None:
        if body.chat_template is not None and not self._trusts_templates:
            raise ApiError(
                "'chat_template' is not accepted: this server does not trust the templates of requests.",
                param="chat_template",
                code="unsupported_parameter",
            )
        if body.continue_final_message and body.add_generation_prompt:
            raise ApiError(
                "'continue_final_message' and 'add_generation_prompt' cannot both be true.",
                param="continue_final_message",
                code="invalid_value",
            )
        if reserved := _NOT_TEMPLATE_VARIABLES & body.chat_template_kwargs.keys():
            reason = f"'chat_template_kwargs' must not set {', '.join(sorted(reserved))}."
            raise ApiError(reason, param="chat_template_kwargs", code="invalid_value")


def truncate(token_ids: list[int], body: GenerationBody, card: ModelCard) -> list[int]:
    """Return the end of the prompt, as long as `truncate_prompt_tokens` allows; -1 asks for all that fits."""
    keep = body.truncate_prompt_tokens
    if keep == -1:
        keep = card.max_model_len - max(1, _limit(body) or 1)
    result = token_ids if keep is None else token_ids[max(0, len(token_ids) - keep) :]
    if not result:
        reason = f"'{body.prompt_field}' must have at least one token."
        raise ApiError(reason, param=body.prompt_field, code="invalid_value")
    return result


def output_limit(num_prompt_tokens: int, body: GenerationBody, card: ModelCard) -> int:
    """Return how many tokens the output may have. At least one must fit: even for no output, the engine samples one."""
    limit = body.token_limit()
    left = card.max_model_len - num_prompt_tokens
    if left < max(1, limit or 1):
        raise _too_long(card, str(num_prompt_tokens), body.prompt_field, limit)
    limit = _limit(body)
    return left if limit is None else min(limit, left)


def _limit(body: GenerationBody) -> int | None:
    limit = body.token_limit()
    return body.default_max_tokens if limit is None else limit


def _too_long(card: ModelCard, num_tokens: str, param: str, limit: int | None = None) -> ApiError:
    if limit is not None and num_tokens.isdigit():
        total = int(num_tokens) + limit
        detail = f"you requested {total} tokens ({num_tokens} in the {param}, {limit} in the completion)"
    else:
        detail = f"your {param} resulted in {num_tokens} tokens, which leaves none for the completion"
    reason = f"This model's maximum context length is {card.max_model_len} tokens. However, {detail}."
    return ApiError(f"{reason} Please reduce the length.", param=param, code="context_length_exceeded")
