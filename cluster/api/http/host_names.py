"""Names under which a server answers that has no keys and listens on loopback: web pages may reach it under others."""

import re
from collections.abc import Collection

from crossdock.cluster.api.errors import ApiError, shown

_LOCAL = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?", re.IGNORECASE)
ANY = "*"


class HostNames:
    """The local names, and those that the operator adds.

    A page can have its own name point to 127.0.0.1 after it was loaded (DNS rebinding). The browser then takes this
    server for the page's own, and shows its answers to the page.
    """

    def __init__(self, others: Collection[str]) -> None:
        """`others`: lower-case names without a port; "*": any name is accepted."""
        self._others = others

    def check(self, headers: dict[bytes, bytes]) -> None:
        """Raise ApiError 403 for a request under another name. One without a name comes from no browser."""
        given = headers.get(b"host", b"").decode("latin-1")
        name = re.sub(r":\d*$", "", given).lower()
        if not given or _LOCAL.fullmatch(given) or name in self._others or ANY in self._others:
            return
        reason = f"This server has no API keys and listens on loopback, so it does not answer as {shown(given)!r}"
        hint = "use localhost or 127.0.0.1, allow the name (--allowed-hosts), or set an API key (--api-key)"
        raise ApiError(f"{reason}: {hint}.", status=403, kind="permission_error", code="host_not_allowed")
