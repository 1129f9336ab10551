"""Seconds of work and copies on a CPU; tests/workers/model/pictures/test_gpu_pictures.py has those of GPUs."""

import numpy as np
import torch

from crossdock.workers.model.device_copies import timed, to_device


def test_work_is_done_at_once_and_its_seconds_are_the_clocks() -> None:
    now = [1.0]

    def work() -> None:
        now[0] += 2.5

    seconds = timed(torch.device("cpu"), lambda: now[0], work)
    assert now == [3.5]
    now[0] = 9.0
    assert seconds() == 2.5


def test_copy_has_the_dtype_and_values_of_the_array() -> None:
    array = np.arange(6, dtype=np.int64).reshape(2, 3)
    copied = to_device(array, torch.device("cpu"))
    assert copied.dtype is torch.int64
    assert copied.tolist() == array.tolist()
