"""Rank processes for tests: spawned once, and told what to run together, each time in a world of their own."""

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


class Ranks:
    """`run` calls a function in the first so many processes at once: with its rank, and the arguments given."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._num_worlds = 0
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What each answers; raises what the first that fails has raised."""
        self._num_worlds += 1
        store = f"file://{self._folder.name}/{self._num_worlds}"
        for pipe in self.pipes[:size]:
            pipe.send((store, size, function, args))
        answers = [self._answer(pipe) for pipe in self.pipes[:size]]
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    @staticmethod
    def _answer(pipe: Connection) -> Any:
        assert pipe.poll(120), "a rank does not answer"
        return pipe.recv()

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _rank(rank: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    while True:
        try:
            store, size, function, args = pipe.recv()
        except EOFError:
            return
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
        try:
            answer = function(rank, *args)
        except Exception as error:
            error.add_note(traceback.format_exc())
            answer = error
        dist.destroy_process_group()
        pipe.send_bytes(pickle.dumps(answer))


def saved(module: Any, folder: Path) -> Path:
    """A Hugging Face directory of `module`."""
    module.save_pretrained(folder)
    return folder
