"""The part that bodies of the Responses and Messages APIs share: both become the body of a chat."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from pydantic import Field

from crossdock.cluster.api.body.bodies import ChatCompletionRequest, Tools
from crossdock.cluster.api.body.generation_body import REQUEST_ID
from crossdock.cluster.api.body.json_body import Body
from crossdock.cluster.api.errors import ApiError, wrong


class ConversationBody(Body):
    """Fields of both APIs, and those that vLLM adds to chats. The chat checks their bounds."""

    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    tools: Tools = Field([], description="Functions alone.")
    service_tier: str | None = Field(None, description="An SLO class, or one of OpenAI's or Anthropic's tiers.")

    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    cache_salt: str = ""
    priority: int = 0
    request_id: str | None = Field(None, pattern=REQUEST_ID)
    chat_template_kwargs: dict[str, Any] = Field({}, description="Variables of the model's chat template.")

    def passed(self) -> dict[str, Any]:
        """Return the given fields that have the same name and meaning in a chat: all of this class but the tools."""
        names = (name for name in ConversationBody.model_fields if name in self.model_fields_set and name != "tools")
        return {name: getattr(self, name) for name in names}


class ConversationChat(ChatCompletionRequest):
    """A chat that another API's body became. Where its limit is beyond the context, the context is the limit."""

    parameter_names: ClassVar[Mapping[str, str]] = {}  # the client's names for fields of the chat
    has_cache_control: bool = False  # its usage counts what it adds to the cache

    @classmethod
    def own_name(cls, field: str) -> str:
        return cls.parameter_names.get(field, field)

    @classmethod
    def renamed(cls, error: ApiError) -> ApiError:
        name = cls.parameter_names.get(error.param or "")
        if name is None or error.param is None:
            return error
        message = str(error).replace(f"'{error.param}'", f"'{name}'")
        return ApiError(
            message, status=error.status, kind=error.kind, param=name, code=error.code, headers=error.headers
        )

    def fitted(self, num_left: int, *, can_bound_reasoning: bool) -> Self:
        """Return the chat within its context and model: clients of these APIs often ask for more."""
        limit = self.token_limit()
        changes = dict[str, Any]()
        if limit is not None and 1 <= num_left < limit:
            changes["max_completion_tokens"] = num_left
        if not can_bound_reasoning:
            changes["thinking_token_budget"] = None
        return self.model_copy(update=changes)


def text_of(value: Any, param: str) -> str:
    """Return a string of the body. Raises ApiError for a value of another type."""
    if not isinstance(value, str):
        raise wrong(param, "it must be a string")
    return value


def object_of(value: Any, param: str) -> Mapping[str, Any]:
    """Return an object of the body. Raises ApiError for a value of another type."""
    if not isinstance(value, dict):
        raise wrong(param, "it must be an object")
    return value


def objects_of(value: Any, param: str) -> Sequence[Mapping[str, Any]]:
    """Return a list of objects of the body. Raises ApiError for a value of another type."""
    if not isinstance(value, list):
        raise wrong(param, "it must be a list")
    return [object_of(each, f"{param}[{i}]") for i, each in enumerate(value)]
