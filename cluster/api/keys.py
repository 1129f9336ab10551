"""Who asks: API keys, where they come from, what each may use, and whose requests each may look at."""

import hashlib
import hmac
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from crossdock.cluster.api.errors import ApiError

logger = logging.getLogger("ray.serve")

_LOOK_S = 1.0  # between two looks at the file of keys


class ApiKey(BaseModel):
    """One key. A plain string is a key for every class."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    key: str = Field(min_length=1, repr=False, description="What clients send as 'Authorization: Bearer …'.")
    classes: tuple[str, ...] | None = Field(None, min_length=1, description="The SLO classes it may use; null: all.")
    default: str | None = Field(None, description="The class of its requests that name none; null: the engine's.")
    sees_all_requests: bool = Field(False, description="It may look at the requests of every key, not its own alone.")
    cache_group: str | None = Field(
        None, description="Keys of one group share cached prefixes, which their timing shows; null: with nobody."
    )
    requests_per_minute: int | None = Field(None, ge=1, description="How many it may begin; null: any number.")
    tokens_per_minute: int | None = Field(
        None, ge=1, description="Prompt tokens and the output asked for, together; what is not generated counts back."
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

    def cache_salt(self, asked: str) -> str:
        """What its cached pages are kept apart by; `asked`: the request's own `cache_salt`."""
        group = self.tenant if self.cache_group is None else self.cache_group
        return f"{len(group)}:{group}{asked}"  # the length: no pair of names reads as another

    @cached_property
    def tenant(self) -> str:
        """A name for whoever has this key, the same in every process, which does not give the key away."""
        return hashlib.blake2b(self.key.encode(), digest_size=16, person=b"crossdock tenant").hexdigest()


class KeyRing:
    """The keys in force: those of the configuration, and those of a file, which is read again whenever it changes, so
    that a key is given or taken away without a restart."""

    def __init__(
        self,
        keys: Sequence[ApiKey] = (),
        path: Path | None = None,
        classes: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`path`: YAML, a list like `http.api_keys`, or plain text with a key on each line. `classes`: the names that
        keys may speak of. ValueError if the file cannot be used: without it everyone would be let in."""
        self._own = tuple(keys)
        self._path = path
        self._classes = classes
        self._clock = clock
        self._keys = self._own
        self._stamp: object = None
        self._looked = clock()
        if path is not None:
            self._stamp = _stamp(path)
            self._keys = (*self._own, *read_keys(path, classes))

    @property
    def is_open(self) -> bool:
        """Nobody is asked for a key. A file asks for one even while it holds none."""
        return self._path is None and not self._own

    def find(self, authorization: bytes) -> ApiKey:
        """The key that an `Authorization` header holds. ApiError 401 where it holds none."""
        self._look()
        return find_key(self._keys, authorization)

    def _look(self) -> None:
        now = self._clock()
        if self._path is None or now - self._looked < _LOOK_S:
            return
        self._looked = now
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            keys = read_keys(self._path, self._classes)
        except ValueError as error:  # half written, perhaps: who had a key yesterday has it until that is mended
            logger.error("the API keys in force stay as they were: %s", error)
            return
        logger.info("%d API keys were read from %s", len(keys), self._path)
        self._keys = (*self._own, *keys)


def read_keys(path: Path, classes: Collection[str] = ()) -> tuple[ApiKey, ...]:
    """The keys of a file. ValueError says what is wrong, and never shows a key."""
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ValueError(f"http.api_keys_file: {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
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
    """ValueError if two are the same, or one speaks of a class that is none of `classes`."""
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


def _stamp(path: Path) -> object:
    """Differs when the file does: Kubernetes replaces a mounted Secret by turning a link."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def find_key(keys: Sequence[ApiKey], authorization: bytes) -> ApiKey:
    """The one of `keys` that an `Authorization` header holds. ApiError 401 where it holds none."""
    scheme, _, given = authorization.partition(b" ")
    # All are compared, in constant time, whichever fits: the time taken tells nothing.
    fitting = [key for key in keys if hmac.compare_digest(key.key.encode(), given.strip())]
    if fitting and scheme.lower() == b"bearer":
        return fitting[0]
    reason = "Incorrect API key provided." if given else "No API key provided: send 'Authorization: Bearer KEY'."
    raise ApiError(reason, status=401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
