"""One line of a batch: what it must be, the answer of its endpoint, and the record of that answer."""

import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

from fastapi import Request, Response
from pydantic_core import from_json

from crossdock.cluster.api.batches.folder import Owner
from crossdock.cluster.api.body.bodies import ChatCompletionRequest, CompletionRequest
from crossdock.cluster.api.body.decision_body import DecisionRequest
from crossdock.cluster.api.body.embedding_body import ClassifyRequest, EmbeddingRequest
from crossdock.cluster.api.body.json_body import Body
from crossdock.cluster.api.body.score_body import RerankRequest, ScoreRequest
from crossdock.cluster.api.errors import ApiError, shown, to_json
from crossdock.cluster.api.http.http_guard import as_api_error
from crossdock.cluster.api.http.http_json import EventStream
from crossdock.cluster.api.http.keys import KeyRing
from crossdock.cluster.api.http.limits import Charge, Ledger
from crossdock.cluster.api.http.own_requests import own_request
from crossdock.cluster.api.http.tenant_reader import TenantReader
from crossdock.cluster.api.routes.model_routes import Creates
from crossdock.workers.schedule.shares import Shares

MOST_LINE_BYTES = 20 << 20  # as of the body of a request
MOST_LINES = 50_000  # OpenAI's bound
_ID_CHARS = 512
_BLOCK = 1 << 20  # bytes of a file that are searched at once for ends of lines

ENDPOINTS: Mapping[str, type[Body]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/score": ScoreRequest,
    "/v1/rerank": RerankRequest,
    "/classify": ClassifyRequest,
    "/v1/decisions": DecisionRequest,
}
_SAME = {"/score": "/v1/score", "/rerank": "/v1/rerank", "/v2/rerank": "/v1/rerank"}  # vLLM's other paths


class WrongLine(ValueError):
    """A line that is no request. `code` and `param`: as in the `errors` of a batch."""

    def __init__(self, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class Span(NamedTuple):
    """Where a line stands in its file. `number`: of the line, from 1."""

    number: int
    start: int
    num_bytes: int


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


def line_spans(file: IO[bytes], most_bytes: int = MOST_LINE_BYTES) -> Iterator[Span]:
    """Yield where each line that is not blank stands. Raises WrongLine for one with more than `most_bytes`.

    The file is read in blocks: what a long line holds is counted before the line is read.
    """
    number = 1
    start = 0
    position = 0
    is_blank = True
    while block := os.pread(file.fileno(), _BLOCK, position):
        *ended, rest = block.split(b"\n")
        for part in ended:
            position += len(part) + 1
            _check_length(number, position - start, most_bytes)
            if not (is_blank and (not part or part.isspace())):
                yield Span(number, start, position - start)
            number += 1
            start = position
            is_blank = True
        position += len(rest)
        is_blank = is_blank and (not rest or rest.isspace())
        _check_length(number, position - start, most_bytes)
    if not is_blank:
        yield Span(number, start, position - start)


def _check_length(number: int, num_bytes: int, most_bytes: int) -> None:
    if num_bytes > most_bytes:
        reason = f"Line {number} has more than {most_bytes} bytes."
        raise WrongLine(reason, "line_too_large")


def read_line(file: IO[bytes], span: Span) -> bytes:
    """Return the bytes of a line. Other threads may read other lines of the file meanwhile."""
    return os.pread(file.fileno(), span.num_bytes, span.start)


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


class LineAnswers:
    """The endpoints, as lines reach them. The limits of a line's API key hold."""

    def __init__(
        self,
        creates: Creates,
        keys: KeyRing,
        ledger: Ledger,
        tenant_reader: TenantReader,
        shares: Shares,
        slo_class: str,
    ) -> None:
        self._creates = creates
        self._tenant_reader = tenant_reader
        self._keys = keys
        self._ledger = ledger
        self._shares = shares
        self._slo_class = slo_class

    async def __call__(self, line: Line, owner: Owner, request_id: str) -> tuple[int, bytes]:
        """Return the status and the body for a line. Raises ApiError 429 or 503, after which it may be tried again."""
        key = self._keys.of_owner(owner.name) if owner.name else None
        if owner.name and key is None:
            error = ApiError("The API key of this batch is no longer valid.", status=401, code="invalid_api_key")
            return error.status, error.body()
        charge = None if key is None else Charge(self._ledger.account(key))
        tenant = self._tenant_reader.named(key, owner.tenant)
        request = own_request(
            request_id, self._shares, slo_class=self._slo_class, key=key, account=charge, tenant=tenant
        )
        try:
            if charge is not None:
                await charge.begin(is_read=False)
            return await answered(line, self._creates[line.url], request)
        finally:
            request.state.memory.release()
            if charge is not None:
                charge.end()
