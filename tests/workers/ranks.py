"""Rank processes for tests: started once, they call the functions sent to them, together or one by one."""

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.forked_workers import PROCESSES

UNHURRIED_S = 1800.0  # a deadline of ranks that must not end on a busy machine: the limit of the test comes first
DIVISIONS = [(2, 1), (1, 2), (2, 2)]  # tensor ranks, stages


class Ranks:
    """`size` processes that call the functions sent to them."""

    def __init__(self, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._num_worlds = 0
        self.pipes: list[Connection] = []
        self.processes = []
        for _ in range(size):
            ours, theirs = PROCESSES.Pipe()
            process = PROCESSES.Process(target=_rank, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function` with a rank and `args` in the first `size` processes at once, which are one world.

        Returns the answer of each; raises the exception of the first that fails.
        """
        self._num_worlds += 1
        store = f"file://{self._folder.name}/{self._num_worlds}"
        for rank in range(size):
            self.start(rank, _in_world, store, size, rank, function, args)
        return [self.answer(rank) for rank in range(size)]

    def start(self, number: int, function: Callable[..., Any], *args: Any) -> None:
        """Call `function` in one process; `answer` waits for the result."""
        self.pipes[number].send((function, args))

    def answer(self, number: int) -> Any:
        """Wait for the result of a call, as long as the test may and the process lives."""
        sentinel = self.processes[number].sentinel
        ready = wait([self.pipes[number], sentinel], UNHURRIED_S)
        assert ready, "a rank does not answer"
        assert self.pipes[number] in ready, "the process of a rank has ended"
        answer = self.pipes[number].recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(240)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _rank(pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = function(*args)
        except Exception as error:
            error.add_note(traceback.format_exc())
            answer = error
            if dist.is_initialized():  # a rank's process ends with its error; this one calls further functions
                dist.destroy_process_group()
        pipe.send_bytes(pickle.dumps(answer))


def _in_world(store: str, size: int, rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    try:
        return function(rank, *args)
    finally:
        dist.destroy_process_group()


def saved(module: Any, folder: Path) -> Path:
    """Save `module` as a Hugging Face directory, and return the directory."""
    module.save_pretrained(folder)
    return folder
