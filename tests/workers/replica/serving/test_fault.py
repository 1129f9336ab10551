"""The fault for tests: only a marked prompt ends the process, and no prompt does while none is configured."""

import signal
import subprocess
import sys

import pytest

from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.serving.fault import end_if_marked, is_marked


@pytest.mark.parametrize("prompt", [[7, 8, 9], [1, 7, 8, 9], [7, 7, 8, 9, 2]])
def test_prompt_with_the_tokens_side_by_side_is_marked(prompt: list[int]) -> None:
    assert is_marked(prompt, (7, 8, 9))


@pytest.mark.parametrize("prompt", [[], [7, 8], [7, 1, 8, 9], [9, 8, 7]])
def test_prompt_without_the_tokens_in_order_is_not_marked(prompt: list[int]) -> None:
    assert not is_marked(prompt, (7, 8, 9))


def test_engine_without_the_setting_ends_on_no_prompt() -> None:
    assert EngineConfig().fault_token_ids == ()
    assert not is_marked([7, 8, 9], EngineConfig().fault_token_ids)
    end_if_marked([7, 8, 9], EngineConfig().fault_token_ids)  # would kill this process


def test_marked_prompt_kills_the_process_without_its_last_words() -> None:
    program = (
        "from crossdock.workers.replica.serving.fault import end_if_marked as end; "
        "end([1, 7, 8], (7, 8)); print('alive')"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout == b""
