"""A run of pytest lists at its end which tests were skipped for want of a program."""

import os
import subprocess
import sys
from pathlib import Path


def test_missing_program_is_listed_at_the_end_with_its_package(tmp_path: Path) -> None:
    command = [
        Path(sys.executable).with_name("pytest"),
        "-p",
        "no:cacheprovider",
        "tests/cluster/deploy/test_manifests.py",
    ]
    ended = subprocess.run(
        [*command, "-k", "alert"],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    *_, hole, closing = ended.stdout.strip().splitlines()
    assert hole.startswith("hole: 1 skipped: needs promtool: apt-get install prometheus"), ended.stdout
    assert "1 skipped" in closing
