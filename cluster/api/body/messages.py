"""Messages of a chat as chat templates expect them: content as text or parts, calls' arguments as objects."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from crossdock.cluster.api.body.pictures import (
    TYPES,
    VIDEO_TYPES,
    Picture,
    picture_of,
    refusal,
    video_of,
)
from crossdock.cluster.api.bounds import MESSAGE_PARTS, ROLE_CHARS
from crossdock.cluster.api.errors import ApiError, check_count, wrong


def template_messages(
    messages: Sequence[Mapping[str, Any]], *, keeps_parts: bool = False, pictures: list[Picture] | None = None
) -> list[dict[str, Any]]:
    """Return the messages for a template. Raises ApiError, which names the part of the message at fault.

    `keeps_parts`: content is a list of parts, {"type": "text", "text": …}, for templates that were written for these.
    Content with pictures is a list in any case: {"type": "image"} is the place of a picture, {"type": "video"} of a
    video. Pictures are added to the list `pictures`, in their order; None: the model takes text only.
    """
    lists = (message.get(name) for message in messages for name in ("content", "tool_calls"))
    num_parts = sum(len(parts) for parts in lists if isinstance(parts, list))
    check_count("messages", num_parts, MESSAGE_PARTS, "parts and tool calls")
    return [_template_message(message, f"messages[{i}]", keeps_parts, pictures) for i, message in enumerate(messages)]


def call_arguments(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the arguments of the messages' calls where they are strings, which hold JSON."""
    lists = (message.get("tool_calls") for message in messages)
    calls = (call for each in lists if isinstance(each, list) for call in each if isinstance(call, dict))
    functions = (call.get("function") for call in calls)
    found = (function.get("arguments") for function in functions if isinstance(function, dict))
    return [text for text in found if isinstance(text, str)]


def last_assistant_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the last message if that is the assistant's, else an empty text."""
    last = messages[-1]
    if last.get("role") != "assistant":
        return ""
    text: str = _template_message(last, f"messages[{len(messages) - 1}]", keeps_parts=False, pictures=None)["content"]
    return text


def _template_message(
    message: Mapping[str, Any], param: str, keeps_parts: bool, pictures: list[Picture] | None
) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ApiError(f"'{param}.role' must be a string.", param=f"{param}.role", code="invalid_value")
    check_count(f"{param}.role", len(role), ROLE_CHARS)
    content = message.get("content")
    calls = message.get("tool_calls")
    if content is None:
        if role != "assistant":
            raise ApiError(f"'{param}.content' is missing.", param=f"{param}.content", code="invalid_value")
        refused = message.get("refusal")  # OpenAI's models write one in place of a content
        content = refused if isinstance(refused, str) else ""
    if isinstance(content, list):
        parts = [_template_part(part, role, f"{param}.content[{i}]", pictures) for i, part in enumerate(content)]
    elif isinstance(content, str):
        parts = [{"type": "text", "text": content}]
    else:
        raise ApiError(
            f"'{param}.content' must be a string or a list of parts.", param=f"{param}.content", code="invalid_value"
        )
    is_text = all(part["type"] == "text" for part in parts)
    result = {
        **{name: value for name, value in message.items() if name != "refusal" or value != content},
        "content": parts if keeps_parts or not is_text else "\n".join(part["text"] for part in parts),
    }
    if calls is not None:
        result["tool_calls"] = _template_calls(calls, f"{param}.tool_calls")
    if not result.get("tool_calls"):
        result.pop("tool_calls", None)  # some templates ask whether a message has the field
    return result


def _template_part(part: Any, role: str, param: str, pictures: list[Picture] | None) -> dict[str, Any]:
    """Return a part of content as templates read it. A picture or video is added to `pictures`."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = _kind_of(part) if isinstance(part, dict) else type(part).__name__.lower()
    param = part.param if isinstance(part, Picture) else param
    if isinstance(part, dict) and kind in ("text", "input_text", "output_text"):
        text = part.get("text")
        if isinstance(text, str):
            return {"type": "text", "text": text}
        raise ApiError(f"'{param}.text' must be a string.", param=f"{param}.text", code="invalid_value")
    if isinstance(part, dict) and kind == "refusal" and role == "assistant" and isinstance(part.get("refusal"), str):
        return {"type": "text", "text": part["refusal"]}
    if pictures is None or not (isinstance(part, Picture) or kind in (*TYPES, *VIDEO_TYPES)):
        raise refusal(kind, param, takes_pictures=pictures is not None)
    if role == "assistant":
        raise wrong(param, "messages of the assistant have no pictures; send it in one of the user's")
    picture = part if isinstance(part, Picture) else (video_of if kind in VIDEO_TYPES else picture_of)(part, param)
    pictures.append(picture)
    return {"type": picture.kind}


def _kind_of(part: Mapping[str, Any]) -> Any:
    """Return the type of a part. As in vLLM, a picture or a video needs none beside its URL."""
    kind = part.get("type")
    return next((name for name in ("image_url", "video_url") if name in part), None) if kind is None else kind


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
