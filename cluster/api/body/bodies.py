"""Bodies of requests: the fields that each endpoint accepts, and their meaning to the engine."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from crossdock.cluster.api import bounds
from crossdock.cluster.api.body import constraints
from crossdock.cluster.api.body.generation_body import ALL_LOGPROBS, GenerationBody, TokenId
from crossdock.cluster.api.body.json_body import Body
from crossdock.cluster.api.body.pictures import VideoReading
from crossdock.cluster.api.body.tool_calls import ForcedCall, allowed_tools, check_functions, forced_call
from crossdock.cluster.api.errors import ApiError, to_json, wrong
from crossdock.workers.schedule.request.submission import Grammar

Tools = Annotated[list[dict[str, Any]], Field(max_length=bounds.TOOLS)]
_Template = Annotated[str, Field(max_length=bounds.TEMPLATE_CHARS)]
Messages = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=bounds.MESSAGES)]
_Documents = Annotated[list[dict[str, str]], Field(fail_fast=True, max_length=bounds.DOCUMENTS)]
_MediaReading = dict[Literal["video"], VideoReading]
_Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class CompletionRequest(GenerationBody):
    prompt: Any
    best_of: int | None = Field(None, ge=1, description="Must equal `n`: outputs are not ranked.")
    echo: bool = False
    logprobs: int | None = Field(None, ge=ALL_LOGPROBS, description="-1: the whole vocabulary.")
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
            both = (self.prompt_logprobs or 0, self.logprobs)
            return ALL_LOGPROBS if ALL_LOGPROBS in both else max(both)
        return self.prompt_logprobs

    def check_supported(self) -> None:
        """Raise ApiError for OpenAI's fields that this server accepts with one value only."""
        if self.best_of is not None and self.best_of != self.n:
            reason = f"'best_of' ({self.best_of}) must equal 'n' ({self.n}): outputs are not ranked."
            raise ApiError(reason, param="best_of", code="unsupported_value")

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts: `prompt` may have any of four forms. Raises ApiError for any other form."""
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
        reason = "it must be a string, a list of token ids, or a list of either, and not empty"
        raise wrong(self.prompt_field, reason)


class ChatCompletionRequest(GenerationBody):
    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=ALL_LOGPROBS, description="-1: the whole vocabulary.")
    tools: Tools = Field(
        [], description="Shown to the model by the template. Its calls are read where the model's family is known."
    )
    tool_choice: Any = Field(
        None,
        description="`required` or a named function forces calls, by a grammar; `allowed_tools` hides the others.",
    )
    parallel_tool_calls: bool = Field(True, description="false: only the first call is in the answer.")
    reasoning_effort: _Effort | None = Field(
        None,
        description="Given to the template, with `enable_thinking`; a warning where the template reads neither.",
    )
    verbosity: Literal["low", "medium", "high"] | None = Field(
        None, description="Given to the template; a warning where the template does not read it."
    )
    include_reasoning: bool = Field(True, description="false: the reasoning is left out of the answer.")
    thinking_token_budget: int | None = Field(
        None,
        ge=-1,
        description="Tokens of reasoning, before a grammar ends it; -1: any number. A warning where no token ends it.",
    )
    documents: _Documents = Field(
        [], description="Given to the template; refused where the template does not read them."
    )
    echo: bool = Field(
        False, description="In a chat that ends with an assistant's message, the content begins with its text."
    )
    media_io_kwargs: _MediaReading = Field(
        {}, description="How videos are read, instead of as the server's --media-io-kwargs say: num_frames and fps."
    )
    add_special_tokens: bool = False  # the template writes them
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: _Template | None = None
    chat_template_kwargs: dict[str, Any] = Field({})

    prompt_field: ClassVar[str] = "messages"
    limit_field: ClassVar[str] = "max_completion_tokens"
    logprobs_field: ClassVar[str] = "top_logprobs"
    default_max_tokens: ClassVar[int | None] = None

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Self:
        """Validate the fields of a body, and leave out the tools that `tool_choice` does not allow."""
        body = super().of(data)
        choice = data.get("tool_choice")
        if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
            return body
        check_functions(body.tools)
        tools, mode = allowed_tools(body.tools, choice.get("allowed_tools"), "tool_choice.allowed_tools")
        return body.model_copy(update={"tools": tools, "tool_choice": mode})

    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def num_top(self) -> int | None:
        """Return how many of the likeliest tokens the answer lists at each position; None: all that there are."""
        lists_all = self.logprob_token_ids is not None or self.top_logprobs == ALL_LOGPROBS
        return None if lists_all else self.top_logprobs or 0

    def check_logprobs(self) -> None:
        """Raise ApiError for `top_logprobs` without `logprobs`."""
        if self.top_logprobs and not self.logprobs:
            raise ApiError("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs", code="invalid_value")

    @classmethod
    def own_name(cls, field: str) -> str:
        """Return the name that a field of the chat has in the body that the client has sent."""
        return field

    @classmethod
    def renamed(cls, error: ApiError) -> ApiError:
        """Return an error about the chat in the names of the body that the client has sent."""
        return error

    def fitted(self, num_left: int, *, can_bound_reasoning: bool) -> Self:
        """Return the chat as the context and the model serve it.

        `num_left`: tokens that the prompt leaves for the output.
        `can_bound_reasoning`: a grammar can end the reasoning.
        """
        return self if can_bound_reasoning else self.model_copy(update={"thinking_token_budget": None})

    def template_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools that the template shows to the model. Raises ApiError for a malformed tool or choice."""
        check_functions(self.tools)
        return self.tools if self.tools and self.tool_choice != "none" else None

    def forced_call(self) -> ForcedCall | None:
        """Return the tool call that the output must be; None where any text will do. The tools have been checked."""
        return forced_call(self.tools, self.tool_choice)

    def _constraints(self) -> list[tuple[str, Grammar]]:
        """Return the constraints. A forced call has no content, which is all that `response_format` is about."""
        given = super()._constraints()
        call = self.forced_call()
        if call is None:
            return given
        return [(param, grammar) for param, grammar in given if param != "response_format"] + [
            ("tools", call.grammar())
        ]

    def content_format(self) -> Grammar | None:
        """Return the grammar of the content alone, where the answer may be calls as well; None without one."""
        return constraints.response_format(self.response_format)

    def param_of(self, field: str) -> str | None:
        """Do the same as for any body. A grammar that no field gives is that of the tools, or of the reasoning."""
        found = super().param_of(field)
        if found is None and field == "grammar":
            return "tools" if self.tools else "thinking_token_budget"
        return found


class TokenizeRequest(Body):
    """A text (`prompt`) or a chat (`messages`)."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    tools: Tools = Field([])
    documents: _Documents = Field([])
    media_io_kwargs: _MediaReading = Field({})
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: _Template | None = None
    chat_template_kwargs: dict[str, Any] = Field({})

    def template_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools that the template shows to the model."""
        return self.tools or None


class DetokenizeRequest(Body):
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class LoadAdapterRequest(Body):
    """The body of /v1/load_lora_adapter, as vLLM has it."""

    lora_name: str = Field("", max_length=bounds.ITEM_NAME_CHARS)
    lora_path: str = Field("", max_length=bounds.ITEM_NAME_CHARS)
    load_inplace: bool = False  # the name may mean another adapter already
    base_model_name: str | None = Field(None, max_length=bounds.ITEM_NAME_CHARS)  # where several models take adapters


class UnloadAdapterRequest(Body):
    lora_name: str = Field("", max_length=bounds.ITEM_NAME_CHARS)
    lora_int_id: int | None = None  # vLLM's own number, which it ignores too


def check_tools(tools: Any, param: str = "tools") -> None:
    """Raise ApiError for tools that are too large together: the template writes all of them. `param`: what has them."""
    num_chars = len(to_json(tools)) if tools else 0
    if num_chars > bounds.TOOLS_CHARS:
        raise wrong(param, f"as JSON they have {num_chars} bytes, more than the {bounds.TOOLS_CHARS} that are accepted")
