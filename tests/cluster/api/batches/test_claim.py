"""A folder of batches belongs to one application: another one is refused, while a process of the first one lives."""

import sys
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from crossdock.cluster.api.batches.claim import Claimant, claim

OURS = Claimant("chat", "here", "127.0.0.1:1")
HOLDS = """
import sys
from pathlib import Path
from crossdock.cluster.api.batches.claim import Claimant, claim
held = claim(Path(sys.argv[1]), Claimant(*sys.argv[2:]))
print("held", flush=True)
sys.stdin.read()
"""


def holder(folder: Path, claimant: Claimant) -> "Popen[str]":
    """Return a process that has claimed the folder."""
    process = Popen([sys.executable, "-c", HOLDS, folder, *claimant], stdin=PIPE, stdout=PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize(
    ("other", "is_refused"),
    [
        (OURS, False),
        (Claimant("chat", "there", "127.0.0.1:1"), False),
        (Claimant("chat", "there", "127.0.0.1:2"), False),
        (Claimant("chat", "here", "127.0.0.1:2"), True),
        (Claimant("embeddings", "here", "127.0.0.1:1"), True),
        (Claimant("embeddings", "there", "127.0.0.1:2"), True),
    ],
)
def test_folder_is_one_applications_until_its_last_process_is_killed(
    tmp_path: Path, other: Claimant, is_refused: bool
) -> None:
    """During an upgrade two clusters run one application, on machines of their own."""
    first = holder(tmp_path, OURS)
    second = holder(tmp_path, OURS)
    try:
        first.kill()
        first.wait()
        if is_refused:
            with pytest.raises(ValueError, match="belongs to the application 'chat' on here"):
                claim(tmp_path, other)
        else:
            claim(tmp_path, other).close()
    finally:
        second.kill()
        second.wait()
        for process in (first, second):
            process.communicate()
    claim(tmp_path, other).close()
