"""Messages of chats, read from texts without a server."""

import json
from typing import Any

from crossdock.cluster.api.text.message_parser import ChatMessage


def whole_message(message: ChatMessage, *texts: str, reason: str | None = "stop") -> dict[str, Any]:
    """Return the fields of a message that has not begun, after these texts."""
    message.read(texts, reason)
    return message.whole()


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the name and the arguments of each call in a message."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]
