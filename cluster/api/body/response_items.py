"""Items of the Responses API: the input becomes items of one form, and items become the messages of a chat."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from pydantic_core import from_json

from crossdock.cluster.api import bounds
from crossdock.cluster.api.body.conversation_body import objects_of, text_of
from crossdock.cluster.api.body.pictures import Picture, picture_of
from crossdock.cluster.api.errors import check_count, wrong

Item: TypeAlias = dict[str, Any]

_TEXT_PARTS = ("input_text", "output_text", "text")
_ID_CHARS = 128


def input_items(given: Any) -> list[Item]:
    """Return the input as items that each have an id. Raises ApiError, which names the part at fault."""
    if isinstance(given, str):
        return [_message("user", given, "input", None)]
    items = objects_of(given, "input")
    if not items or len(items) > bounds.MESSAGES:
        raise wrong("input", f"it must be a string, or a list of 1 to {bounds.MESSAGES} items")
    return [_item(item, f"input[{i}]") for i, item in enumerate(items)]


def call_texts(given: Any) -> list[str]:
    """Return the arguments of the input's function calls, which are JSON in strings."""
    items = (item for item in given if isinstance(item, dict)) if isinstance(given, list) else ()
    found = (item.get("arguments") for item in items if item.get("type") == "function_call")
    return [text for text in found if isinstance(text, str)]


def chat_messages(instructions: str | None, items: Sequence[Item], num_own: int) -> list[dict[str, Any]]:
    """Return the chat that `instructions` and items, of `input_items` or of an answer, make together.

    `num_own`: how many of the last items are the request's own, so that errors about pictures can name them.

    What comes before the first other message becomes one system message: most templates have place for one alone.
    """
    system = [] if instructions is None else [instructions]
    messages: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for i, item in enumerate(items, start=num_own - len(items)):
        kind = item["type"]
        if kind == "reasoning":
            thoughts += [part["text"] for part in item["content"] or item["summary"]]
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        elif kind == "function_call":
            _assistant(messages, thoughts).setdefault("tool_calls", []).append(_call(item))
        elif item["role"] == "assistant":
            message = {"role": "assistant", "content": _text(item)}
            messages.append(message | _thoughts(thoughts))
        elif item["role"] == "user":
            messages.append({"role": "user", "content": _content(item, i)})
        elif messages:
            messages.append({"role": "system", "content": _text(item)})
        else:
            system.append(_text(item))
    return [*([{"role": "system", "content": "\n\n".join(system)}] if system else []), *messages]


def check_size(items: Sequence[Item]) -> None:
    """Raise ApiError for a conversation that is too long, though each of its responses was not."""
    if len(items) > bounds.MESSAGES:
        reason = f"the conversation has {len(items)} items, more than the {bounds.MESSAGES} that are accepted"
        raise wrong("input", reason)
    texts, urls = (sum(each) for each in zip(*map(_num_chars, items), strict=True))
    for num_chars, most, kind in (
        (texts, bounds.CONVERSATION_CHARS, "characters"),
        (urls, bounds.CONVERSATION_URLS_CHARS, "characters in its pictures"),
    ):
        if num_chars > most:
            raise wrong("input", f"the conversation has {num_chars} {kind}, more than the {most} that are accepted")


def _num_chars(value: Any) -> tuple[int, int]:
    """Return the characters of all strings of an item or a part of one, and those of its pictures' URLs apart."""
    if isinstance(value, str):
        return len(value), 0
    if isinstance(value, dict):
        urls = len(value.get("image_url") or "")
        texts, others = _num_chars(list(value.values()))
        return texts - urls, others + urls
    if isinstance(value, list):
        counts = [_num_chars(each) for each in value]
        return sum(texts for texts, _ in counts), sum(urls for _, urls in counts)
    return 0, 0


def item_id(prefix: str, response_id: str, index: int) -> str:
    """Return the id of a response's output item, from which `referred_response` finds the response again."""
    return f"{prefix}_{response_id.removeprefix('resp_')}_{index}"


def referred_response(name: str) -> str:
    """Return the id of the response that has an output item of this id, if any."""
    return "resp_" + name.partition("_")[2].rpartition("_")[0]


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _assistant(messages: list[dict[str, Any]], thoughts: list[str]) -> dict[str, Any]:
    """Return the assistant's message that a call belongs to: the last one, or a new one."""
    if not messages or messages[-1]["role"] != "assistant" or thoughts:
        messages.append({"role": "assistant", "content": ""} | _thoughts(thoughts))
    return messages[-1]


def _thoughts(thoughts: list[str]) -> dict[str, Any]:
    """Return the reasoning before a message as templates read it, and forget it."""
    fields = {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    thoughts.clear()
    return fields


def _call(item: Item) -> dict[str, Any]:
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _text(item: Item) -> str:
    return "\n".join(part["text"] for part in item["content"])


def _content(item: Item, index: int) -> str | list[Any]:
    """Return the content of a user's message: text, or parts if there are pictures. `index`: below 0 for an earlier
    response's."""
    if all(part["type"] != "input_image" for part in item["content"]):
        return _text(item)
    parts: list[dict[str, Any] | Picture] = []
    for i, part in enumerate(item["content"]):
        where = f"input[{index}].content[{i}]" if index >= 0 else "previous_response_id"
        parts.append(picture_of(part, where) if part["type"] == "input_image" else part)
    return parts


def _item(item: Mapping[str, Any], where: str) -> Item:
    kind = item.get("type") or "message"
    if kind == "message":
        return _message(item.get("role"), item.get("content"), where, item.get("id"))
    if kind == "function_call":
        fields = {name: _name_of(item.get(name), f"{where}.{name}") for name in ("call_id", "name")}
        fields["arguments"] = text_of(item.get("arguments"), f"{where}.arguments")
        _check_json(fields["arguments"], f"{where}.arguments")
        space = (
            {} if item.get("namespace") is None else {"namespace": _name_of(item["namespace"], f"{where}.namespace")}
        )
        return {"id": _id(item, "fc"), "type": kind, **fields, **space, "status": "completed"}
    if kind == "function_call_output":
        call_id = _name_of(item.get("call_id"), f"{where}.call_id")
        output = "\n".join(_part_texts(item.get("output"), f"{where}.output"))
        return {"id": _id(item, "fco"), "type": kind, "call_id": call_id, "output": output, "status": "completed"}
    if kind == "reasoning":
        content, summary = (
            [{"type": part, "text": text} for text in _part_texts(item.get(name) or [], f"{where}.{name}", part)]
            for name, part in (("content", "reasoning_text"), ("summary", "summary_text"))
        )
        return {"id": _id(item, "rs"), "type": kind, "summary": summary, "content": content}
    reason = f"items of type {str(kind)[:100]!r} are not supported, only messages, reasoning and function calls"
    raise wrong(f"{where}.type", reason, "unsupported_value")


def _name_of(value: Any, where: str) -> str:
    """Return a name or an id. Raises ApiError for another type, and for a long one."""
    name = text_of(value, where)
    check_count(where, len(name), bounds.ITEM_NAME_CHARS)
    return name


def _check_json(text: str, where: str) -> None:
    try:
        from_json(text or "{}", allow_inf_nan=False)  # refuses deep nesting
    except ValueError as error:
        raise wrong(where, f"it must be JSON: {error}") from None


def _message(role: Any, content: Any, where: str, given_id: Any) -> Item:
    if role not in ("user", "assistant", "system", "developer"):
        raise wrong(f"{where}.role", "it must be 'user', 'assistant', 'system' or 'developer'")
    extra: Item = {"annotations": []} if role == "assistant" else {}
    kind = "output_text" if role == "assistant" else "input_text"
    inside = where if where == "input" else f"{where}.content"
    if role == "user" and isinstance(content, list):
        parts = [_user_part(part, f"{inside}[{i}]") for i, part in enumerate(_bounded(content, inside))]
    else:
        parts = [
            {"type": kind, "text": text, **extra}
            for text in _part_texts(content, inside, has_refusals=role == "assistant")
        ]
    name = _id({"id": given_id}, "msg")
    return {"id": name, "type": "message", "role": role, "status": "completed", "content": parts}


def _part_texts(content: Any, where: str, kind: str | None = None, *, has_refusals: bool = False) -> list[str]:
    """Return the texts of a string or of a list of parts.

    `kind`: the only type of part that is accepted here. `has_refusals`: a part may be a refusal of OpenAI's models.
    """
    if isinstance(content, str):
        return [content]
    texts = []
    for i, part in enumerate(_bounded(content, where)):
        if has_refusals and part.get("type") == "refusal":
            texts.append(text_of(part.get("refusal"), f"{where}[{i}].refusal"))
            continue
        if part.get("type") not in (_TEXT_PARTS if kind is None else (kind,)):
            reason = f"a part of type {str(part.get('type'))[:100]!r} is not accepted here, only text"
            raise wrong(f"{where}[{i}]", reason)
        texts.append(text_of(part.get("text"), f"{where}[{i}].text"))
    return texts


def _bounded(content: Any, where: str) -> Sequence[Mapping[str, Any]]:
    """Return the parts of content. Raises ApiError for too many."""
    parts = objects_of(content, where)
    check_count(where, len(parts), bounds.MESSAGE_PARTS, "parts")
    return parts


def _user_part(part: Mapping[str, Any], where: str) -> Item:
    """Return a part of a user's message, text or a picture, in one form each."""
    kind = part.get("type")
    if kind == "input_image":
        picture = picture_of(part, where)
        return {"type": kind, "image_url": picture.url, "detail": picture.detail}
    if kind in ("input_video", "video_url"):
        raise wrong(where, "videos are taken by /v1/chat/completions alone, as parts of the type 'video_url'")
    if kind not in _TEXT_PARTS:
        raise wrong(where, f"a part of type {str(kind)[:100]!r} is not accepted here, only text and pictures")
    return {"type": "input_text", "text": text_of(part.get("text"), f"{where}.text")}


def _id(item: Mapping[str, Any], prefix: str) -> str:
    given = item.get("id")
    return given if isinstance(given, str) and 0 < len(given) <= _ID_CHARS else new_id(prefix)
