"""Bodies of requests: the fields that each endpoint accepts, and their meaning to the engine."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from crossdock.cluster.api import bounds, constraints
from crossdock.cluster.api.errors import ApiError, shown, to_json
from crossdock.cluster.api.stop_strings import StopTable
from crossdock.workers.schedule.request import Grammar, SamplingParams

_LONGEST_TOKEN_ID = 10  # digits


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _biases(value: Any) -> Any:
    """Count before each entry is validated: every wrong one would cost an error of its own."""
    if isinstance(value, dict) and len(value) > bounds.BIASES:
        raise ValueError(f"{len(value)} entries are more than the {bounds.BIASES} that are accepted")
    return value


_Stop = Annotated[str, Field(min_length=1, max_length=bounds.STOP_CHARS)]
_TokenId = Annotated[int, Field(ge=0)]
_Bias = dict[str, Annotated[float, Field(ge=-100, le=100)]]
_Tools = Annotated[list[dict[str, Any]], Field(max_length=bounds.TOOLS)]
_Template = Annotated[str, Field(max_length=bounds.TEMPLATE_CHARS)]
_Messages = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=bounds.MESSAGES)]
_Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class Body(BaseModel):
    """The common part of all bodies. As in OpenAI's API, unknown fields are ignored and null means "not given"."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)

    model: str | None = None

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Parse and validate a body. Raises ApiError, which names the first field at fault."""
        try:
            data = from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(f"The body is not valid JSON: {error}", code="invalid_json") from None
        if not isinstance(data, dict):
            raise ApiError("The body must be a JSON object.", code="invalid_json")
        if len(data) > bounds.BODY_FIELDS:
            reason = f"The body has {len(data)} fields, more than the {bounds.BODY_FIELDS} that are accepted."
            raise ApiError(reason, code="invalid_json")
        given = {name: data[name] for name in cls.model_fields if data.get(name) is not None}
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            raise invalid_field(first["loc"], first["type"], first["msg"]) from None


def invalid_field(loc: Sequence[int | str], kind: str, message: str) -> ApiError:
    """Return the client's error for one of pydantic's: `loc`, `type` and `msg` of an entry of `errors()`."""
    param = ""
    for step in loc:
        param += f"[{step}]" if isinstance(step, int) else f".{step}" if param else step
    param = shown(param)
    if kind == "missing":
        return ApiError(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    reason = f"Invalid value for '{param}': {message.removeprefix('Value error, ')}."
    return ApiError(reason, param=param, code="invalid_value")


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    include_usage: bool = False


class GenerationBody(Body):
    """The fields that completions and chats share: first OpenAI's, then those vLLM adds."""

    n: int = Field(1, ge=1, le=128)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[_Bias, BeforeValidator(_biases), Field(max_length=bounds.BIASES)] = {}
    seed: _Int64 | None = None
    stop: Annotated[list[_Stop], Field(max_length=bounds.STOPS), BeforeValidator(_one_or_many)] = []
    max_tokens: int | None = Field(None, ge=0)
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    service_tier: str | None = None  # an SLO class, or one of OpenAI's tiers; see cluster/api/tiers.py

    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    stop_token_ids: Annotated[list[_TokenId], Field(fail_fast=True, max_length=bounds.STOP_TOKENS)] = []
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True  # accepted; fast tokenizers put no spaces there either way
    allowed_token_ids: (
        Annotated[list[_TokenId], Field(fail_fast=True, min_length=1, max_length=bounds.ALLOWED_TOKENS)] | None
    ) = None
    prompt_logprobs: int | None = Field(None, ge=0)
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    cache_salt: str = Field("", max_length=bounds.CACHE_SALT_CHARS)
    return_token_ids: bool = False
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
        """Return how many alternatives beside each output token the client asks for; None: no log-probabilities."""
        raise NotImplementedError

    def num_prompt_logprobs(self) -> int | None:
        """Return how many alternatives beside each prompt token the engine has to give; None: no log-probabilities."""
        return self.prompt_logprobs

    @property
    def is_answer_plain(self) -> bool:
        """The answer has text, but nothing for each token: it is short, and its events are alike."""
        return self.num_logprobs() is None and self.num_prompt_logprobs() is None and not self.return_token_ids

    @property
    def includes_usage(self) -> bool:
        """A streamed answer ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def with_usage(self) -> Self:
        """Return the body with usage at the end of its stream; the body itself if it asks for no stream."""
        if not self.stream:
            return self
        options = (self.stream_options or StreamOptions()).model_copy(update={"include_usage": True})
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
        self, max_tokens: int, *, defaults: Mapping[str, Any], vocab_size: int, max_logprobs: int
    ) -> SamplingParams:
        """Return everything but the seed. Raises ApiError if fields contradict each other or the model."""

        def given(name: str, otherwise: float) -> Any:
            value = getattr(self, name)
            return value if value is not None else defaults.get(name, otherwise)

        self._check_counts(max_tokens, max_logprobs)
        bias = self._bias()
        check_token_ids([token for token, _ in bias], vocab_size, "logit_bias")
        check_token_ids(self.stop_token_ids, vocab_size, "stop_token_ids")
        check_token_ids(self.allowed_token_ids or (), vocab_size, "allowed_token_ids")
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
            logprobs=self.num_logprobs(),
            prompt_logprobs=self.num_prompt_logprobs(),
            stop_token_ids=tuple(self.stop_token_ids),
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            grammar=self.grammar(),
        )

    def _check_counts(self, max_tokens: int, max_logprobs: int) -> None:
        if self.min_tokens > max_tokens:
            raise ApiError(
                f"'min_tokens' ({self.min_tokens}) must not be more than '{self.limit_field}' ({max_tokens}).",
                param="min_tokens",
                code="invalid_value",
            )
        for name, count in ((self.logprobs_field, self.num_logprobs()), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and count > max_logprobs:
                reason = f"Invalid value for '{name}': {count} is more than this server's maximum of {max_logprobs}."
                raise ApiError(reason, param=name, code="invalid_value")

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
        num_chars = sum(map(len, self.stop))
        if num_chars > bounds.ALL_STOPS_CHARS:
            reason = f"{num_chars} characters in all are more than the {bounds.ALL_STOPS_CHARS} that are accepted"
            raise ApiError(f"Invalid value for 'stop': {reason}.", param="stop", code="invalid_value")
        return StopTable(self.stop) if self.stop else None

    def grammar(self) -> Grammar | None:
        """Return the constraint on the output; None without one. Raises ApiError where there are several."""
        given = self._constraints()
        if len(given) > 1:
            names = " and ".join(f"'{param}'" for param, _ in given)
            raise ApiError(f"Only one constraint on the output can hold, not {names}.", param=given[1][0])
        return given[0][1] if given else None

    def _constraints(self) -> list[tuple[str, Grammar]]:
        """Return the constraints on the output, each with the field that gives it."""
        possible = (
            ("response_format", constraints.response_format(self.response_format)),
            ("guided_json", constraints.json_schema(self.guided_json, "guided_json")),
            ("guided_regex", constraints.from_text("regex", self.guided_regex, "guided_regex")),
            ("guided_choice", constraints.choice(self.guided_choice, "guided_choice")),
            ("guided_grammar", constraints.from_text("lark", self.guided_grammar, "guided_grammar")),
            *(("structured_outputs", grammar) for grammar in constraints.structured_outputs(self.structured_outputs)),
        )
        return [(param, grammar) for param, grammar in possible if grammar is not None]

    def param_of(self, field: str) -> str | None:
        """Return the client's name for a field of `Submission` or `SamplingParams`; None where the server sets it."""
        if field == "grammar":
            return next((param for param, _ in self._constraints()), None)
        return field if field == "prompt" or field in type(self).model_fields else None


class CompletionRequest(GenerationBody):
    prompt: Any
    best_of: int | None = Field(None, ge=1)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0)
    suffix: str | None = None
    add_special_tokens: bool = True

    prompt_field: ClassVar[str] = "prompt"
    limit_field: ClassVar[str] = "max_tokens"
    logprobs_field: ClassVar[str] = "logprobs"
    default_max_tokens: ClassVar[int | None] = 16  # OpenAI's

    def token_limit(self) -> int | None:
        return self.max_tokens

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def num_prompt_logprobs(self) -> int | None:
        """Count the echoed prompt too: its tokens have log-probabilities like the output's."""
        if self.echo and self.logprobs is not None:
            return max(self.prompt_logprobs or 0, self.logprobs)
        return self.prompt_logprobs

    def check_supported(self) -> None:
        """Raise ApiError for OpenAI's fields that this server accepts with one value only."""
        if self.suffix:
            raise ApiError("'suffix' is not supported.", param="suffix", code="unsupported_parameter")
        if self.best_of is not None and self.best_of != self.n:
            reason = f"'best_of' ({self.best_of}) must equal 'n' ({self.n}): outputs are not ranked."
            raise ApiError(reason, param="best_of", code="unsupported_value")

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, whichever of the four accepted forms `prompt` has. Raises ApiError for any other."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt, list) and prompt:
            kinds = {type(item) for item in prompt}
            if kinds == {int}:
                return [prompt]
            if kinds == {str}:
                return prompt
            if kinds == {list} and all(item and {type(token) for token in item} == {int} for item in prompt):
                return prompt
        raise ApiError(
            "Invalid value for 'prompt': it must be a string, a list of token ids, or a list of either, and not empty.",
            param="prompt",
            code="invalid_value",
        )


class ChatCompletionRequest(GenerationBody):
    messages: _Messages
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0)
    tools: _Tools = []
    tool_choice: Any = None
    add_special_tokens: bool = False  # the template writes them
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: _Template | None = None
    chat_template_kwargs: dict[str, Any] = {}

    prompt_field: ClassVar[str] = "messages"
    limit_field: ClassVar[str] = "max_completion_tokens"
    logprobs_field: ClassVar[str] = "top_logprobs"
    default_max_tokens: ClassVar[int | None] = None

    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check_logprobs(self) -> None:
        """Raise ApiError for `top_logprobs` without `logprobs`."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs", code="invalid_value")

    def template_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools that the template shows to the model. Raises ApiError for a malformed tool or choice."""
        for i, tool in enumerate(self.tools):
            function = tool.get("function")
            if tool.get("type") != "function" or not isinstance(function, dict) or not function.get("name"):
                raise ApiError(
                    'A tool must be {"type": "function", "function": {"name": …}}.',
                    param=f"tools[{i}]",
                    code="invalid_value",
                )
        choice = self.tool_choice
        if choice not in (None, "auto", "none"):
            known = choice == "required" or isinstance(choice, dict)
            reason = "a tool call cannot be forced here; only 'auto' and 'none' are supported"
            raise ApiError(
                f"Invalid value for 'tool_choice': {reason if known else 'it must be a string or an object'}.",
                param="tool_choice",
                code="unsupported_value" if known else "invalid_value",
            )
        return self.tools if self.tools and choice != "none" else None


class TokenizeRequest(Body):
    """A text (`prompt`) or a chat (`messages`)."""

    prompt: str | None = None
    messages: _Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    tools: _Tools = []
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: _Template | None = None
    chat_template_kwargs: dict[str, Any] = {}


class DetokenizeRequest(Body):
    tokens: Annotated[list[_TokenId], Field(fail_fast=True)]


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise ApiError for tools that are too large together: the template writes all of them."""
    num_chars = len(to_json(tools)) if tools else 0
    if num_chars > bounds.TOOLS_CHARS:
        reason = f"as JSON they have {num_chars} bytes, more than the {bounds.TOOLS_CHARS} that are accepted"
        raise ApiError(f"Invalid value for 'tools': {reason}.", param="tools", code="invalid_value")


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise ApiError for ids that the model does not have."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise ApiError(
            f"Invalid value for '{param}': this model has no token {wrong}, only 0 to {vocab_size - 1}.",
            param=param,
            code="invalid_value",
        )
