"""/v1/files and /v1/batches, as OpenAI's client uses them, over a folder."""

import asyncio
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import IO, Annotated, Any, ClassVar, Literal, ParamSpec, TypeAlias, TypeVar

from fastapi import Query, Request, Response
from fastapi.responses import FileResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from crossdock.cluster.api.batches.folder import BatchFolder, Owner
from crossdock.cluster.api.batches.lines import ENDPOINTS
from crossdock.cluster.api.batches.space import Uploads
from crossdock.cluster.api.body.json_body import Body
from crossdock.cluster.api.body.other_fields import RefusedField
from crossdock.cluster.api.bounds import METADATA_KEY_CHARS
from crossdock.cluster.api.errors import ApiError, disk_error, shown, wrong
from crossdock.cluster.api.http.http_json import Name, json_answer
from crossdock.cluster.api.http.keys import owner_of

logger = logging.getLogger("ray.serve")

_UNITS_S = {"m": 60, "h": 3600, "d": 86400}
_LONGEST_S = 30 * 86400
_FORM_FIELDS = ("file", "purpose")
_EXPIRY_FIELDS = ("expires_after[anchor]", "expires_after[seconds]")  # as OpenAI's clients write the object
_STAYS = "'{}' changes nothing: files stay until they are deleted"
# OpenAI's bounds.
_METADATA_ENTRIES = 16
_METADATA_CHARS = 512
_Order: TypeAlias = Literal["asc", "desc"]
Page: TypeAlias = dict[str, Any]
_Params = ParamSpec("_Params")
_Found = TypeVar("_Found")


class ExpiresAfter(BaseModel):
    """OpenAI's object."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    anchor: Literal["created_at"] = "created_at"
    seconds: int = Field(ge=1)


class BatchRequest(Body):
    """OpenAI's fields."""

    input_file_id: str = Field(max_length=100)
    endpoint: str = Field(max_length=100)
    completion_window: str = Field("24h", max_length=10, description="24h, or another time such as 90m, 6h or 7d.")
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = Field(None, description="Taken with a warning: results stay.")

    no_effect: ClassVar[Mapping[str, str]] = {}
    refused_fields: ClassVar[Mapping[str, RefusedField]] = {}

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
    def __init__(self, folder: BatchFolder, uploads: Uploads) -> None:
        self._folder = folder
        self._uploads = uploads

    async def create(self, request: Request) -> Response:
        upload = self._uploads.of(_owner(request))
        try:
            await _on_disk(self._folder.space.check, _owner(request))
            return await self._created(Request(request.scope, upload.counted(request.receive)))
        except (HTTPException, MultiPartException, ClientDisconnect) as error:
            reason = str(getattr(error, "detail", error) or "the client has left")
            raise ApiError(f"The form cannot be read: {shown(reason)}", code="invalid_form") from None
        except OSError as error:  # of the folder for temporary files
            raise disk_error(error) from error
        except ApiError as error:
            error.headers["Connection"] = "close"  # the rest of the upload is not read
            raise
        finally:
            upload.end()

    async def _created(self, request: Request) -> Response:
        async with request.form(max_files=1, max_fields=len(_FORM_FIELDS + _EXPIRY_FIELDS)) as form:
            if others := form.keys() - set(_FORM_FIELDS + _EXPIRY_FIELDS):
                raise wrong(shown(min(others)), f"the form has the fields {' and '.join(_FORM_FIELDS)}")
            if form.keys() & set(_EXPIRY_FIELDS):
                request.state.warnings = [_STAYS.format("expires_after")]
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise wrong("file", "send multipart/form-data with a file")
            if form.get("purpose") != "batch":
                raise wrong("purpose", "it must be 'batch'")
            name = file.filename or "file.jsonl"
            return json_answer(await _on_disk(self._folder.create_file, _owner(request), file.file, name, "batch"))

    async def all(
        self,
        request: Request,
        purpose: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        after: str | None = None,
        order: _Order = "desc",
    ) -> Response:
        def page() -> Page:
            found = self._folder.each_file(_owner(request))
            if order == "asc":
                found = reversed(list(found))
            return _page((each for each in found if purpose in (None, each["purpose"])), limit, after)

        return json_answer(await _on_disk(page))

    async def one(self, request: Request, name: Name) -> Response:
        return json_answer(await _on_disk(self._folder.file, _owner(request), name))

    async def content(self, request: Request, name: Name) -> Response:
        return OpenContent(await _on_disk(self._folder.open_content, _owner(request), name))

    async def delete(self, request: Request, name: Name) -> Response:
        await _on_disk(self._folder.delete_file, _owner(request), name)
        return json_answer({"id": name, "object": "file", "deleted": True})


class OpenContent(FileResponse):
    """The content of a file that is open: it may be deleted while it is sent."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        path = f"/proc/self/fd/{file.fileno()}"
        stat = os.fstat(file.fileno())
        super().__init__(path, media_type="application/octet-stream", stat_result=stat)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)


class Batches:
    def __init__(self, folder: BatchFolder, wake: Callable[[], None]) -> None:
        """`wake`: called when there is a batch to run."""
        self._folder = folder
        self._wake = wake

    async def create(self, request: Request, body: BatchRequest) -> Response:
        body.check()
        if body.output_expires_after is not None:
            request.state.warnings = [_STAYS.format("output_expires_after")]
        fields = {
            "input_file_id": body.input_file_id,
            "endpoint": body.endpoint,
            "completion_window": body.completion_window,
            "metadata": body.metadata,
        }
        seconds = body.lifetime_s()
        owner = Owner(_owner(request), request.state.tenant.name)
        found = await _on_disk(self._folder.create_batch, owner, fields, seconds)
        self._wake()
        return json_answer(found)

    async def all(
        self, request: Request, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None
    ) -> Response:
        def page() -> Page:
            return _page(self._folder.each_batch(_owner(request)), limit, after)

        return json_answer(await _on_disk(page))

    async def one(self, request: Request, name: Name) -> Response:
        return json_answer(await _on_disk(self._folder.batch, _owner(request), name))

    async def cancel(self, request: Request, name: Name) -> Response:
        return json_answer(await _on_disk(self._folder.cancel, _owner(request), name))


def _page(found: Iterable[Any], limit: int, after: str | None) -> Page:
    """Return a part of a list: what follows the object whose id is `after`. No further object is read."""
    objects = iter(found)
    if after is not None and all(each["id"] != after for each in objects):
        raise wrong("after", "there is no such object")
    part = list(islice(objects, limit))
    ends = {"first_id": part[0]["id"], "last_id": part[-1]["id"]} if part else {"first_id": None, "last_id": None}
    return {"object": "list", "data": part, **ends, "has_more": next(objects, None) is not None}


async def _on_disk(work: Callable[_Params, _Found], *args: _Params.args, **named: _Params.kwargs) -> _Found:
    """Make file calls in a thread. Raises ApiError 507 for a full disk, 503 for another fault of it."""
    try:
        return await asyncio.to_thread(work, *args, **named)
    except OSError as error:
        logger.warning("files of batches: %s", error)
        raise disk_error(error) from error


def _owner(request: Request) -> str:
    return owner_of(request.state.api_key)
