"""Understand requests through gateways and load balancers: a path before the API's own, and HEAD on /health."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class GatewayPath:
    """ASGI middleware that accepts requests with the gateway's path and without it: some gateways cut it off."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on as one below the gateway's path, and below that the route of Serve's proxy."""
        if scope["type"] == "http":
            route = scope.get("root_path", "")
            path = scope["path"].removeprefix(route)
            is_below = path == self._root or path.startswith(f"{self._root}/")
            root = self._root + route
            scope = {**scope, "root_path": root, "path": root + (path.removeprefix(self._root) if is_below else path)}
        await self._app(scope, receive, send)


class HeadRequests:
    """ASGI middleware that answers HEAD wherever GET is answered: as a GET, without its body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a HEAD on as a GET, and leave the body out of its answer."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, send_head)
