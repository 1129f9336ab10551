"""How tokens are chosen, in vLLM's class. A value is checked as in a request to the server, when the object is made."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, model_validator
from typing_extensions import TypedDict  # pydantic needs its form before Python 3.12

from crossdock.cluster.api.body.bodies import CompletionRequest
from crossdock.cluster.api.body.other_fields import REFUSED, RefusedField, check_other_fields
from crossdock.cluster.api.errors import ApiError

_REFUSED_HERE: Mapping[str, RefusedField] = {
    **REFUSED,
    "extra_args": RefusedField("there are no extensions that would read it", ({},)),
    "output_kind": RefusedField("outputs are complete"),
    "guided_decoding": RefusedField("use 'structured_outputs'"),
    "skip_reading_prefix_cache": RefusedField("use 'cache_salt': prompts with different ones share nothing", (False,)),
    "flat_logprobs": RefusedField("log-probabilities are a dictionary for each token", (False,)),
}


class OfflineCompletion(CompletionRequest):
    """A prompt of `LLM`, as the completion that a server would get. Without a limit, outputs may fill the context."""

    default_max_tokens: ClassVar[int | None] = None


class StructuredOutputsParams(TypedDict, total=False):
    """A constraint on the output; exactly one must be given."""

    json: str | dict[str, Any]
    regex: str
    choice: list[str]
    grammar: str
    json_object: bool


class PromptParams(BaseModel):
    """vLLM's fields with vLLM's defaults, as `crossdock.SamplingParams`. `max_tokens` None: up to the context's end."""

    model_config = ConfigDict(frozen=True)

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    priority: int = 0
    cache_salt: str = ""

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        try:
            check_other_fields(data, cls.model_fields, refused_fields=_REFUSED_HERE)
        except ApiError as error:
            raise ValueError(str(error)) from None
        return data

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        try:
            self.completion([])
        except ApiError as error:
            raise ValueError(str(error)) from None
        return self

    def completion(self, prompt: str | list[int], **others: Any) -> OfflineCompletion:
        """Return the body with which a client would send the prompt. Raises ApiError for a wrong value.

        `others`: fields of the body that win.
        """
        fields = self.model_dump(exclude={"logit_bias"})
        if self.logit_bias:
            fields["logit_bias"] = {str(token_id): bias for token_id, bias in self.logit_bias.items()}
        return OfflineCompletion.of({**fields, **others, "prompt": prompt})
