"""The tenant whose share of the replicas' time a request uses: its API key's, or one that a gateway names."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.http.keys import ApiKey

_NAME = re.compile(r"[A-Za-z0-9._@:/-]{1,64}")
_DIGITS = 8  # of the name of a key's owner, where the key has no name


class Tenant(NamedTuple):
    """A tenant. Tenants of one SLO class have time in proportion to their weights."""

    name: str = ""  # of the key, or as its gateway names the tenant; empty: clients are not told apart
    weight: float = 1.0
    gateway: str = ""  # the name of the key whose gateway names the tenant

    @property
    def account(self) -> str:
        """Return the name that no other tenant has, and that metrics show. No key's name has a slash."""
        return f"{self.gateway}/{self.name}" if self.gateway else self.name


class TenantReader:
    """Finds the tenant of each request."""

    def __init__(self, header: str | None = None, weights: Mapping[str, float] | None = None) -> None:
        """`header`: whose value names the tenant, where the key may name tenants or no key is required. `weights`: of
        tenants so named, by name; others have the weight of the key, or 1."""
        self._header = header
        self._lower = (header or "").lower().encode()
        self._weights = weights or {}

    def of(self, key: ApiKey | None, headers: Mapping[bytes, bytes]) -> Tenant:
        """Return the tenant of a request. Raises ApiError 400 for a name that metrics could not show."""
        return self.named(key, headers.get(self._lower, b"").decode("latin-1"))

    def named(self, key: ApiKey | None, name: str) -> Tenant:
        """Return the tenant that the header's value names, where the key may name tenants. ApiError as in `of`."""
        own = Tenant() if key is None else Tenant(key.name or key.owner[:_DIGITS], key.weight)
        if self._header is None or not (key is None or key.names_tenants) or name in ("", own.name):
            return own
        if _NAME.fullmatch(name) is None:
            reason = f"The header '{self._header}' must name a tenant: 1 to 64 of A-Z, a-z, 0-9 and ._@:/-"
            raise ApiError(f"{reason}.", param=self._header, code="invalid_value")
        return Tenant(name, self._weights.get(name, own.weight), own.name)
