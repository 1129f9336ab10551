"""Messages of a chat as chat templates expect them: content as text, arguments of past tool calls as objects."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from crossdock.cluster.api.bounds import MESSAGE_PARTS, ROLE_CHARS
from crossdock.cluster.api.errors import ApiError


def template_messages(messages: Sequence[Mapping[str, Any]], *, keeps_parts: bool = False) -> list[dict[str, Any]]:
    """Return the messages for a template. Raises ApiError, which names the part of the message at fault.

    `keeps_parts`: content is a list of parts, {"type": "text", "text": …}, for templates that were written for these.
    """
    lists = (message.get(name) for message in messages for name in ("content", "tool_calls"))
    num_parts = sum(len(parts) for parts in lists if isinstance(parts, list))
    if num_parts > MESSAGE_PARTS:
        reason = f"{num_parts} parts and tool calls are more than the {MESSAGE_PARTS} that are accepted"
        raise ApiError(f"Invalid value for 'messages': {reason}.", param="messages", code="invalid_value")
    return [_template_message(message, f"messages[{i}]", keeps_parts) for i, message in enumerate(messages)]


def last_assistant_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the last message if it is the assistant's, else an empty one."""
    last = messages[-1]
    if last.get("role") != "assistant":
        return ""
    text: str = _template_message(last, f"messages[{len(messages) - 1}]", keeps_parts=False)["content"]
    return text


def _template_message(message: Mapping[str, Any], param: str, keeps_parts: bool) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ApiError(f"'{param}.role' must be a string.", param=f"{param}.role", code="invalid_value")
    if len(role) > ROLE_CHARS:
        reason = f"{len(role)} characters are more than the {ROLE_CHARS} that are accepted"
        raise ApiError(f"Invalid value for '{param}.role': {reason}.", param=f"{param}.role", code="invalid_value")
    content = message.get("content")
    calls = message.get("tool_calls")
    if content is None:
        if role != "assistant":
            raise ApiError(f"'{param}.content' is missing.", param=f"{param}.content", code="invalid_value")
        content = ""
    if isinstance(content, list):
        texts = [_part_text(part, f"{param}.content[{i}]") for i, part in enumerate(content)]
    elif isinstance(content, str):
        texts = [content]
    else:
        raise ApiError(
            f"'{param}.content' must be a string or a list of parts.", param=f"{param}.content", code="invalid_value"
        )
    parts = [{"type": "text", "text": text} for text in texts]
    result = {**message, "content": parts if keeps_parts else "\n".join(texts)}
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
    raise ApiError(
        f"'{param}' is of type {str(kind)[:100]!r}; this model takes text only.", param=param, code="invalid_value"
    )


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
                arguments = from_json(arguments, allow_inf_nan=False) if arguments else {}  # not nested deep
            except ValueError:
                where = f"{param}[{i}].function.arguments"
                raise ApiError(f"'{where}' is not valid JSON.", param=where, code="invalid_value") from None
        result.append({**call, "function": {**function, "arguments": arguments}})
    return result
