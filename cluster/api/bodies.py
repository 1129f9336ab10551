"""OpenAI's API as data: what requests may say, what they mean to the engine, and how answers are written down."""

import json
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from crossdock.cluster.api.errors import ApiError, to_json
from crossdock.cluster.api.tokenizer import ModelTokenizer
from crossdock.workers.schedule.request import Grammar, SamplingParams, TokenLogprobs

MAX_CHOICES = 1024  # prompts times n, of one request
MAX_MESSAGES = 4096  # of a chat: templates are interpreted, message by message, on the event loop
_LOWEST_LOGPROB = -9999.0  # JSON has no infinities; vLLM's number


# -- requests ----------------------------------------------------------------------------------------------------------


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


_Stop = Annotated[str, Field(min_length=1, max_length=4096)]
_TokenId = Annotated[int, Field(ge=0)]
_Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class Body(BaseModel):
    """What every body has in common. Unknown fields are ignored and null means "not given", as OpenAI has it."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)

    model: str | None = None

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Raises ApiError, naming the first field at fault."""
        try:
            data = from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(f"The body is not valid JSON: {error}", code="invalid_json") from None
        if not isinstance(data, dict):
            raise ApiError("The body must be a JSON object.", code="invalid_json")
        try:
            return cls.model_validate({name: value for name, value in data.items() if value is not None})
        except ValidationError as error:
            raise refusal_of(error) from None


def refusal_of(error: ValidationError) -> ApiError:
    """It names the first field at fault."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = ""
    for step in first["loc"]:
        param += f"[{step}]" if isinstance(step, int) else f".{step}" if param else step
    message = first["msg"].removeprefix("Value error, ")
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    if first["type"] == "missing":
        return ApiError(f"Missing required parameter: '{param}'.", param=param, code=code)
    return ApiError(f"Invalid value for '{param}': {message}.", param=param, code=code)


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    include_usage: bool = False


class GenerationBody(Body):
    """The fields that completions and chats share: OpenAI's, then those vLLM adds."""

    n: int = Field(1, ge=1, le=128)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = {}
    seed: _Int64 | None = None
    stop: Annotated[list[_Stop], BeforeValidator(_one_or_many), Field(max_length=64)] = []
    max_tokens: int | None = Field(None, ge=0)
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    service_tier: str | None = None  # an SLO class, or a tier of OpenAI's; see cluster/api/tiers.py

    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    stop_token_ids: list[_TokenId] = []
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True  # accepted; fast tokenizers put no spaces there either way
    allowed_token_ids: Annotated[list[_TokenId], Field(min_length=1)] | None = None
    prompt_logprobs: int | None = Field(None, ge=0)
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    cache_salt: str = ""
    return_token_ids: bool = False
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None

    limit_field: ClassVar[str] = "max_tokens"
    logprobs_field: ClassVar[str] = "logprobs"

    def num_logprobs(self) -> int | None:
        raise NotImplementedError

    def sampling(
        self, max_tokens: int, *, defaults: Mapping[str, Any], vocab_size: int, max_logprobs: int
    ) -> SamplingParams:
        """All but the seed. Raises ApiError where fields contradict each other or the model."""

        def given(name: str, otherwise: float) -> Any:
            value = getattr(self, name)
            return value if value is not None else defaults.get(name, otherwise)

        if self.min_tokens > max_tokens:
            raise ApiError(
                f"'min_tokens' ({self.min_tokens}) must not be more than '{self.limit_field}' ({max_tokens}).",
                param="min_tokens",
                code="invalid_value",
            )
        for name, count in ((self.logprobs_field, self.num_logprobs()), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and count > max_logprobs:
                raise ApiError(
                    f"Invalid value for '{name}': at most {max_logprobs} are given, not {count}.",
                    param=name,
                    code="invalid_value",
                )
        bias: list[tuple[int, float]] = []
        for key, value in self.logit_bias.items():
            if not (key.isascii() and key.isdigit()):
                raise ApiError(
                    f"Invalid key in 'logit_bias': {key[:40]!r} is not a token id.",
                    param="logit_bias",
                    code="invalid_value",
                )
            bias.append((int(key), value))
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
            prompt_logprobs=self.prompt_logprobs,
            stop_token_ids=tuple(self.stop_token_ids),
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            grammar=self.grammar(),
        )

    def grammar(self) -> Grammar | None:
        """The one constraint on the output, whichever of the ways to say it was used."""
        asked = [
            (param, grammar)
            for param, grammar in (
                ("response_format", _response_format(self.response_format)),
                ("guided_json", _json_grammar(self.guided_json, "guided_json")),
                ("guided_regex", None if self.guided_regex is None else Grammar("regex", self.guided_regex)),
                ("guided_choice", _choice_grammar(self.guided_choice, "guided_choice")),
                ("guided_grammar", None if self.guided_grammar is None else Grammar("lark", self.guided_grammar)),
                *(("structured_outputs", grammar) for grammar in _structured_outputs(self.structured_outputs)),
            )
            if grammar is not None
        ]
        if len(asked) > 1:
            names = " and ".join(f"'{param}'" for param, _ in asked)
            raise ApiError(f"Only one constraint on the output can hold, not {names}.", param=asked[1][0])
        return asked[0][1] if asked else None


class CompletionRequest(GenerationBody):
    prompt: Any
    best_of: int | None = Field(None, ge=1)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0)
    suffix: str | None = None
    add_special_tokens: bool = True

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """The prompts, whichever of the four ways to say them was used."""
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
    messages: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0)
    tools: list[dict[str, Any]] = []
    tool_choice: Any = None
    add_special_tokens: bool = False  # the template writes them
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}

    limit_field: ClassVar[str] = "max_completion_tokens"
    logprobs_field: ClassVar[str] = "top_logprobs"

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def template_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the template is told of."""
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
    """Either `prompt` or `messages`."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    tools: list[dict[str, Any]] = []
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}


class DetokenizeRequest(Body):
    tokens: list[_TokenId]


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise ApiError(
            f"Invalid value for '{param}': this model has no token {wrong}, only 0 to {vocab_size - 1}.",
            param=param,
            code="invalid_value",
        )


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: text content, and the arguments of past tool calls as objects."""
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _template_message(message: Mapping[str, Any], param: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ApiError(f"'{param}.role' must be a string.", param=f"{param}.role", code="invalid_value")
    content = message.get("content")
    calls = message.get("tool_calls")
    if content is None:
        if role != "assistant":
            raise ApiError(f"'{param}.content' is missing.", param=f"{param}.content", code="invalid_value")
        content = ""
    if isinstance(content, list):
        content = "\n".join(_part_text(part, f"{param}.content[{i}]") for i, part in enumerate(content))
    elif not isinstance(content, str):
        raise ApiError(
            f"'{param}.content' must be a string or a list of parts.", param=f"{param}.content", code="invalid_value"
        )
    result = {**message, "content": content}
    if calls is not None:
        result["tool_calls"] = _template_calls(calls, f"{param}.tool_calls")
    return result


def _part_text(part: Any, param: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") in ("text", "input_text", "output_text"):
        text = part.get("text")
        if isinstance(text, str):
            return text
        raise ApiError(f"'{param}.text' must be a string.", param=f"{param}.text", code="invalid_value")
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise ApiError(f"'{param}' is of type {kind!r}; this model takes text only.", param=param, code="invalid_value")


def _template_calls(calls: Any, param: str) -> list[dict[str, Any]]:
    result = []
    if not isinstance(calls, list):
        raise ApiError(f"'{param}' must be a list.", param=param, code="invalid_value")
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise ApiError(f"'{param}[{i}].function' must be an object.", param=f"{param}[{i}]", code="invalid_value")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments else {}
            except ValueError:
                where = f"{param}[{i}].function.arguments"
                raise ApiError(f"'{where}' is not valid JSON.", param=where, code="invalid_value") from None
        result.append({**call, "function": {**function, "arguments": arguments}})
    return result


def _response_format(wanted: Mapping[str, Any] | None) -> Grammar | None:
    if wanted is None:
        return None
    kind = wanted.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_object")
    if kind == "json_schema":
        holder = wanted.get("json_schema")
        schema = holder.get("schema") if isinstance(holder, dict) else None
        if not isinstance(schema, dict):
            where = "response_format.json_schema.schema"
            raise ApiError(f"Missing required parameter: '{where}'.", param=where, code="missing_required_parameter")
        return Grammar("json_schema", json.dumps(schema))
    raise ApiError(
        "Invalid value for 'response_format.type': it must be 'text', 'json_object' or 'json_schema'.",
        param="response_format.type",
        code="invalid_value",
    )


def _json_grammar(schema: str | Mapping[str, Any] | bool | None, param: str) -> Grammar | None:
    if schema is None:
        return None
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError:
            raise ApiError(f"'{param}' is not valid JSON.", param=param, code="invalid_value") from None
    if not isinstance(schema, dict | bool):
        raise ApiError(f"'{param}' must be a JSON schema.", param=param, code="invalid_value")
    return Grammar("json_schema", json.dumps(schema))


def _choice_grammar(choices: Any, param: str) -> Grammar | None:
    if choices is None:
        return None
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise ApiError(f"'{param}' must be a list of strings, none empty.", param=param, code="invalid_value")
    return Grammar("choice", json.dumps(choices))


def _structured_outputs(wanted: Mapping[str, Any] | None) -> list[Grammar]:
    """vLLM's `structured_outputs`: one of json, regex, choice, grammar, json_object."""
    given = {name: value for name, value in (wanted or {}).items() if value is not None and value is not False}
    for name in ("regex", "grammar"):
        if name in given and not isinstance(given[name], str):
            where = f"structured_outputs.{name}"
            raise ApiError(f"'{where}' must be a string.", param=where, code="invalid_value")
    grammars = (
        _json_grammar(given.get("json"), "structured_outputs.json"),
        Grammar("regex", given["regex"]) if "regex" in given else None,
        _choice_grammar(given.get("choice"), "structured_outputs.choice"),
        Grammar("lark", given["grammar"]) if "grammar" in given else None,
        Grammar("json_object") if given.get("json_object") else None,
    )
    return [grammar for grammar in grammars if grammar is not None]


# -- answers -----------------------------------------------------------------------------------------------------------


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def completion_logprobs(
    text: ModelTokenizer, positions: Sequence[tuple[int, TokenLogprobs | None]], offsets: Sequence[int]
) -> dict[str, Any]:
    """The older shape. `positions` are (token id, its log-probabilities); a text's first token has none."""
    result: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": list(offsets)}
    for token_id, position in positions:
        token = token_name(text, token_id)
        result["tokens"].append(token)
        if position is None:
            result["token_logprobs"].append(None)
            result["top_logprobs"].append(None)
            continue
        result["token_logprobs"].append(_number(position.logprob))
        top = {token_name(text, other): _number(logprob) for other, logprob in position.top}
        top.setdefault(token, _number(position.logprob))
        result["top_logprobs"].append(top)
    return result


def token_name(text: ModelTokenizer, token_id: int) -> str:
    """A token as text; one that is no whole text, as OpenAI's completions write it: `bytes:\\xe2\\x82`."""
    raw = text.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(text: ModelTokenizer, positions: Sequence[TokenLogprobs], num_top: int) -> dict[str, Any]:
    content = []
    for position in positions:
        entry = _chat_token(text, position.token_id, position.logprob)
        ranked = sorted({**dict(position.top), position.token_id: position.logprob}.items(), key=lambda item: -item[1])
        entry["top_logprobs"] = [_chat_token(text, token_id, logprob) for token_id, logprob in ranked[:num_top]]
        content.append(entry)
    return {"content": content, "refusal": None}


def _chat_token(text: ModelTokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = text.token_bytes(token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": _number(logprob), "bytes": list(raw)}


def prompt_logprobs(text: ModelTokenizer, positions: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """vLLM's shape: one object a position, from token id to log-probability, rank and text."""
    result: list[dict[str, Any] | None] = []
    for position in positions:
        if position is None:
            result.append(None)
            continue
        ranked = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(position.top, 1)}
        ranked[position.token_id] = (position.logprob, position.rank)
        result.append(
            {
                str(token_id): {
                    "logprob": _number(logprob),
                    "rank": rank,
                    "decoded_token": text.token_bytes(token_id).decode("utf-8", "replace"),
                }
                for token_id, (logprob, rank) in ranked.items()
            }
        )
    return result


def _number(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)


class Chunks:
    """Server-sent events of one streamed answer. What all of them share is written down once.

    A token costs one event, so the common one (text and nothing else) is put together from strings.
    """

    def __init__(self, head: Mapping[str, Any], *, is_chat: bool, include_usage: bool) -> None:
        self._is_chat = is_chat
        self._prefix = "data: " + to_json(dict(head)).decode()[:-1] + ',"choices":['
        self._suffix = '],"usage":null}\n\n' if include_usage else "]}\n\n"
        self._before = '{"index":%d,"delta":{"content":' if is_chat else '{"index":%d,"text":'
        after = '},"logprobs":null,"finish_reason":null}' if is_chat else ',"logprobs":null,"finish_reason":null}'
        self._after = after + self._suffix
        self._befores: dict[int, str] = {}

    def text(self, index: int, text: str) -> bytes:
        before = self._befores.get(index)
        if before is None:
            before = self._befores[index] = self._prefix + self._before % index
        return (before + encode_basestring(text) + self._after).encode()

    def choice(self, choice: Mapping[str, Any]) -> bytes:
        return (self._prefix + to_json(choice).decode() + self._suffix).encode()

    def usage(self, numbers: Mapping[str, Any]) -> bytes:
        return (self._prefix + '],"usage":' + to_json(numbers).decode() + "}\n\n").encode()


DONE = b"data: [DONE]\n\n"


def error_event(error: ApiError) -> bytes:
    return b"data: " + error.body() + b"\n\n"
