"""Web sites whose pages may act on a server without keys: a browser sends their requests as if its user did."""

from collections.abc import Collection
from urllib.parse import urlsplit

from crossdock.cluster.api.errors import ApiError, shown

_READS = ("GET", "HEAD", "OPTIONS")
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_NO_ORIGIN = b"null"  # of a page in a sandbox, or of a file


class Sites:
    """The server's own site, and those that the operator adds.

    A browser asks before a page may send JSON to another site (CORS). It does not ask before a POST without a body, or
    with a form: such a request would pause the server, or bring a file. Programs and extensions of a browser are not
    pages: their origins have other schemes than http.
    """

    def __init__(self, origins: Collection[str], hosts: Collection[str]) -> None:
        """`origins`: of other sites, as "https://chat.example"; "*": all. `hosts`: the server's further names."""
        self._origins = frozenset(origins)
        self._hosts = frozenset(hosts)

    def check(self, method: str, headers: dict[bytes, bytes]) -> None:
        """Raise ApiError 403 for a request that changes something, and that a page of another site has sent."""
        if method in _READS or "*" in self._origins:
            return
        origin = headers.get(b"origin")
        if origin is None:
            is_foreign = headers.get(b"sec-fetch-site", b"").lower() == b"cross-site"
        else:
            is_foreign = self._is_foreign(origin, headers.get(b"host", b""))
        if is_foreign:
            site = "" if origin is None else f" ({shown(origin.decode('latin-1'))!r})"
            hint = "allow its origin (--allowed-origins), or set an API key (--api-key)"
            reason = f"This server has no API keys, so pages of other sites{site} may not act on it: {hint}."
            raise ApiError(reason, status=403, kind="permission_error", code="origin_not_allowed")

    def _is_foreign(self, origin: bytes, host: bytes) -> bool:
        given = origin.decode("latin-1")
        if origin == _NO_ORIGIN or given in self._origins:
            return given not in self._origins
        scheme, name = _scheme_and_name(given)
        if scheme not in ("http", "https"):
            return False
        _, own = _scheme_and_name(f"http://{host.decode('latin-1')}")
        return not (name in self._hosts or name == own or {name, own} <= _LOOPBACK)


def _scheme_and_name(origin: str) -> tuple[str, str]:
    """Return the scheme and the host name of an origin. What is no origin has the scheme of a web page, and no name."""
    try:
        parts = urlsplit(origin)
        return parts.scheme or "http", parts.hostname or ""
    except ValueError:
        return "http", ""
