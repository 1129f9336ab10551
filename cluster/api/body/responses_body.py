"""The body of OpenAI's Responses API, and the chat that it becomes."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from crossdock.cluster.api import bounds
from crossdock.cluster.api.body.bodies import Tools, check_tools
from crossdock.cluster.api.body.conversation_body import (
    ConversationBody,
    ConversationChat,
    object_of,
    objects_of,
    text_of,
)
from crossdock.cluster.api.body.generation_body import CacheKey, CacheRetention
from crossdock.cluster.api.body.other_fields import NO_EFFECT, RefusedField, check_other_fields
from crossdock.cluster.api.body.response_items import Item, chat_messages, check_size
from crossdock.cluster.api.body.tool_calls import allowed_tools
from crossdock.cluster.api.errors import ApiError, wrong

LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (
    LOGPROBS,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)
_Key = Annotated[str, Field(max_length=bounds.METADATA_KEY_CHARS)]
_Label = Annotated[str, Field(max_length=512)]


class ResponsesChat(ConversationChat):
    prompt_field: ClassVar[str] = "input"
    limit_field: ClassVar[str] = "max_output_tokens"
    parameter_names: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
        "response_format.json_schema.schema": "text.format.schema",
        "verbosity": "text.verbosity",
    }


class ResponsesRequest(ConversationBody):
    input: Any = Field(
        description="Text, or items: messages, reasoning, function calls and their outputs, and references to items "
        "of stored responses."
    )
    tools: Tools = Field([], description="Functions, alone or in namespaces. No two may have the same name then.")
    instructions: str | None = Field(None, max_length=bounds.CONVERSATION_CHARS)
    previous_response_id: str | None = Field(
        None, max_length=128, description="A stored response: the conversation goes on after it."
    )
    store: bool = Field(True, description="Kept in memory for a while, within bounds. See security.md.")
    background: bool = Field(
        False,
        description="Answered at once and computed meanwhile; with `stream`, also after its client has left. "
        "Needs `store`.",
    )
    max_output_tokens: int | None = Field(None, ge=1, description="At most what is left of the context.")
    max_tool_calls: int | None = Field(None, ge=1, description="Of built-in tools, which do not exist here.")
    metadata: dict[_Key, _Label] = Field({}, max_length=16)
    parallel_tool_calls: bool = True
    tool_choice: Any = Field(None, description="As in chats; `allowed_tools` leaves the other tools out.")
    reasoning: dict[str, Any] | None = Field(
        None, description="`effort` as in chats. Reasoning is shown as the model writes it, so there is no summary."
    )
    text: dict[str, Any] | None = Field(
        None, description="`format`: text, json_object or json_schema. `verbosity` as in chats."
    )
    include: Annotated[list[str], Field(max_length=len(_INCLUDABLE))] = Field(
        [], description=f"`{LOGPROBS}` adds log-probabilities; other known names add nothing."
    )
    top_logprobs: int | None = Field(None, ge=0, description=f"Needs `{LOGPROBS}` in `include`.")
    truncation: Literal["disabled"] | None = None
    stream_options: dict[str, Any] | None = None
    stop: str | list[str] | None = None
    prompt_cache_key: CacheKey | None = Field(None, description="As in chats.")
    prompt_cache_retention: CacheRetention | None = Field(None, description="As in chats.")

    no_effect: ClassVar[Mapping[str, str]] = {
        "client_metadata": "nothing is kept about clients",
        **{name: NO_EFFECT[name] for name in ("prompt_cache_options", "safety_identifier", "user")},
        "stream_options.include_obfuscation": NO_EFFECT["stream_options.include_obfuscation"],
    }
    refused_fields: ClassVar[Mapping[str, RefusedField]] = {
        "access_programs": RefusedField("there are no access programs"),
        "context_management": RefusedField("send what the model should still know as 'input'", ([],)),
        "conversation": RefusedField("use 'previous_response_id'"),
        "image": RefusedField("send pictures as parts of the type 'input_image'"),
        "moderation": RefusedField("there is no moderation model; call one yourself"),
        "prompt": RefusedField("templates are not stored; send 'instructions' and 'input'"),
    }

    def chat(self, items: Sequence[Item], num_own: int) -> ResponsesChat:
        """Return the chat of a whole conversation, from its first item on. Raises ApiError, which names the field.

        `num_own`: how many of the last items are this request's own.
        """
        self._check()
        check_size(items)
        tools, choice = self._tools_and_choice()
        has_logprobs = LOGPROBS in self.include
        fields = {
            **self.passed(),
            "messages": chat_messages(self.instructions, items, num_own),
            "max_completion_tokens": self.max_output_tokens,
            "prompt_cache_key": self.prompt_cache_key,
            "prompt_cache_retention": self.prompt_cache_retention,
            "tools": tools,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self._format(),
            "logprobs": has_logprobs,
            "top_logprobs": self.top_logprobs if has_logprobs else None,
            "stop": self.stop,
            "verbosity": None if self.text is None else self.text.get("verbosity"),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.get("effort"),
        }
        try:
            return ResponsesChat.of(fields)
        except ApiError as error:
            raise ResponsesChat.renamed(error) from None

    def namespaces(self) -> dict[str, str]:
        """Return the namespace of each function that is in one, by the function's name. The tools have been checked."""
        groups = [tool for tool in self.tools if tool.get("type") == "namespace"]
        return {function["name"]: group["name"] for group in groups for function in group["tools"]}

    def _check(self) -> None:
        """Raise ApiError for parts of fields that are unknown, or that contradict each other."""
        known = {
            "reasoning": ("effort", "summary", "generate_summary"),
            "text": ("format", "verbosity"),
            "stream_options": (),
        }
        for name, parts in known.items():
            data = getattr(self, name) or {}
            check_other_fields(data, parts, f"{name}.", no_effect=self.no_effect, refused_fields=self.refused_fields)
        for i, name in enumerate(self.include):
            if name not in _INCLUDABLE:
                raise wrong(f"include[{i}]", f"it must be one of {', '.join(_INCLUDABLE)}")
        for name in ("tools", "tool_choice", "text"):  # the answer repeats them
            check_tools(getattr(self, name), name)
        if self.top_logprobs and LOGPROBS not in self.include:
            raise wrong("top_logprobs", f"it needs {LOGPROBS!r} in 'include'")
        if self.background and not self.store:
            raise wrong("background", "it needs 'store': the answer is fetched later")

    def _format(self) -> dict[str, Any] | None:
        """Return `text.format` as the `response_format` of a chat."""
        given = None if self.text is None else self.text.get("format")
        if given is None:
            return None
        given = object_of(given, "text.format")
        if given.get("type") not in ("text", "json_object", "json_schema"):
            raise wrong("text.format.type", "it must be 'text', 'json_object' or 'json_schema'")
        if given["type"] != "json_schema":
            return {"type": given["type"]}
        check_other_fields(given, ("type", "name", "description", "schema", "strict"), "text.format.")
        schema = object_of(given.get("schema"), "text.format.schema")
        return {"type": "json_schema", "json_schema": {"name": given.get("name"), "schema": schema}}

    def _tools_and_choice(self) -> tuple[Sequence[Mapping[str, Any]], Any]:
        """Return the tools and the choice among them in the form of chats."""
        tools = [function for i, tool in enumerate(self.tools) for function in _functions(tool, f"tools[{i}]")]
        names = [tool["function"]["name"] for tool in tools]
        if self.namespaces() and len({*names}) < len(names):
            raise wrong("tools", "two functions have the same name, which namespaces do not tell apart here")
        choice = self.tool_choice
        if not isinstance(choice, dict):
            return tools, choice
        if choice.get("type") == "function":
            return tools, {"type": "function", "function": {"name": choice.get("name")}}
        if choice.get("type") == "allowed_tools":
            return allowed_tools(tools, choice, "tool_choice")
        reason = "it must be 'auto', 'none', 'required', or an object of type 'function' or 'allowed_tools'"
        raise wrong("tool_choice", reason, "unsupported_value")


def _functions(tool: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Return a tool's functions in the form of chats: itself, or those of a namespace, with its description."""
    if tool.get("type") != "namespace":
        return [_tool(tool, where)]
    text_of(tool.get("name"), f"{where}.name")
    about = text_of(tool.get("description") or "", f"{where}.description")
    functions = [
        _tool(each, f"{where}.tools[{i}]") for i, each in enumerate(objects_of(tool.get("tools"), f"{where}.tools"))
    ]
    for each in functions:
        own = each["function"].get("description", "")
        each["function"]["description"] = f"{about}\n{own}".strip()
    return functions


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a tool in the form of chats. Raises ApiError for a tool that OpenAI's servers would run."""
    if tool.get("type") != "function":
        reason = f"tools of type {str(tool.get('type'))[:100]!r} are not supported, only functions that the client runs"
        raise wrong(f"{where}.type", reason, "unsupported_value")
    function = {name: tool[name] for name in ("description", "parameters", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {"name": text_of(tool.get("name"), f"{where}.name"), **function}}
