"""Errors in OpenAI's shape."""

import errno
import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel

from crossdock.cluster.api.bounds import MESSAGE_CHARS, SHOWN_CHARS

_KINDS = {429: "rate_limit_error", 505: "invalid_request_error"}  # by status
_ANTHROPIC_KINDS = {  # by status
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


FULL = (errno.ENOSPC, errno.EDQUOT)  # of an OSError: there is no room on the disk


class ErrorDetail(BaseModel):
    """The fields of an error. `param`: the field of the request at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The body of every answer with a status of 400 or more. Describes the API only: `ApiError.body` writes it."""

    error: ErrorDetail


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str
    details: dict[str, Any] | None = None


class AnthropicErrorAnswer(BaseModel):
    """The body of such an answer below /v1/messages: `ApiError.anthropic_body` writes it."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


class ApiError(Exception):
    """The reason why a request is not answered, as its client receives it. A long message or param is cut."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """`kind`: OpenAI's `type`; None: the one of most errors with this status. `details`: fields that Anthropic's
        clients read beside the message; OpenAI's errors have none."""
        super().__init__(shown(message, MESSAGE_CHARS))
        self.status = status
        self.kind = kind or _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.param = None if param is None else shown(param)
        self.code = code
        self.headers = dict(headers or {})
        if status == 503:  # another try may succeed; clients are told when
            self.headers.setdefault("Retry-After", "1")
        self.details = details

    def body(self) -> bytes:
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return to_json({"error": error})

    def anthropic_body(self, request_id: str) -> bytes:
        """Return the error in the shape of Anthropic's Messages API."""
        other = "api_error" if self.status >= 500 else "invalid_request_error"
        error: dict[str, Any] = {"type": _ANTHROPIC_KINDS.get(self.status, other), "message": str(self)}
        if self.details is not None:
            error["details"] = self.details
        return to_json({"type": "error", "error": error, "request_id": request_id})


def wrong(param: str, reason: str, code: str = "invalid_value") -> ApiError:
    """Return the error for a field whose value cannot be used. `reason`: the rest of a sentence, without its stop."""
    return ApiError(f"Invalid value for '{param}': {reason}.", param=param, code=code)


def disk_error(error: OSError) -> ApiError:
    """Return the error for a file that the server could not read or write. A client cannot mend it."""
    if error.errno in FULL:
        reason = f"The server's disk is full ({error.strerror}). Try again later."
        return ApiError(reason, status=507, code="insufficient_storage", headers={"x-should-retry": "false"})
    reason = f"The server's disk cannot be used now ({error.strerror or error}). Try again."
    return ApiError(reason, status=503, code="service_unavailable")


def check_count(param: str, count: int, most: int, unit: str = "characters") -> None:
    """Raise ApiError for a field that has more of something than is accepted."""
    if count > most:
        raise wrong(param, f"{count} {unit} are more than the {most} that are accepted")


def shown(text: str, most: int = SHOWN_CHARS) -> str:
    """Return the client's own text as an error message may repeat it: no more than `most` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def to_json(value: Any) -> bytes:
    return _ENCODER.encode(value).encode("utf-8", "replace")


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
