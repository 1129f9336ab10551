"""The path under which a gateway shows the API."""

from starlette.types import ASGIApp, Receive, Scope, Send


class GatewayPath:
    """ASGI middleware that accepts requests with the gateway's path and without it: some gateways cut it off."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on as one below the gateway's path."""
        if scope["type"] == "http":
            path = scope["path"]
            is_below = path == self._root or path.startswith(f"{self._root}/")
            scope = {**scope, "root_path": self._root, "path": path if is_below else self._root + path}
        await self._app(scope, receive, send)
