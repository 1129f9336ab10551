"""Messages of chats, read from texts without a server."""

from typing import Any

from crossdock.cluster.api.text.message_parser import ChatMessage


def whole_message(message: ChatMessage, *texts: str, reason: str | None = "stop") -> dict[str, Any]:
    """Return the fields of a message that has not begun, after these texts."""
    message.read(texts, reason)
    return message.whole()
