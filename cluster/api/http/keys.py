"""API keys: where they come from, what each may use, and whose requests each may see."""

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.yaml_text import read_yaml

logger = logging.getLogger("ray.serve")

_CHECK_S = 1.0  # between two checks of the file of keys


class ApiKey(BaseModel):
    """One API key. A plain string is a key for every class."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    key: str = Field(min_length=1, repr=False, description="What clients send as 'Authorization: Bearer …'.")
    classes: tuple[str, ...] | None = Field(None, min_length=1, description="The SLO classes it may use; null: all.")
    default: str | None = Field(None, description="The class of its requests that name none; null: the engine's.")
    name: str | None = Field(
        None, pattern=r"^[A-Za-z0-9._-]{1,64}$", description="Its tenant in metrics; null: digits that name no key."
    )
    weight: float = Field(1.0, gt=0, description="Keys of one class have the replicas' time in proportion to weights.")
    names_tenants: bool = Field(
        False, description="A gateway's key: http.tenant_header of its requests names the tenant in place of the key."
    )
    sees_all_requests: bool = Field(False, description="It may see the requests of every key, not only its own.")
    cache_group: str | None = Field(
        None, description="Keys of one group share cached prefixes, which response times reveal; null: no sharing."
    )
    requests_per_minute: int | None = Field(None, ge=1, description="How many it may begin; null: any number.")
    tokens_per_minute: int | None = Field(
        None,
        ge=1,
        description="Tokens of prompts and outputs; null: any. A request reserves its prompt and, for each output, "
        "max_tokens or, where it states none, 1,024; at its end it gives back what it has not used.",
    )
    seconds_per_minute: float | None = Field(
        None,
        gt=0,
        description="Predicted seconds of the replicas' time; null: any. 60 is one replica. A request reserves what "
        "tokens took recently, and pays at its end what it was charged.",
    )
    max_concurrent_requests: int | None = Field(None, ge=1, description="How many may run at once; null: any number.")

    @model_validator(mode="before")
    @classmethod
    def _may_be_plain(cls, data: Any) -> Any:
        if isinstance(data, str):
            return {"key": data}
        if not isinstance(data, Mapping | ApiKey):
            raise ValueError(f"must be a string, or an object with {', '.join(cls.model_fields)}")
        return data

    @model_validator(mode="after")
    def _default_is_allowed(self) -> Self:
        if self.default is not None and self.classes is not None and self.default not in self.classes:
            raise ValueError(
                f"default {self.default!r} must be one of its classes, which are {', '.join(self.classes)}"
            )
        return self

    def allows(self, slo_class: str) -> bool:
        return self.classes is None or slo_class in self.classes

    def cache_salt(self, requested: str) -> str:
        """Return the salt of the key's cached pages. `requested`: the `cache_salt` of the request."""
        group = self.owner if self.cache_group is None else self.cache_group
        return f"{len(group)}:{group}{requested}"  # with the length, no two pairs of names give the same salt

    @cached_property
    def owner(self) -> str:
        """Return a name for the key's owner: the same in every process, and useless for guessing the key."""
        return hashlib.blake2b(self.key.encode(), digest_size=16, person=b"crossdock tenant").hexdigest()


def cache_salt(key: ApiKey | None, requested: str) -> str:
    """Return the salt of all that a request may share with others. `key`: the client's; None: no keys are in use."""
    return requested if key is None else key.cache_salt(requested)


def owner_of(key: ApiKey | None) -> str:
    """Return the name of a key's owner; empty where no keys are in use."""
    return "" if key is None else key.owner


class KeyRing:
    """The keys in force: those of the configuration and those of a file.

    The file is read again when another takes its place, so that keys can be added and revoked without a restart. A file
    that was written in place needs an end mark: a part of a file of keys is a file of keys, too.
    """

    def __init__(
        self,
        keys: Sequence[ApiKey] = (),
        path: Path | None = None,
        classes: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the file.

        Args:
            path: YAML, a list like `http.api_keys`, or plain text with a key on each line.
            classes: the class names that keys may use.

        Raises:
            ValueError: the file cannot be used. To go on without its keys would open the API to everyone.
        """
        self._own = tuple(keys)
        self._path = path
        self._classes = classes
        self._clock = clock
        self._keys = self._own
        self._stamp: object = None  # of the file as it was last looked into
        self._seen: object = None  # at the last check
        # the file whose keys are in force; open, so that no other file gets its number
        self._file: IO[bytes] | None = None
        self._checked_at = clock()
        if path is not None:
            self._stamp = self._seen = _stamp(path)
            self._file = _open(path)
            self._keys = (*self._own, *_parse(self._file.read(), path, classes))

    @property
    def is_open(self) -> bool:
        """No key is required. With a file a key is required, even while the file holds none."""
        return self._path is None and not self._own

    def find(self, authorization: bytes) -> ApiKey:
        """Return the key in an `Authorization` header. Raises ApiError 401 if it holds none."""
        self._check_file()
        scheme, _, given = authorization.partition(b" ")
        # Every key is compared, in constant time, so that the time taken reveals nothing.
        fitting = [key for key in self._keys if hmac.compare_digest(key.key.encode(), given.strip())]
        if fitting and scheme.lower() == b"bearer":
            return fitting[0]
        reason = "Incorrect API key provided." if given else "No API key provided: send 'Authorization: Bearer KEY'."
        raise ApiError(reason, status=401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def of_owner(self, owner: str) -> ApiKey | None:
        """Return the key whose `owner` this is; None if it is not in force."""
        self._check_file()
        return next((key for key in self._keys if key.owner == owner), None)

    def _check_file(self) -> None:
        now = self._clock()
        if self._path is None or now - self._checked_at < _CHECK_S:
            return
        self._checked_at = now
        stamp = _stamp(self._path)
        before = self._seen
        self._seen = stamp
        if stamp == self._stamp or stamp != before:  # at its first sight it may still be being written
            return
        self._stamp = stamp
        try:
            self._replace(self._path)
        except ValueError as error:
            logger.error("the API keys in force stay as they were: %s", error)

    def _replace(self, path: Path) -> None:
        """Put the file's keys in force. ValueError: it cannot be used, or may be a part of what is being written."""
        file = _open(path)
        try:
            content = file.read()
            keys = _parse(content, path, self._classes)
            assert self._file is not None
            if os.path.sameopenfile(file.fileno(), self._file.fileno()) and not _has_end_mark(content):
                raise ValueError(
                    f"http.api_keys_file: {path} was written in place, so its end may be missing; move a new file over "
                    "it, or end it with the line '...'"
                )
        except BaseException:
            file.close()
            raise
        self._file.close()
        self._file = file
        self._keys = (*self._own, *keys)
        logger.info("%d API keys were read from %s", len(keys), path)


def _open(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise ValueError(f"http.api_keys_file: {path} cannot be read: {error.strerror}") from None


def _parse(content: bytes, path: Path, classes: Collection[str]) -> tuple[ApiKey, ...]:
    try:
        data = read_yaml(content.decode())
    except ValueError:  # the error's message may repeat a key
        raise ValueError(f"http.api_keys_file: {path} is neither YAML nor a key on each line") from None
    if isinstance(data, str):
        data = data.split()
    try:
        keys = TypeAdapter(tuple[ApiKey, ...]).validate_python([] if data is None else data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(step) for step in first["loc"])
        raise ValueError(f"http.api_keys_file: {path}: {where}: {first['msg']}") from None
    check_keys(keys, classes, f"http.api_keys_file: {path}")
    return keys


def check_keys(keys: Sequence[ApiKey], classes: Collection[str], where: str) -> None:
    """Raise ValueError if two keys are the same, or if one names a class that is not in `classes`."""
    names = [key.key for key in keys]
    for place, key in enumerate(keys):
        if key.key in names[:place]:
            raise ValueError(f"{where}: {names.index(key.key)} and {place} are the same key; give each once")
        for field, asked in (("classes", key.classes or ()), ("default", (key.default,) if key.default else ())):
            if unknown := [name for name in asked if name not in classes]:
                raise ValueError(
                    f"{where}.{place}.{field}: {unknown[0]!r} is none of engine.slo_classes, which are "
                    f"{', '.join(classes)}"
                )


def _has_end_mark(content: bytes) -> bool:
    """Return whether the last line is YAML's end of a document."""
    return content.rstrip().endswith(b"\n...")


def _stamp(path: Path) -> object:
    """Return a value that differs when the file does. Kubernetes replaces a mounted Secret by changing a link."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
