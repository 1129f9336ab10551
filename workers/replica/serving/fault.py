"""A fault for tests: a marked prompt ends the process of every replica that receives the prompt.

Set `engine.fault_token_ids` in the configuration, or in the engine of one pool, to the marking tokens. Without a value
no prompt is marked.
"""

import logging
import os
import signal
from collections.abc import Sequence

logger = logging.getLogger("ray.serve")


def is_marked(prompt_token_ids: Sequence[int], fault_token_ids: Sequence[int]) -> bool:
    """Return whether the prompt contains the fault's tokens, side by side and in order. No tokens mark no prompt."""
    mark = list(fault_token_ids)
    size = len(fault_token_ids)
    if not size:
        return False
    prompt = list(prompt_token_ids)
    return any(prompt[start : start + size] == mark for start in range(len(prompt) - size + 1))


def end_if_marked(prompt_token_ids: Sequence[int], fault_token_ids: Sequence[int]) -> None:
    """End this process at once, as SIGKILL does, where the prompt is marked."""
    if is_marked(prompt_token_ids, fault_token_ids):
        logger.error("a marked prompt ends this replica: fault_token_ids is set, for a test")
        os.kill(os.getpid(), signal.SIGKILL)
