"""POST /v1/score and /v1/rerank: how well documents fit queries.

A model of vectors gives the cosine of the two texts' vectors. A model that judges pairs reads both in one chat, and the
probability of its word for yes, against that of its word for no, is the score. A model with a head of one label reads
both texts as its tokenizer joins them; the sigmoid of its logit is the score.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import Request, Response

from crossdock.cluster.api.body.bodies import ChatCompletionRequest, CompletionRequest
from crossdock.cluster.api.body.classifier_head import ClassifierHead
from crossdock.cluster.api.body.embedding_body import ClassifyRequest, EmbeddingRequest
from crossdock.cluster.api.body.pooler_config import EmbeddingDefaults
from crossdock.cluster.api.body.score_body import PairsBody, RerankRequest, ScoreRequest
from crossdock.cluster.api.bounds import INPUTS
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.http.http_json import long_json_answer
from crossdock.cluster.api.routes.completions import Completions
from crossdock.cluster.api.routes.embeddings import vector_of
from crossdock.cluster.api.routes.generation import Generation, Generations
from crossdock.cluster.api.text.choices import Output
from crossdock.cluster.api.text.pairs import PairPrompts
from crossdock.cluster.api.text.prompts import PromptEncoder
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import ReplicaLost

_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
_BORDER = "<Document>"  # after a line break: a word never reaches across it


class Scores:
    def __init__(
        self,
        generations: Generations,
        completions: Completions,
        encoder: PromptEncoder,
        tokenizer: ModelTokenizer,
        defaults: EmbeddingDefaults,
    ) -> None:
        self._generations = generations
        self._completions = completions
        self._encoder = encoder
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._words = [_token_of(word, tokenizer) for word in defaults.classifier]  # no, yes

    async def score(self, request: Request, body: ScoreRequest) -> Response:
        generation, scores = await self.scores(request, body)
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        head = generation.head("score", "list")
        return await long_json_answer({**head, "data": data, "usage": _usage(generation)})

    async def rerank(self, request: Request, body: RerankRequest) -> Response:
        generation, scores = await self.scores(request, body)
        texts = [text for _, text in body.pairs()]
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: body.top_n or None]
        results = [
            {
                "index": index,
                **({"document": {"text": texts[index]}} if body.return_documents else {}),
                "relevance_score": scores[index],
            }
            for index in order
        ]
        head = generation.head("rerank", "list")
        answer = {"id": head["id"], "model": head["model"], "usage": _usage(generation), "results": results}
        return await long_json_answer(answer)

    async def scores(self, request: Request, body: PairsBody) -> tuple[Generation, list[float]]:
        """Return the score of each pair of a body."""
        pairs = body.pairs()
        passed = body.passed()
        if self._defaults.head is not None:
            return await self._headed(self._defaults.head, request, body, pairs, passed)
        return await (self._judged if self._words else self._cosines)(request, body, pairs, passed)

    async def _headed(
        self,
        head: ClassifierHead,
        request: Request,
        body: PairsBody,
        pairs: Sequence[tuple[str, str]],
        passed: dict[str, Any],
    ) -> tuple[Generation, list[float]]:
        if len(head.labels) != 1:
            reason = f"This model has {len(head.labels)} labels, and scores need a model with one: use /classify."
            raise ApiError(reason, param="model", code="unsupported_value")
        generation = self._generations.begin(request, ClassifyRequest.of({"input": "", **passed}).completion(head))
        makes = self._prompts(request, generation)
        prompts = await makes.joined(pairs, body.truncate_prompt_tokens, keeps_end=body.truncation_side == "left")
        await self._generations.add_choices(generation, prompts)
        outputs = await self._generations.whole_outputs(generation)
        vectors = [vector_of(output, None, normalizes=False) for output in outputs]
        return generation, [float(head.numbers(vector, is_active=True)[0]) for vector in vectors]

    async def _cosines(
        self, request: Request, body: PairsBody, pairs: Sequence[tuple[str, str]], passed: dict[str, Any]
    ) -> tuple[Generation, list[float]]:
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        cut = {"truncate_prompt_tokens": body.truncate_prompt_tokens, "truncation_side": body.truncation_side}
        wanted = EmbeddingRequest.of({"input": texts, **cut, **passed})
        completion = wanted.completion(self._defaults)
        generation, outputs = await self._completions.outputs(request, completion, 2 * INPUTS)
        found = {
            text: vector_of(output, None, self._defaults.dense, normalizes=True).astype("<f8")
            for text, output in zip(texts, outputs, strict=True)
        }
        return generation, [float(found[left] @ found[right]) for left, right in pairs]

    async def _judged(
        self, request: Request, body: PairsBody, pairs: Sequence[tuple[str, str]], passed: dict[str, Any]
    ) -> tuple[Generation, list[float]]:
        if body.truncate_prompt_tokens is not None:
            reason = "'truncate_prompt_tokens' is not supported: it would cut the template that holds both texts."
            raise ApiError(reason, param="truncate_prompt_tokens", code="unsupported_parameter")
        words = {"max_tokens": 1, "temperature": 0.0, "logprobs": 0, "logprob_token_ids": self._words, "n": 1}
        words["repetition_penalty"] = 1.0  # not the model's own, which processed logprobs would have
        generation = self._generations.begin(request, CompletionRequest.of({"prompt": "", **words, **passed}))
        chat = partial(_judgement, body.instruction)
        prompts = await self._prompts(request, generation).judged(pairs, chat, _BORDER)
        await self._generations.add_choices(generation, prompts)
        outputs = await self._generations.whole_outputs(generation)
        return generation, [self._probability(output) for output in outputs]

    def _prompts(self, request: Request, generation: Generation) -> PairPrompts:
        """Return the maker of prompts for a generation's pairs."""
        body = generation.body
        memory = request.state.memory
        return PairPrompts(
            self._encoder, self._tokenizer, body, generation.card, memory, body.prompt_field, generation.salt
        )

    def _probability(self, output: Output) -> float:
        """Return the probability of yes, of the two words alone: the sigmoid of the difference of their logits."""
        if not output.positions or output.positions[0][1] is None:
            raise ReplicaLost("the replica gave no log-probabilities")
        no, yes = (dict(output.positions[0][1].top)[word] for word in self._words)
        return 1 / (1 + math.exp(min(no - yes, 700.0)))


def _judgement(instruction: str, query: str, document: str) -> ChatCompletionRequest:
    """Return the chat in which a model judges a pair, in the form of Qwen3-Reranker."""
    text = f"<Instruct>: {instruction}\n<Query>: {query}\n{_BORDER}: {document}"
    messages = [{"role": "system", "content": _JUDGE}, {"role": "user", "content": text}]
    return ChatCompletionRequest.of({"messages": messages, "chat_template_kwargs": {"enable_thinking": False}})


def _token_of(word: str, tokenizer: ModelTokenizer) -> int:
    found = tokenizer.encode(word, add_special_tokens=False)
    if len(found) != 1:
        raise ValueError(f"model.pooler_config: classifier_from_token {word!r} is {len(found)} tokens, not one")
    return found[0]


def _usage(generation: Generation) -> dict[str, Any]:
    usage = generation.usage()
    return {"prompt_tokens": usage["prompt_tokens"], "total_tokens": usage["prompt_tokens"]}
