"""Paths that clients name: each is a 4xx with its field, whatever the operating system says of it."""

from pathlib import Path

import pytest

from crossdock.cluster.api.routes.adapters import below

PATHS = (
    "a" * 5000,
    "a/" * 3000,
    "circle",
    "../outside",
    "/etc",
    "\0",
    "a\0b",
    "\ud800",
    "closed/inner",
    "file/inner",
    "",  # the folder itself, in which a file is a circle of links
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "circle").symlink_to(folder / "circle")
    (folder / "file").write_text("x")
    (folder / "closed").mkdir(mode=0o000)
    (folder / "whole").mkdir()
    (tmp_path / "outside").mkdir()
    return folder


@pytest.mark.parametrize("path", ["whole", "./whole", "closed/../whole"])
def test_folder_below_is_found(folder: Path, path: str) -> None:
    assert below(folder, path, "model_path", "checkpoints") == folder / "whole"


@pytest.mark.parametrize("path", PATHS)
def test_folder_that_a_client_names_is_below_or_refused_by_its_field(folder: Path, path: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError)) as error:  # 400 or 404
        below(folder, path, "model_path", "checkpoints")
    assert len(str(error.value)) < 500
