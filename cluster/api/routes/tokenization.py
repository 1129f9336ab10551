"""POST /tokenize and /detokenize: the tokens of a prompt, and the text of tokens."""

import asyncio
from typing import Any

from fastapi import Request, Response

from crossdock.cluster.api.body.bodies import DetokenizeRequest, TokenizeRequest
from crossdock.cluster.api.body.generation_body import check_token_ids
from crossdock.cluster.api.bounds import DETOKENIZED
from crossdock.cluster.api.errors import ApiError, check_count, wrong
from crossdock.cluster.api.http.http_json import json_answer, long_json_answer
from crossdock.cluster.api.http.keys import cache_salt, owner_of
from crossdock.cluster.api.routes.models import Models
from crossdock.cluster.api.slices import slices
from crossdock.cluster.api.text.prompts import PromptEncoder
from crossdock.cluster.api.text.tokenizer import ModelTokenizer

_NAMES_AT_ONCE = 1024  # tokens; under a millisecond
_DECODED_AT_ONCE = 4096  # tokens; about a millisecond. More leave the event loop for a thread.


class Tokenization:
    def __init__(self, models: Models, encoder: PromptEncoder, tokenizer: ModelTokenizer) -> None:
        self._models = models
        self._encoder = encoder
        self._tokenizer = tokenizer

    async def tokenize(self, request: Request, body: TokenizeRequest) -> Response:
        card = self._models.card(body.model)
        if (body.prompt is None) == (body.messages is None):
            reason = "Exactly one of 'prompt' and 'messages' must be given."
            raise ApiError(reason, param="prompt", code="invalid_value")
        if body.prompt is not None and body.documents:
            raise wrong("documents", "a template shows them beside 'messages'; a prompt is the whole text")
        if body.prompt is not None:
            adds = body.add_special_tokens is not False
            token_ids = await self._encoder.encode(body.prompt, card, "prompt", add_special_tokens=adds, truncates=True)
        else:
            salt = cache_salt(request.state.api_key, "")
            owner = owner_of(request.state.api_key)
            memory = request.state.memory
            prompt = await self._encoder.encode_chat(body, card, truncates=True, salt=salt, owner=owner, memory=memory)
            token_ids = prompt.token_ids
        answer: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": card.max_model_len,
            "tokens": token_ids,
            "token_strs": None,
        }
        if body.return_token_strs:
            names: list[str] = []
            async for some in slices(token_ids, _NAMES_AT_ONCE):
                names += map(self._tokenizer.vocabulary_name, some)
            answer["token_strs"] = names
        return await long_json_answer(answer)

    async def detokenize(self, request: Request, body: DetokenizeRequest) -> Response:
        card = self._models.card(body.model)
        most = max(DETOKENIZED, card.max_model_len)
        check_count("tokens", len(body.tokens), most, "ids")
        check_token_ids(body.tokens, card.vocab_size, "tokens")
        if len(body.tokens) <= _DECODED_AT_ONCE:
            text = self._tokenizer.decode(body.tokens)
        else:
            text = await asyncio.to_thread(self._tokenizer.decode, body.tokens)
        return json_answer({"prompt": text})
