"""POST /v1/embeddings: the vectors of texts, pooled from the hidden states of the model that also generates."""

import base64
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
from fastapi import Request, Response
from numpy.typing import NDArray

from crossdock.cluster.api.body.classifier_head import ClassifierHead
from crossdock.cluster.api.body.dense_layer import DenseLayer
from crossdock.cluster.api.body.embedding_body import ClassifyRequest, EmbeddingRequest
from crossdock.cluster.api.body.pooler_config import EmbeddingDefaults
from crossdock.cluster.api.bounds import INPUTS
from crossdock.cluster.api.errors import ApiError, to_json, wrong
from crossdock.cluster.api.http.http_json import long_json_answer
from crossdock.cluster.api.routes.completions import Completions
from crossdock.cluster.api.routes.generation import Generation
from crossdock.cluster.api.slices import slices
from crossdock.cluster.api.text.choices import Output
from crossdock.cluster.dispatch.dispatcher import ReplicaLost

_VECTORS_AT_ONCE = 2  # written between two looks at other requests; a vector of 4,096 numbers takes about 3 ms


class Embeddings:
    def __init__(self, completions: Completions, defaults: EmbeddingDefaults) -> None:
        self._completions = completions
        self._defaults = defaults

    async def create(self, request: Request, body: EmbeddingRequest) -> Response:
        completion = body.completion(self._defaults)
        normalizes = body.normalizes(self._defaults)
        generation, outputs = await self._completions.outputs(request, completion, INPUTS)
        parts = [part async for part in self._parts(body, generation, outputs, normalizes=normalizes)]
        return Response(b"".join(parts), media_type="application/json")

    async def _parts(
        self, body: EmbeddingRequest, generation: Generation, outputs: list[Output], *, normalizes: bool
    ) -> AsyncGenerator[bytes, None]:
        """Yield the answer as JSON, in parts. Other requests are served meanwhile."""
        usage = generation.usage()
        del usage["completion_tokens"]
        yield to_json({**generation.head("embd", "list"), "usage": usage})[:-1] + b',"data":['
        async for some in slices(outputs, _VECTORS_AT_ONCE):
            for output in some:
                vector = vector_of(output, body.dimensions, self._defaults.dense, normalizes=normalizes)
                one = {"object": "embedding", "index": output.index, "embedding": _encoded(vector, body)}
                yield b"," * (output.index > 0) + to_json(one)
        yield b"]}"


def _encoded(vector: np.ndarray[Any, np.dtype[np.float32]], body: EmbeddingRequest) -> Any:
    """Return a vector in the encoding that the body asks for."""
    return base64.b64encode(vector.tobytes()).decode() if body.encoding_format == "base64" else vector.tolist()


def vector_of(
    output: Output, dimensions: int | None, dense: Sequence[DenseLayer] = (), *, normalizes: bool
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the vector of an output: through the model's dense layers, cut, and then made as long as 1.

    Raises:
        ApiError: the vector has fewer numbers than the body asks for.
        ReplicaLost: there is no vector, as from a replica of an older version.
    """
    if output.embedding is None:
        raise ReplicaLost("the replica gave no vector")
    pooled = np.frombuffer(output.embedding, "<f4")
    for layer in dense:
        pooled = layer(pooled)
    vector = pooled.astype(np.float64)
    if dimensions is not None:
        if dimensions > len(vector):
            raise wrong("dimensions", f"this model's vectors have {len(vector)} numbers")
        vector = vector[:dimensions]
    if normalizes:
        vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
    return vector.astype("<f4")


class Classification:
    def __init__(self, completions: Completions, defaults: EmbeddingDefaults) -> None:
        self._completions = completions
        self._head = defaults.head

    async def create(self, request: Request, body: ClassifyRequest) -> Response:
        head = self.head()
        completion = body.completion(head)
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
