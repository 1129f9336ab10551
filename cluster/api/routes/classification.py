"""POST /classify: the labels of texts, by a decoder with a head for them. Bodies and answers are vLLM's."""

from typing import Any

import numpy as np
from fastapi import Request, Response
from numpy.typing import NDArray

from crossdock.cluster.api.body.classifier_head import ClassifierHead
from crossdock.cluster.api.body.embedding_body import ClassifyRequest
from crossdock.cluster.api.body.pooler_config import EmbeddingDefaults
from crossdock.cluster.api.bounds import INPUTS
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.http.http_json import long_json_answer
from crossdock.cluster.api.routes.completions import Completions
from crossdock.cluster.api.routes.embeddings import vector_of
from crossdock.cluster.api.text.choices import Output


class Classification:
    def __init__(self, completions: Completions, defaults: EmbeddingDefaults) -> None:
        self._completions, self._head = completions, defaults.head

    async def create(self, request: Request, body: ClassifyRequest) -> Response:
        head, completion = self.head(), body.completion()
        generation, outputs = await self._completions.outputs(request, completion, INPUTS)
        data = [_shown(head, output.index, self.numbers(output, body)) for output in outputs]
        usage = generation.usage()
        del usage["completion_tokens"]
        return await long_json_answer({**generation.head("classify", "list"), "data": data, "usage": usage})

    def head(self) -> ClassifierHead:
        """Return the model's head. Raises ApiError where it has none."""
        if self._head is None:
            reason = "This model has no classification head: use /v1/score, or a model whose class is"
            raise ApiError(f"{reason} …ForSequenceClassification.", param="model", code="unsupported_value")
        return self._head

    def numbers(self, output: Output, body: ClassifyRequest) -> NDArray[np.float64]:
        """Return the number of each label for a text's output."""
        return self.head().numbers(
            vector_of(output, None, normalizes=False), is_active=body.use_activation is not False
        )


def _shown(head: ClassifierHead, index: int, numbers: NDArray[np.float64]) -> dict[str, Any]:
    label = head.labels[int(numbers.argmax())] if head.labels else None
    return {"index": index, "label": label, "probs": numbers.tolist(), "num_classes": len(numbers)}
