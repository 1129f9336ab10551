"""Who asks: API keys, the SLO classes each may use, and whose requests each may look at."""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from crossdock.cluster.openai import ApiError


class ApiKey(BaseModel):
    """One key. A plain string is a key for every class."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    key: str = Field(min_length=1, repr=False, description="What clients send as 'Authorization: Bearer …'.")
    classes: tuple[str, ...] | None = Field(None, min_length=1, description="The SLO classes it may use; null: all.")
    default: str | None = Field(None, description="The class of its requests that name none; null: the engine's.")
    sees_all_requests: bool = Field(False, description="It may look at the requests of every key, not its own alone.")

    @model_validator(mode="before")
    @classmethod
    def _may_be_plain(cls, data: Any) -> Any:
        if isinstance(data, str):
            return {"key": data}
        if not isinstance(data, Mapping | ApiKey):
            raise ValueError("must be a string, or an object with key, classes, default and sees_all_requests")
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

    @cached_property
    def tenant(self) -> str:
        """A name for whoever has this key, the same in every process, which does not give the key away."""
        return hashlib.blake2b(self.key.encode(), digest_size=16, person=b"crossdock tenant").hexdigest()


def find_key(keys: Sequence[ApiKey], authorization: bytes) -> ApiKey:
    """The key that an `Authorization` header holds. ApiError 401 where it holds none of `keys`."""
    scheme, _, given = authorization.partition(b" ")
    # All are compared, in constant time, whichever fits: the time taken tells nothing.
    fitting = [key for key in keys if hmac.compare_digest(key.key.encode(), given.strip())]
    if fitting and scheme.lower() == b"bearer":
        return fitting[0]
    reason = "Incorrect API key provided." if given else "No API key provided: send 'Authorization: Bearer KEY'."
    raise ApiError(reason, status=401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
