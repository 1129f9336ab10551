"""The pages that an ingress serves to people, `/dashboard` and `/playground/scheduler`, and what they are made of."""

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_PLACES = {"dashboard.html": "/dashboard", "playground.html": "/playground/scheduler"}  # others: /web/NAME
ASSET_HEADERS = {
    # Nothing comes from elsewhere, nothing goes elsewhere, and no other site may show these pages inside its own.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class WebAsset:
    content: bytes
    media_type: str


@cache
def web_assets() -> dict[str, WebAsset]:
    """By path. They hold nothing of anyone's: what they show they ask the API for, with the viewer's key."""
    folder = files("crossdock.cluster").joinpath("web")
    found = {}
    for file in folder.iterdir():
        suffix = file.name.rpartition(".")[2]
        if suffix in _TYPES:
            found[_PLACES.get(file.name, f"/web/{file.name}")] = WebAsset(file.read_bytes(), _TYPES[suffix])
    return found
