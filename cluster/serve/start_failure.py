"""Why the application did not start: the reason for the user, taken from Serve's reports."""

import re
from collections.abc import Iterable

_FRAME = re.compile(r'^\s+File ".*", line \d+', re.MULTILINE)
_USER_ERROR = re.compile(r"^ValueError: (.*)", re.MULTILINE | re.DOTALL)


def start_reason(messages: Iterable[str], *, has_ended: bool) -> str | None:
    """Return the reason in Serve's messages about the application and its deployments; None: the start may go on.

    A user error is a ValueError, whose message says all: every further try of Serve would raise it again. Where there
    is none, the messages and tracebacks are kept. `has_ended`: Serve has given up.
    """
    texts = [text for message in messages if (text := message.strip())]
    errors = [error for text in texts if (error := _user_error(text)) is not None]
    return "\n".join(dict.fromkeys(errors or texts)) if errors or has_ended else None


def _user_error(text: str) -> str | None:
    """Return the message of the ValueError that ends a traceback; None for another error, or no traceback."""
    frames = list(_FRAME.finditer(text))
    error = _USER_ERROR.search(text, frames[-1].end()) if frames else None
    return None if error is None else error[1].strip()
