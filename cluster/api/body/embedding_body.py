"""Bodies of requests for vectors and labels of texts, and the completions without output that they become."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from crossdock.cluster.api import bounds
from crossdock.cluster.api.body.bodies import CompletionRequest
from crossdock.cluster.api.body.classifier_head import ClassifierHead
from crossdock.cluster.api.body.generation_body import REQUEST_ID
from crossdock.cluster.api.body.json_body import Body
from crossdock.cluster.api.body.other_fields import RefusedField
from crossdock.cluster.api.body.pooler_config import EmbeddingDefaults, Pooling
from crossdock.cluster.api.errors import ApiError
from crossdock.workers.schedule.request.submission import SamplingParams


class PooledCompletion(CompletionRequest):
    """Texts whose vectors are wanted, as prompts of completions that have no output."""

    pooling: Pooling | Literal["labels"]

    prompt_field: ClassVar[str] = "input"

    def sampling(
        self, max_tokens: int, *, defaults: Mapping[str, Any], vocab_size: int, max_logprobs: int, **others: Any
    ) -> SamplingParams:
        """Return parameters for the one token that the engine makes, which no client sees."""
        plain = super().sampling(max_tokens, defaults={}, vocab_size=vocab_size, max_logprobs=max_logprobs, **others)
        return replace(plain, temperature=0.0, pooling=self.pooling)


class PooledBody(Body):
    """The fields of all requests for numbers about texts."""

    service_tier: str | None = Field(None, description="An SLO class, or one of OpenAI's tiers.")
    cache_salt: str = Field("", max_length=bounds.CACHE_SALT_CHARS)
    priority: int = Field(0, ge=-(2**63), lt=2**63, description="As in completions.")
    request_id: str | None = Field(None, pattern=REQUEST_ID, description="The id of the answer, as in completions.")

    no_effect: ClassVar[Mapping[str, str]] = {"user": "nothing is kept about end users"}

    def passed(self) -> dict[str, Any]:
        """Return the fields of all these requests, which have the same meaning in completions."""
        return {name: getattr(self, name) for name in PooledBody.model_fields}


class InputBody(PooledBody):
    """The fields of requests with texts, or with their token ids, in `input`."""

    input: Any = Field(description="A text, token ids, or a list of either.")
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        description="Tokens of each text that are kept; -1: as many as fit. BOS, EOS and the like count, and stay.",
    )
    truncation_side: Literal["left", "right"] = Field(
        "right", description="Where a text that is too long is cut: `right` keeps its beginning, `left` its end."
    )

    def pooled(self, pooling: Pooling | Literal["labels"], texts: Any) -> PooledCompletion:
        """Return the completions that give the pooled hidden states of each of `texts`, a prompt of completions."""
        passed = {name: getattr(self, name) for name in InputBody.model_fields if name != "input"}
        return PooledCompletion(prompt=texts, max_tokens=0, pooling=pooling, n=1, **passed)


class EmbeddingRequest(InputBody):
    """OpenAI's fields, those vLLM adds, and `pooling`."""

    encoding_format: Literal["float", "base64"] = Field(
        "float", description="`base64`: of numbers in float32, in little-endian order."
    )
    dimensions: int | None = Field(
        None, ge=1, description="The first numbers of each vector, where the model was made for that."
    )
    use_activation: bool | None = Field(None, description="true: vectors have a length of 1. The server's default.")
    normalize: bool | None = Field(None, description="Older vLLM's name of `use_activation`.")
    pooling: Pooling | None = Field(
        None,
        description="`last`: the last token's hidden state; `mean`: the mean of all; `cls`: the first token's, of text "
        "encoders. The server's default.",
    )
    prompt_name: str | None = Field(
        None,
        description="A name in `prompts` of the model's config_sentence_transformers.json, whose text stands before "
        "each text. Default: `default_prompt_name` there, else no such text. Not with token ids.",
    )

    refused_fields: ClassVar[Mapping[str, RefusedField]] = {
        "embed_dtype": RefusedField("base64 has numbers in float32", ("float32",)),
        "endianness": RefusedField("base64 has numbers in little-endian order", ("native", "little")),
        "messages": RefusedField("send the token ids that /tokenize makes of them as 'input'"),
        "mm_processor_kwargs": RefusedField("vectors are made of text alone", ({},)),
        "padding": RefusedField("texts are computed at their own lengths", ("do_not_pad",)),
    }

    def completion(self, defaults: EmbeddingDefaults) -> PooledCompletion:
        """Return the completions that give the vectors. Raises ApiError for vectors that the model does not have."""
        if self.pooling is None and defaults.refusal:
            names = "'last' and 'mean'" if defaults.encoder is None else "'cls', 'mean' and 'last'"
            reason = f"{defaults.refusal}; or name one of {names}"
            raise ApiError(f"'pooling' must be given: {reason}.", param="pooling", code="missing_required_parameter")
        if self.dimensions is not None:
            defaults.check_size(self.dimensions)
        pooling = self.pooling or defaults.pooling
        defaults.check_pooling(pooling)
        return self.pooled(pooling, defaults.prompts.added(self.input, self.prompt_name))

    def normalizes(self, defaults: EmbeddingDefaults) -> bool:
        """Return whether vectors get a length of 1. Raises ApiError where two fields contradict each other."""
        given = {value for value in (self.use_activation, self.normalize) if value is not None}
        if len(given) > 1:
            raise ApiError(
                "'normalize' must equal 'use_activation': both say whether vectors get a length of 1.",
                param="normalize",
                code="invalid_value",
            )
        return given.pop() if given else defaults.normalizes


class ClassifyRequest(InputBody):
    """The fields of vLLM's /classify."""

    use_activation: bool | None = Field(
        None, description="false: logits. true: softmax or sigmoid, as the model's config.json says. Default: true."
    )

    refused_fields: ClassVar[Mapping[str, RefusedField]] = {
        "activation": RefusedField("use 'use_activation', its newer name", (True,)),
        "messages": RefusedField("send the token ids that /tokenize makes of them as 'input'"),
        "mm_processor_kwargs": RefusedField("texts alone are classified", ({},)),
    }

    def completion(self, head: ClassifierHead) -> PooledCompletion:
        """Return the completions that give what a head reads of each text."""
        return self.pooled(head.pooling, self.input)
