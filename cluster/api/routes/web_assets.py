"""The pages for people, `/dashboard` and `/simulator`, with their scripts and styles."""

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# Other files are at /web/NAME.
_PATHS = {"dashboard.html": "/dashboard", "simulator.html": "/simulator"}
ASSET_HEADERS = {
    # Pages load from and connect to this server only, and no other site may embed them.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class WebAsset:
    """One file as HTTP serves it."""

    content: bytes
    media_type: str


@cache
def web_assets() -> dict[str, WebAsset]:
    """Return the assets by path. They contain no data: pages fetch it from the API, with the viewer's key."""
    folder = files("crossdock.cluster").joinpath("web")
    found = {}
    for file in folder.iterdir():
        suffix = file.name.rpartition(".")[2]
        if suffix in _TYPES:
            found[_PATHS.get(file.name, f"/web/{file.name}")] = WebAsset(file.read_bytes(), _TYPES[suffix])
    return found
