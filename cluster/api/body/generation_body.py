"""The fields that completions and chats share, and their meaning to the engine."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from crossdock.cluster.api import bounds
from crossdock.cluster.api.body import constraints
from crossdock.cluster.api.body.json_body import Body
from crossdock.cluster.api.body.other_fields import check_other_fields
from crossdock.cluster.api.body.stop_strings import StopTable
from crossdock.cluster.api.errors import ApiError, check_count, wrong
from crossdock.workers.schedule.request.submission import Grammar, SamplingParams

_LONGEST_TOKEN_ID = 10  # digits
# Fields of the engine that have another name in a body, or none: the server makes the ids of submissions.
_CLIENTS_NAMES = {"priority_in_class": "priority", "request_id": ""}
ALL_LOGPROBS = -1  # asks for the log-probabilities of the whole vocabulary
REQUEST_ID = r"^[\x21-\x7e]{1,128}$"


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _biases(value: Any) -> Any:
    """Count entries before any is validated: every wrong entry would cost an error of its own."""
    if isinstance(value, dict) and len(value) > bounds.BIASES:
        raise ValueError(f"{len(value)} entries are more than the {bounds.BIASES} that are accepted")
    return value


def _stream_options(value: Any) -> Any:
    """Refuse unknown options by name; null means "not given"."""
    if not isinstance(value, dict):
        return value
    check_other_fields(value, StreamOptions.model_fields.keys(), "stream_options.")
    return {name: option for name, option in value.items() if option is not None}


Stop = Annotated[str, Field(min_length=1, max_length=bounds.STOP_CHARS)]
_BadWord = Annotated[str, Field(min_length=1, max_length=bounds.BAD_WORD_CHARS)]
TokenId = Annotated[int, Field(ge=0)]
_Bias = dict[str, Annotated[float, Field(ge=-100, le=100)]]
_Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
CacheKey = Annotated[str, Field(max_length=bounds.CACHE_SALT_CHARS)]
CacheRetention = Literal["in_memory", "in-memory", "24h"]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(Body):
    """The fields that completions and chats share: first OpenAI's, then those vLLM adds."""

    n: int = Field(1, ge=1, le=128)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[_Bias, BeforeValidator(_biases), Field(max_length=bounds.BIASES)] = Field({})
    seed: _Int64 | None = None
    stop: Annotated[list[Stop], Field(max_length=bounds.STOPS), BeforeValidator(_one_or_many)] = Field([])
    max_tokens: int | None = Field(None, ge=0)
    stream: bool = False
    stream_options: Annotated[StreamOptions | None, BeforeValidator(_stream_options)] = None
    response_format: dict[str, Any] | None = None
    service_tier: str | None = Field(None, description="An SLO class, or one of OpenAI's tiers.")

    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=bounds.STOP_TOKENS)] = Field([])
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: (
        Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=bounds.ALLOWED_TOKENS)] | None
    ) = None
    bad_words: Annotated[list[_BadWord], Field(fail_fast=True, max_length=bounds.BAD_WORDS)] = Field(
        [], description="Banned at the beginning and within the text. A word may still be spelt with other tokens."
    )
    prompt_logprobs: int | None = Field(
        None, ge=ALL_LOGPROBS, description="-1: the whole vocabulary. Not with `stream`."
    )
    logprob_token_ids: (
        Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=bounds.LOGPROB_TOKENS)] | None
    ) = Field(None, description="Log-probabilities of these tokens instead of the likeliest. Needs `logprobs`.")
    return_tokens_as_token_ids: bool = Field(
        False, description="Tokens in `logprobs` are written as `token_id:7`; `bytes` are still those of the token."
    )
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        description="Tokens of the prompt that are kept; -1: as many as fit beside the output. BOS and the like count, "
        "and stay.",
    )
    truncation_side: Literal["left", "right"] = Field(
        "left", description="Where a prompt that is too long is cut: `left` keeps its end, `right` its beginning."
    )
    cache_salt: str = Field("", max_length=bounds.CACHE_SALT_CHARS)
    prompt_cache_key: CacheKey | None = Field(None, description="Changes nothing: every prompt is cached.")
    prompt_cache_retention: CacheRetention | None = Field(
        None, description="Changes nothing: pages stay until others need the room."
    )
    priority: _Int64 = Field(
        0,
        description="Lower goes first among the prompts of one SLO class, and is preempted last. With API keys, 0 or "
        "more. Not with `--prefill-order fcfs`.",
    )
    request_id: str | None = Field(
        None, pattern=REQUEST_ID, description="The id of the answer, unless the header `X-Request-Id` gives one."
    )
    return_token_ids: bool = Field(
        False, description="Streams have `prompt_token_ids` once, in the first event of a chat or of a choice."
    )
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True, max_length=bounds.GUIDED_CHOICES)] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None

    prompt_field: ClassVar[str]
    limit_field: ClassVar[str]
    logprobs_field: ClassVar[str]
    default_max_tokens: ClassVar[int | None]  # None: the output may fill the context

    def token_limit(self) -> int | None:
        """Return how many tokens the output may have; None where the client gave no limit."""
        raise NotImplementedError

    def num_logprobs(self) -> int | None:
        """Return how many alternatives beside each output token the client asks for.

        None: no log-probabilities; `ALL_LOGPROBS`: the whole vocabulary.
        """
        raise NotImplementedError

    def num_prompt_logprobs(self) -> int | None:
        """Return how many alternatives beside each prompt token the engine has to give, as `num_logprobs` does."""
        return self.prompt_logprobs

    @property
    def is_answer_plain(self) -> bool:
        """The answer has text, but nothing for each token: it is short, and its events are alike."""
        return self.num_logprobs() is None and self.num_prompt_logprobs() is None and not self.return_token_ids

    @property
    def includes_usage(self) -> bool:
        """A streamed answer ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def repeats_usage(self) -> bool:
        """Every event of a stream has the usage of its choice so far. As in vLLM, this needs `include_usage`."""
        options = self.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats

    def with_usage(self) -> Self:
        """Return the body with usage in each event of its stream; the body itself if it asks for no stream.

        Gateways that bill by tokens read it there, also of streams that are cut.
        """
        if not self.stream:
            return self
        asked = {"include_usage": True, "continuous_usage_stats": True}
        options = (self.stream_options or StreamOptions()).model_copy(update=asked)
        return self.model_copy(update={"stream_options": options})

    def check_streaming(self) -> None:
        """Raise ApiError if fields contradict `stream`."""
        if self.stream_options is not None and not self.stream:
            reason = "'stream_options' needs 'stream' to be true."
            raise ApiError(reason, param="stream_options", code="invalid_value")
        if self.prompt_logprobs is not None and self.stream:
            reason = "'prompt_logprobs' cannot be streamed."
            raise ApiError(reason, param="prompt_logprobs", code="invalid_value")

    def sampling(
        self, max_tokens: int, *, defaults: Mapping[str, Any], vocab_size: int, max_logprobs: int, **others: Any
    ) -> SamplingParams:
        """Return how tokens are chosen. Raises ApiError if fields contradict each other or the model.

        `others`: fields of `SamplingParams` that this body does not decide, such as the seed; or not alone, as the
        grammar of a chat.
        """

        def given(name: str, otherwise: float) -> Any:
            value = getattr(self, name)
            return value if value is not None else defaults.get(name, otherwise)

        most = vocab_size if max_logprobs == ALL_LOGPROBS else max_logprobs
        self._check_counts(max_tokens, vocab_size, most)
        bias = self._bias()
        check_token_ids([token for token, _ in bias], vocab_size, "logit_bias")
        check_token_ids(self.stop_token_ids, vocab_size, "stop_token_ids")
        check_token_ids(self.allowed_token_ids or (), vocab_size, "allowed_token_ids")
        check_token_ids(self.logprob_token_ids or (), vocab_size, "logprob_token_ids")
        if "grammar" not in others:
            others["grammar"] = self.grammar()
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=float(given("temperature", 1.0)),
            top_k=max(0, given("top_k", 0)),
            top_p=float(given("top_p", 1.0)),
            min_p=float(given("min_p", 0.0)),
            repetition_penalty=float(given("repetition_penalty", 1.0)),
            presence_penalty=float(given("presence_penalty", 0.0)),
            frequency_penalty=float(given("frequency_penalty", 0.0)),
            logit_bias=tuple(bias),
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            logprobs=_counted(self.num_logprobs(), vocab_size),
            logprob_token_ids=tuple(self.logprob_token_ids or ()),
            prompt_logprobs=_counted(self.num_prompt_logprobs(), vocab_size),
            stop_token_ids=tuple(self.stop_token_ids),
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            **others,
        )

    def _check_counts(self, max_tokens: int, vocab_size: int, max_logprobs: int) -> None:
        if self.min_tokens > max_tokens:
            raise ApiError(
                f"'min_tokens' ({self.min_tokens}) must not be more than '{self.limit_field}' ({max_tokens}).",
                param="min_tokens",
                code="invalid_value",
            )
        for name, count in ((self.logprobs_field, self.num_logprobs()), ("prompt_logprobs", self.prompt_logprobs)):
            num = _counted(count, vocab_size)
            if num is not None and num > max_logprobs:
                asked = f"{count} asks for all {num}, which" if count == ALL_LOGPROBS else f"{num}"
                reason = f"{asked} is more than this server's maximum of {max_logprobs} (--max-logprobs)"
                raise wrong(name, reason)
        if self.logprob_token_ids is not None and self.num_logprobs() is None:
            reason = "'logprob_token_ids' needs 'logprobs'."
            raise ApiError(reason, param="logprob_token_ids", code="invalid_value")

    def count_logprobs(self, sampling: SamplingParams, num_prompt_tokens: int, num_output_tokens: int) -> int:
        """Return how many alternatives the answer lists at positions that have many. Raises ApiError for too many.

        `num_…`: tokens of all prompts or outputs.
        """
        listed = len(sampling.logprob_token_ids)
        named = sampling.logprobs or 0
        asked = {
            "logprob_token_ids" if listed > named else self.logprobs_field: (max(listed, named), num_output_tokens),
            "prompt_logprobs": (sampling.prompt_logprobs or 0, num_prompt_tokens),
        }
        total = 0
        for name, (count, num_tokens) in asked.items():
            num = count * num_tokens * self.n if count > bounds.FEW_LOGPROBS else 0
            if num > bounds.MANY_LOGPROBS:
                reason = f"{num} log-probabilities in all are more than the {bounds.MANY_LOGPROBS} that are accepted"
                hint = "ask for fewer, also in 'logprob_token_ids', or for fewer tokens"
                raise wrong(name, f"{reason}; {hint}")
            total += num
        return total

    def _bias(self) -> list[tuple[int, float]]:
        """Return token ids and their biases. A key with leading zeros is refused: it could name a token twice."""
        bias: list[tuple[int, float]] = []
        for key, value in self.logit_bias.items():
            is_number = key.isascii() and key.isdigit() and len(key) <= _LONGEST_TOKEN_ID
            if not is_number or str(int(key)) != key:
                reason = f"Invalid key in 'logit_bias': {key[:40]!r} is not a token id, such as '7'."
                raise ApiError(reason, param="logit_bias", code="invalid_value")
            bias.append((int(key), value))
        return bias

    def stop_table(self) -> StopTable | None:
        """Return the stop strings for all outputs; None without any. Raises ApiError if they are too long together."""
        check_count("stop", sum(map(len, self.stop)), bounds.ALL_STOPS_CHARS, "characters in all")
        return StopTable(self.stop) if self.stop else None

    def grammar(self) -> Grammar | None:
        """Return the constraint on the output; None without one. Raises ApiError where there are several."""
        given = self._constraints()
        if len(given) > 1:
            names = " and ".join(f"'{param}'" for param, _ in given)
            reason = f"Only one constraint on the output can hold, not {names}."
            raise ApiError(reason, param=given[1][0], code="invalid_value")
        return given[0][1] if given else None

    def _constraints(self) -> list[tuple[str, Grammar]]:
        """Return the constraints on the output, each with the field that gives it."""
        possible = (
            ("response_format", constraints.response_format(self.response_format)),
            ("guided_json", constraints.json_schema(self.guided_json, "guided_json")),
            ("guided_regex", constraints.from_text("regex", self.guided_regex, "guided_regex")),
            ("guided_choice", constraints.choice(self.guided_choice, "guided_choice")),
            ("guided_grammar", constraints.lark(self.guided_grammar, "guided_grammar")),
            *constraints.structured_outputs(self.structured_outputs),
        )
        return [(param, grammar) for param, grammar in possible if grammar is not None]

    def param_of(self, field: str) -> str | None:
        """Return the client's name for a field of `Submission` or `SamplingParams`; None where the server sets it."""
        if field == "grammar":
            return next((param for param, _ in self._constraints()), None)
        field = _CLIENTS_NAMES.get(field, field)
        if field == "prompt":
            return self.prompt_field
        return field if field in type(self).model_fields else None


def _counted(count: int | None, vocab_size: int) -> int | None:
    return vocab_size if count == ALL_LOGPROBS else count


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise ApiError for ids that the model does not have."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        absent = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise wrong(param, f"this model has no token {absent}, only 0 to {vocab_size - 1}")
