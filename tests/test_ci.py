"""CI's script goes on to the tests when nothing can be installed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "run"


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(("can_install", "code"), [(True, 0), (True, 3), (False, 3)])
def test_tests_run_whether_or_not_packages_can_be_installed_and_then_a_tenth_of_the_soak(
    tmp_path: Path, can_install: bool, code: int
) -> None:
    for name in ("bash", "dirname", "env", "mktemp", "rm", "sh", "tail", "timeout"):
        found = shutil.which(name)
        assert found is not None
        (tmp_path / name).symlink_to(found)
    program(
        tmp_path / "apt-get",
        f'echo "$@" >> {tmp_path}/asked; {"exit 0" if can_install else "echo no network; exit 100"}',
    )
    program(tmp_path / "make", f'echo "made $1"; [ $1 = test ] && exit {code}; exit 4')
    ended = subprocess.run(
        ["bash", SCRIPT],
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == (code or 4), "the exit code of make"
    assert ended.stdout.endswith("made test\n" if code else "made test\nmade soak-tenth\n")
    assert ("no network" in ended.stdout) is not can_install
    asked = (tmp_path / "asked").read_text()
    assert "update" in asked
    assert ("chromium chromium-driver prometheus" in asked) is can_install
