"""Bodies of requests for scores: pairs of texts, as vLLM's /v1/score has them, or a query and its documents."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from crossdock.cluster.api import bounds
from crossdock.cluster.api.body.embedding_body import PooledBody
from crossdock.cluster.api.body.other_fields import RefusedField
from crossdock.cluster.api.errors import wrong

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"  # Qwen3-Reranker's own


class PairsBody(PooledBody):
    """The fields of all requests for scores."""

    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="As in embeddings. Refused where a model judges pairs: a template holds the texts."
    )
    truncation_side: Literal["left", "right"] = Field(
        "right", description="As in embeddings: `right` keeps the beginning of a text."
    )
    instruction: str = Field(
        INSTRUCTION, max_length=bounds.TEMPLATE_CHARS, description="What a model that judges pairs looks for."
    )

    refused_fields: ClassVar[Mapping[str, RefusedField]] = {
        "activation": RefusedField("scores are cosines, or probabilities from 0 to 1", (True,)),
        "use_activation": RefusedField("scores are cosines, or probabilities from 0 to 1", (True,)),
        "max_tokens_per_doc": RefusedField("use 'truncate_prompt_tokens'"),
        "mm_processor_kwargs": RefusedField("scores are of text alone", ({},)),
    }

    def pairs(self) -> list[tuple[str, str]]:
        """Return the pairs of a query and a document. Raises ApiError where they do not fit together."""
        raise NotImplementedError


class ScoreRequest(PairsBody):
    """One text and many, or as many on both sides. `queries` and `documents` are other names of the same."""

    text_1: Any = None
    text_2: Any = None
    queries: Any = None
    documents: Any = None

    def pairs(self) -> list[tuple[str, str]]:
        left = self.text_1 if self.queries is None else self.queries
        right = self.text_2 if self.documents is None else self.documents
        names = ("text_1" if self.queries is None else "queries", "text_2" if self.documents is None else "documents")
        firsts = _texts(left, names[0])
        seconds = _texts(right, names[1])
        if len(firsts) == 1:
            firsts = list(firsts) * len(seconds)
        if len(firsts) != len(seconds):
            reason = f"it has {len(seconds)} texts for {len(firsts)}: give one text, or one for each"
            raise wrong(names[1], reason)
        return list(zip(firsts, seconds, strict=True))


class RerankRequest(PairsBody):
    """The fields of Jina and Cohere that vLLM has."""

    query: str
    documents: list[Any]
    top_n: int = Field(0, ge=0, description="Documents in the answer; 0: all.")
    return_documents: bool = True

    def pairs(self) -> list[tuple[str, str]]:
        return [(self.query, text) for text in _texts(self.documents, "documents")]


def _texts(given: Any, param: str) -> Sequence[str]:
    """Return the texts of a field: a text, a list, or documents such as {"text": …}."""
    listed = given if isinstance(given, list) else [given]
    found = [each["text"] if isinstance(each, dict) and each.keys() == {"text"} else each for each in listed]
    if not found or len(found) > bounds.INPUTS or not all(isinstance(each, str) and each for each in found):
        raise wrong(param, f"it must have 1 to {bounds.INPUTS} texts that are not empty")
    return found
