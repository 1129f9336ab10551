"""Rank processes for tests: spawned once, then sent functions to call, together or one by one."""

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PROCESSES = multiprocessing.get_context("forkserver")  # imports torch once for all of them: seconds each
PROCESSES.set_forkserver_preload(["crossdock.workers.replica.follower"])
DIVISIONS = [(2, 1), (1, 2), (2, 2)]  # tensor ranks, stages


class Ranks:
    """Processes that call the functions they are sent."""

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
        """Call `function` in the first `size` processes at once, with the rank in a world of them and `args`.

        Returns the answer of each. Raises what the first process that failed has raised.
        """
        self._num_worlds += 1
        store = f"file://{self._folder.name}/{self._num_worlds}"
        for rank in range(size):
            self.start(rank, _in_world, store, size, rank, function, args)
        return [self.answer(rank) for rank in range(size)]

    def start(self, number: int, function: Callable[..., Any], *args: Any) -> None:
        """Call `function` in one process; `answer` waits for its end."""
        self.pipes[number].send((function, args))

    def answer(self, number: int) -> Any:
        """Return the answer of one process, or raise its exception."""
        assert self.pipes[number].poll(120), "a rank does not answer"
        answer = self.pipes[number].recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(20)
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
        pipe.send_bytes(pickle.dumps(answer))


def _in_world(store: str, size: int, rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    try:
        return function(rank, *args)
    finally:
        dist.destroy_process_group()


def saved(module: Any, folder: Path) -> Path:
    """Save `module` as a Hugging Face directory, and return that."""
    module.save_pretrained(folder)
    return folder
