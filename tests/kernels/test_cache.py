"""The cache directory, by the environment."""

from pathlib import Path

import pytest

from crossdock.kernels.cache import cache_dir


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"CROSSDOCK_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/crossdock"),
        ({"HOME": "/home/me"}, "/home/me/.cache/crossdock"),
    ],
)
def test_cache_dir_is_first_that_is_set(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CROSSDOCK_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_dir() == Path(expected)
