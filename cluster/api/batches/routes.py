"""/v1/files and /v1/batches, as OpenAI's client uses them, over a folder."""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from fastapi import Query, Request, Response
from fastapi.responses import FileResponse
from pydantic import Field
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect

from crossdock.cluster.api.batches.folder import BatchFolder, Owner
from crossdock.cluster.api.batches.lines import ENDPOINTS
from crossdock.cluster.api.body.json_body import Body
from crossdock.cluster.api.body.other_fields import RefusedField
from crossdock.cluster.api.bounds import METADATA_KEY_CHARS
from crossdock.cluster.api.errors import ApiError, shown, wrong
from crossdock.cluster.api.http.http_json import Name, json_answer
from crossdock.cluster.api.http.keys import tenant_of

_UNITS_S = {"m": 60, "h": 3600, "d": 86400}
_LONGEST_S = 30 * 86400
_FORM_FIELDS = ("file", "purpose")
_METADATA_ENTRIES, _METADATA_CHARS = 16, 512  # OpenAI's bounds
_Order: TypeAlias = Literal["asc", "desc"]


class BatchRequest(Body):
    """OpenAI's fields."""

    input_file_id: str = Field(max_length=100)
    endpoint: str = Field(max_length=100)
    completion_window: str = Field("24h", max_length=10, description="24h, or another time such as 90m, 6h or 7d.")
    metadata: dict[str, str] | None = None

    no_effect: ClassVar[Mapping[str, str]] = {}
    refused_fields: ClassVar[Mapping[str, RefusedField]] = {
        "output_expires_after": RefusedField("files stay until they are deleted")
    }

    def lifetime_s(self) -> int:
        """Return the seconds of the completion window. Raises ApiError for a value that is none."""
        found = re.fullmatch(r"(\d{1,6})([mhd])", self.completion_window)
        seconds = int(found[1]) * _UNITS_S[found[2]] if found else 0
        if not 0 < seconds <= _LONGEST_S:
            raise wrong("completion_window", "it must be a time such as 24h, 90m or 7d, of 30 days at most")
        return seconds

    def check(self) -> None:
        """Raise ApiError for an endpoint that takes no batches, or too much metadata."""
        if self.endpoint not in ENDPOINTS:
            raise wrong("endpoint", f"it must be one of {', '.join(ENDPOINTS)}")
        for key, value in (self.metadata or {}).items():
            if len(key) > METADATA_KEY_CHARS or len(value) > _METADATA_CHARS:
                raise wrong("metadata", f"keys have {METADATA_KEY_CHARS} and values {_METADATA_CHARS} characters")
        if len(self.metadata or {}) > _METADATA_ENTRIES:
            raise wrong("metadata", f"it has at most {_METADATA_ENTRIES} entries")


class BatchFiles:
    def __init__(self, folder: BatchFolder) -> None:
        self._folder = folder

    async def create(self, request: Request) -> Response:
        try:
            async with request.form(max_files=1, max_fields=len(_FORM_FIELDS)) as form:
                if others := form.keys() - set(_FORM_FIELDS):
                    raise wrong(shown(min(others)), f"the form has the fields {' and '.join(_FORM_FIELDS)}")
                file, purpose = form.get("file"), form.get("purpose")
                if not isinstance(file, UploadFile):
                    raise wrong("file", "send multipart/form-data with a file")
                if purpose != "batch":
                    raise wrong("purpose", "it must be 'batch'")
                tenant, name = _tenant(request), file.filename or "file.jsonl"
                found = await asyncio.to_thread(self._folder.create_file, tenant, file.file, name, "batch")
        except (HTTPException, MultiPartException, ClientDisconnect) as error:
            reason = str(getattr(error, "detail", error) or "the client has left")
            raise ApiError(f"The form cannot be read: {shown(reason)}", code="invalid_form") from None
        return json_answer(found)

    async def all(
        self,
        request: Request,
        purpose: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        after: str | None = None,
        order: _Order = "desc",
    ) -> Response:
        found = await asyncio.to_thread(self._folder.files, _tenant(request))
        return _page([each for each in found if purpose in (None, each["purpose"])], limit, after, order)

    async def one(self, request: Request, name: Name) -> Response:
        return json_answer(await asyncio.to_thread(self._folder.file, _tenant(request), name))

    async def content(self, request: Request, name: Name) -> Response:
        path = await asyncio.to_thread(self._folder.content, _tenant(request), name)
        return FileResponse(path, media_type="application/octet-stream")

    async def delete(self, request: Request, name: Name) -> Response:
        await asyncio.to_thread(self._folder.delete_file, _tenant(request), name)
        return json_answer({"id": name, "object": "file", "deleted": True})


class Batches:
    def __init__(self, folder: BatchFolder, wake: Callable[[], None]) -> None:
        """`wake`: called when there is a batch to run."""
        self._folder = folder
        self._wake = wake

    async def create(self, request: Request, body: BatchRequest) -> Response:
        body.check()
        fields = {
            "input_file_id": body.input_file_id,
            "endpoint": body.endpoint,
            "completion_window": body.completion_window,
            "metadata": body.metadata,
        }
        seconds = body.lifetime_s()
        owner = Owner(_tenant(request), request.state.payer.name)
        found = await asyncio.to_thread(self._folder.create_batch, owner, fields, seconds)
        self._wake()
        return json_answer(found)

    async def all(
        self, request: Request, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None
    ) -> Response:
        return _page(await asyncio.to_thread(self._folder.batches, _tenant(request)), limit, after)

    async def one(self, request: Request, name: Name) -> Response:
        return json_answer(await asyncio.to_thread(self._folder.batch, _tenant(request), name))

    async def cancel(self, request: Request, name: Name) -> Response:
        return json_answer(await asyncio.to_thread(self._folder.cancel, _tenant(request), name))


def _page(found: Sequence[Any], limit: int, after: str | None, order: _Order = "desc") -> Response:
    """Return a part of a list: what follows the object whose id is `after`. `found`: the newest first."""
    ordered = list(found) if order == "desc" else list(reversed(found))
    ids = [each["id"] for each in ordered]
    if after is not None:
        if after not in ids:
            raise wrong("after", "there is no such object")
        ordered = ordered[ids.index(after) + 1 :]
    part = ordered[:limit]
    first, last = (part[0]["id"], part[-1]["id"]) if part else (None, None)
    ends = {"first_id": first, "last_id": last, "has_more": len(part) < len(ordered)}
    return json_answer({"object": "list", "data": part, **ends})


def _tenant(request: Request) -> str:
    return tenant_of(request.state.api_key)
