"""POST /tokenize and /detokenize: the tokens of a prompt, and the text of tokens."""

from typing import Any

from fastapi import Request, Response

from crossdock.cluster.api.bodies import DetokenizeRequest, TokenizeRequest, check_token_ids
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.http_json import json_answer
from crossdock.cluster.api.models import Models
from crossdock.cluster.api.prompts import PromptEncoder
from crossdock.cluster.api.tokenizer import ModelTokenizer


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
        if body.prompt is not None:
            adds = body.add_special_tokens is not False
            token_ids = await self._encoder.encode(body.prompt, card, "prompt", add_special_tokens=adds, truncates=True)
        else:
            token_ids = await self._encoder.encode_chat(body, body.tools or None, card, truncates=True)
        answer: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": card.max_model_len,
            "tokens": token_ids,
            "token_strs": None,
        }
        if body.return_token_strs:
            answer["token_strs"] = [self._tokenizer.vocabulary_name(token_id) for token_id in token_ids]
        return json_answer(answer)

    async def detokenize(self, request: Request, body: DetokenizeRequest) -> Response:
        card = self._models.card(body.model)
        check_token_ids(body.tokens, card.vocab_size, "tokens")
        return json_answer({"prompt": self._tokenizer.decode(body.tokens)})
