"""One line of a batch: what it must be, the answer of its endpoint, and the record of that answer."""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

from fastapi import Request, Response
from pydantic_core import from_json

from crossdock.cluster.api.body.bodies import ChatCompletionRequest, CompletionRequest
from crossdock.cluster.api.body.embedding_body import ClassifyRequest, EmbeddingRequest
from crossdock.cluster.api.body.json_body import Body
from crossdock.cluster.api.body.score_body import RerankRequest, ScoreRequest
from crossdock.cluster.api.errors import ApiError, shown, to_json
from crossdock.cluster.api.http.http_guard import as_api_error
from crossdock.cluster.api.http.http_json import EventStream

MOST_LINE_BYTES = 20 << 20  # as of the body of a request
MOST_LINES = 50_000  # OpenAI's bound
_ID_CHARS = 512

ENDPOINTS: Mapping[str, type[Body]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/score": ScoreRequest,
    "/v1/rerank": RerankRequest,
    "/classify": ClassifyRequest,
}
_SAME = {"/score": "/v1/score", "/rerank": "/v1/rerank", "/v2/rerank": "/v1/rerank"}  # vLLM's other paths


class WrongLine(ValueError):
    """A line that is no request. `code` and `param`: as in the `errors` of a batch."""

    def __init__(self, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


@dataclass(frozen=True, slots=True)
class Line:
    """A request of a batch. `number`: of its line in the file, from 1."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]
    num_bytes: int

    @classmethod
    def parse(cls, number: int, content: bytes) -> "Line":
        """Read a line. Raises WrongLine."""
        try:
            data = from_json(content, allow_inf_nan=False)
        except ValueError as error:
            raise WrongLine(f"This line is not valid JSON: {shown(str(error))}", "invalid_json_line") from None
        if not isinstance(data, dict):
            raise WrongLine("This line is not a JSON object.", "invalid_json_line")
        for name, kind in (("custom_id", str), ("method", str), ("url", str), ("body", dict)):
            if not isinstance(data.get(name), kind):
                what = "an object" if kind is dict else "a string"
                raise WrongLine(f"'{name}' must be {what}.", "missing_required_parameter", name)
        if not 0 < len(data["custom_id"]) <= _ID_CHARS:
            raise WrongLine(f"'custom_id' must have 1 to {_ID_CHARS} characters.", "invalid_value", "custom_id")
        if data["method"] != "POST":
            raise WrongLine(f"'method' must be POST, not {shown(data['method'])!r}.", "invalid_method", "method")
        url: str = data["url"]
        url = _SAME.get(url, url)
        if url not in ENDPOINTS:
            reason = f"'url' must be one of {', '.join(ENDPOINTS)}, not {shown(data['url'])!r}."
            raise WrongLine(reason, "invalid_url", "url")
        if others := data.keys() - {"custom_id", "method", "url", "body"}:
            name = shown(min(others))
            raise WrongLine(f"Unrecognized field: '{name}'.", "unknown_parameter", name)
        return cls(number, data["custom_id"], url, data["body"], len(content))


def read_lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield each line that is not blank, with its number from 1. Raises WrongLine for one that is too long."""
    number = 0
    while content := file.readline(MOST_LINE_BYTES + 1):
        number += 1
        if len(content) > MOST_LINE_BYTES:
            reason = f"Line {number} has more than {MOST_LINE_BYTES} bytes."
            raise WrongLine(reason, "line_too_large")
        if content.strip():
            yield number, content


def record(name: str, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """Return the record of an answer. `name`: of the line in its batch. `body`: as JSON."""
    head = to_json({"id": name, "custom_id": custom_id})[:-1]
    response = to_json({"status_code": status, "request_id": request_id})[:-1]
    return head + b',"response":' + response + b',"body":' + body + b'},"error":null}\n'


def unanswered(name: str, custom_id: str, code: str, message: str) -> bytes:
    """Return the record of a line that was not run."""
    error = {"code": code, "message": message}
    return to_json({"id": name, "custom_id": custom_id, "response": None, "error": error}) + b"\n"


async def answered(
    line: Line, create: Callable[[Request, Any], Awaitable[Response]], request: Request
) -> tuple[int, bytes]:
    """Return the status and the body that the endpoint answers a line with.

    Raises:
        ApiError: 429 or 503, which pass.
    """
    try:
        if line.body.get("stream"):
            reason = "'stream' must be false in a batch: its answers are whole."
            raise ApiError(reason, param="stream", code="unsupported_value")
        response = await create(request, ENDPOINTS[line.url].of(line.body))
        assert not isinstance(response, EventStream)
        return response.status_code, bytes(response.body)
    except Exception as error:
        api_error = as_api_error(error)
        if api_error.status in (429, 503):
            raise api_error from error
        return api_error.status, api_error.body()
