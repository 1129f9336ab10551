"""The body of Anthropic's Messages API, and the chat that it becomes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from crossdock.cluster.api import bounds
from crossdock.cluster.api.body.bodies import Messages
from crossdock.cluster.api.body.conversation_body import (
    ConversationBody,
    ConversationChat,
    object_of,
    objects_of,
    text_of,
)
from crossdock.cluster.api.body.generation_body import Stop
from crossdock.cluster.api.body.other_fields import RefusedField, check_other_fields
from crossdock.cluster.api.body.pictures import Picture
from crossdock.cluster.api.errors import ApiError, wrong

_ROLES = ("user", "assistant", "system")
_PARTS = {  # of fields
    "output_config": ("effort", "format"),
    "thinking": ("budget_tokens", "display", "type"),
    "tool_choice": ("disable_parallel_tool_use", "name", "type"),
}
_MEDIA_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}  # of tools, in Anthropic's words and OpenAI's


class MessagesChat(ConversationChat):
    prompt_field: ClassVar[str] = "messages"
    limit_field: ClassVar[str] = "max_tokens"
    parameter_names: ClassVar[Mapping[str, str]] = {
        "response_format.json_schema.schema": "output_config.format.schema",
        "response_format": "output_config.format",
        "stop": "stop_sequences",
        "thinking_token_budget": "thinking.budget_tokens",
    }


class CountTokensRequest(ConversationBody):
    """The conversation whose tokens are counted."""

    messages: Messages
    system: str | list[dict[str, Any]] | None = Field(None, description="Text, or blocks of text.")
    tool_choice: dict[str, Any] | None = Field(
        None, description="`any` and `tool` force a call, by a grammar. `disable_parallel_tool_use` as in chats."
    )
    thinking: dict[str, Any] | None = Field(
        None,
        description="`enabled` and `disabled` set the template's `enable_thinking`; `budget_tokens` bounds "
        "the reasoning where a token of its own ends that. "
        "With `display: omitted` the answer has no thinking.",
    )
    output_config: dict[str, Any] | None = Field(
        None, description="`format`: a JSON schema. `effort`: the template's variable `reasoning_effort`."
    )
    cache_control: dict[str, Any] | None = Field(
        None,
        description="Here and in blocks and tools, `ephemeral` with a `ttl` of 5m or 1h: `usage` counts what is "
        "added to the cache. Pages are cached without it too.",
    )

    no_effect: ClassVar[Mapping[str, str]] = {
        "context_management": "the conversation is answered as it was sent",
        "diagnostics": "timelines are at /v1/requests",
        "inference_geo": "requests are computed in this cluster",
        "metadata": "nothing is kept about end users",
        "user_profile_id": "nothing is kept about end users",
        "workspace_id": "API keys separate tenants",
    }
    refused_fields: ClassVar[Mapping[str, RefusedField]] = {
        "container": RefusedField("there is no code execution"),
        "mcp_servers": RefusedField("call the tools yourself, and send what they return", ([],)),
        "speed": RefusedField("use 'service_tier'", ("standard",)),
        "thread": RefusedField(
            "messages are not stored; send the whole conversation",
            # Anthropic's tool runners begin with a thread, and go on without one after this error.
            details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
        ),
    }

    def chat(self) -> MessagesChat:
        """Return the chat that this conversation is. Raises ApiError, which names the part at fault."""
        for name, parts in _PARTS.items():
            check_other_fields(getattr(self, name) or {}, parts, f"{name}.", no_effect={}, refused_fields={})
        system = [] if self.system is None else [{"role": "system", "content": _system_texts(self.system)}]
        fields = {
            **self.passed(),
            "messages": [*system, *_chat_messages(self.messages)],
            "tools": [_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools)],
            "chat_template_kwargs": self._template_variables(),
            "has_cache_control": max((_asks_to_cache(*control) for control in self._cache_controls()), default=False),
            **self._choice(),
            **self._reasoning(),
            **self._format(),
            **self._answer(),
        }
        if self.service_tier == "standard_only":
            fields["service_tier"] = "default"
        if self.messages[-1].get("role") == "assistant":
            fields["continue_final_message"] = True
        try:
            return MessagesChat.of(fields)
        except ApiError as error:
            raise MessagesChat.renamed(error) from None

    def _answer(self) -> dict[str, Any]:
        """Return the fields of the chat that bound its answer."""
        return {}

    def _cache_controls(self) -> Iterator[tuple[str, Any]]:
        """Yield every cache_control of the body, with the name of its place."""
        yield "cache_control", self.cache_control
        blocks = [("tools", tool) for tool in self.tools]
        contents = [("system", self.system), *(("messages", message.get("content")) for message in self.messages)]
        blocks += [(name, block) for name, content in contents if isinstance(content, list) for block in content]
        for name, block in blocks:
            if isinstance(block, dict):
                yield f"{name}.cache_control", block.get("cache_control")

    def _template_variables(self) -> dict[str, Any]:
        variables: dict[str, Any] = {}
        kind = None if self.thinking is None else self.thinking.get("type")
        if kind in ("enabled", "disabled"):
            variables["enable_thinking"] = kind == "enabled"
        if self.output_config is not None and self.output_config.get("effort") is not None:
            variables["reasoning_effort"] = text_of(self.output_config["effort"], "output_config.effort")
        return variables | self.chat_template_kwargs

    def _reasoning(self) -> dict[str, Any]:
        """Return the fields of the chat that bound its reasoning, or leave reasoning out of the answer."""
        if self.thinking is None:
            return {}
        kind = self.thinking.get("type")
        budget = self.thinking.get("budget_tokens")
        if kind not in ("enabled", "disabled", "adaptive", "between_tools"):
            raise wrong("thinking.type", "it must be 'enabled', 'disabled', 'adaptive' or 'between_tools'")
        if kind != "enabled" or budget is None:
            budget = None
        elif not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
            raise wrong("thinking.budget_tokens", "it must be a whole number of 1 or more")
        return {"include_reasoning": self.thinking.get("display") != "omitted", "thinking_token_budget": budget}

    def _choice(self) -> dict[str, Any]:
        if self.tool_choice is None:
            return {}
        kind = self.tool_choice.get("type")
        is_single = self.tool_choice.get("disable_parallel_tool_use") is True
        fields: dict[str, Any] = {"parallel_tool_calls": False} if is_single else {}
        if kind == "tool":
            name = text_of(self.tool_choice.get("name"), "tool_choice.name")
            return {**fields, "tool_choice": {"type": "function", "function": {"name": name}}}
        if not isinstance(kind, str) or kind not in _CHOICES:
            raise wrong("tool_choice.type", "it must be 'auto', 'any', 'tool' or 'none'")
        return {**fields, "tool_choice": _CHOICES[kind]}

    def _format(self) -> dict[str, Any]:
        given = None if self.output_config is None else self.output_config.get("format")
        if given is None:
            return {}
        given = object_of(given, "output_config.format")
        if given.get("type") != "json_schema":
            raise wrong("output_config.format.type", "it must be 'json_schema'")
        schema = object_of(given.get("schema"), "output_config.format.schema")
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}}


class MessagesRequest(CountTokensRequest):
    max_tokens: int = Field(ge=1, description="At most what is left of the context.")
    stop_sequences: Annotated[list[Stop], Field(max_length=bounds.STOPS)] = Field([])

    def _answer(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "stop": self.stop_sequences}


def _chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        role = message.get("role")
        where = f"messages[{i}]"
        if role not in _ROLES:
            raise wrong(f"{where}.role", "it must be 'user', 'assistant' or 'system'")
        content = message.get("content")
        if isinstance(content, str):
            result.append({"role": role, "content": content})
        elif role == "assistant":
            result.append(_assistant_message(objects_of(content, f"{where}.content"), f"{where}.content"))
        else:
            result += _input_messages(role, objects_of(content, f"{where}.content"), f"{where}.content")
    if result[-1].get("tool_calls"):
        raise wrong(f"messages[{len(messages) - 1}]", "the conversation cannot end with a call: send its result")
    return result


def _input_messages(role: str, blocks: Sequence[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    """Return a message for the result of each tool, then one with all text and pictures."""
    results = []
    parts = []
    for i, block in enumerate(blocks):
        if block.get("type") == "tool_result" and role == "user":
            content = _contents(block.get("content") or "", f"{where}[{i}].content")
            name = text_of(block.get("tool_use_id"), f"{where}[{i}].tool_use_id")
            results.append({"role": "tool", "tool_call_id": name, "content": content})
        else:
            parts.append(_part(block, f"{where}[{i}]"))
    return results + ([{"role": role, "content": parts}] if parts or not results else [])


def _assistant_message(blocks: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    texts = []
    calls = []
    thoughts = []
    for i, block in enumerate(blocks):
        kind = block.get("type")
        here = f"{where}[{i}]"
        if kind == "thinking":
            thoughts.append(text_of(block.get("thinking"), f"{here}.thinking"))
        elif kind == "tool_use":
            function = {
                "name": text_of(block.get("name"), f"{here}.name"),
                "arguments": object_of(block.get("input"), f"{here}.input"),
            }
            calls.append({"id": text_of(block.get("id"), f"{here}.id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":  # which no one here can read
            texts.append(_text_part(block, here))
    message: dict[str, Any] = {"role": "assistant", "content": texts}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _system_texts(content: Any) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [_text_part(block, f"system[{i}]") for i, block in enumerate(objects_of(content, "system"))]


def _contents(content: Any, where: str) -> str | list[Any]:
    if isinstance(content, str):
        return content
    return [_part(block, f"{where}[{i}]") for i, block in enumerate(objects_of(content, where))]


def _part(block: Mapping[str, Any], where: str) -> dict[str, Any] | Picture:
    """Return a block of text or a picture as chats have them."""
    return _picture(block, where) if block.get("type") == "image" else _text_part(block, where)


def _picture(block: Mapping[str, Any], where: str) -> Picture:
    source = object_of(block.get("source"), f"{where}.source")
    kind = source.get("type")
    if kind == "url":
        return Picture(text_of(source.get("url"), f"{where}.source.url"), where)
    if kind != "base64":
        raise wrong(f"{where}.source.type", "it must be 'base64' or 'url'; files are not stored here")
    media_type = text_of(source.get("media_type"), f"{where}.source.media_type")
    if media_type not in _MEDIA_TYPES:
        raise wrong(f"{where}.source.media_type", f"it must be one of {', '.join(_MEDIA_TYPES)}")
    return Picture(f"data:{media_type};base64,{text_of(source.get('data'), f'{where}.source.data')}", where)


def _text_part(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    if block.get("type") != "text":
        kind = str(block.get("type"))[:100]
        if kind in ("video", "video_url"):
            raise wrong(where, "videos are taken by /v1/chat/completions alone, as parts of the type 'video_url'")
        raise wrong(where, f"a block of type {kind!r} is not accepted here, only text; pictures, in messages of users")
    return {"type": "text", "text": text_of(block.get("text"), f"{where}.text")}


def _asks_to_cache(name: str, value: object) -> bool:
    """Return whether there is a cache_control at a named place. Raises ApiError for a wrong one."""
    if value is None:
        return False
    fields = object_of(value, name)
    ttl = "5m" if fields.get("ttl") is None else fields["ttl"]
    if fields.get("type") != "ephemeral" or ttl not in ("5m", "1h"):
        raise wrong(name, "its type must be 'ephemeral', and its ttl '5m' or '1h'")
    return True


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a tool in OpenAI's form. Raises ApiError for a tool that Anthropic's servers would run."""
    if tool.get("type") not in (None, "custom"):
        reason = f"tools of type {str(tool['type'])[:100]!r} are not supported, only functions that the client runs"
        raise wrong(f"{where}.type", reason, "unsupported_value")
    function: dict[str, Any] = {
        "name": text_of(tool.get("name"), f"{where}.name"),
        "parameters": object_of(tool.get("input_schema"), f"{where}.input_schema"),
    }
    if tool.get("description") is not None:
        function["description"] = text_of(tool["description"], f"{where}.description")
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}
