"""Why the application did not start: the reason for the user, taken from Serve's reports."""

import re
from collections.abc import Iterable

_FRAME = re.compile(r'^\s+File ".*", line \d+', re.MULTILINE)
_USER_ERROR = re.compile(r"^ValueError: (.*)", re.MULTILINE | re.DOTALL)


def start_reason(messages: Iterable[str]) -> str:
    """Return the reason in Serve's messages about the application and its deployments.

    A user error is a ValueError, whose message says all. Where there is none, the messages and tracebacks are kept.
    """
    texts = [text for message in messages if (text := message.strip())]
    errors = [error for text in texts if (error := _user_error(text)) is not None]
    return "\n".join(dict.fromkeys(errors or texts))


def _user_error(text: str) -> str | None:
    """Return the message of the ValueError that ends a traceback; None for another error, or no traceback."""
    frames = list(_FRAME.finditer(text))
    error = _USER_ERROR.search(text, frames[-1].end()) if frames else None
    return None if error is None else error[1].strip()
