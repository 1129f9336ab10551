"""Name the server that a user means by an address, in any form that people write."""


def server_root(url: str) -> str:
    """Return a URL with its scheme and without the path of the API: 127.0.0.1:8000/v1 is http://127.0.0.1:8000."""
    return (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
