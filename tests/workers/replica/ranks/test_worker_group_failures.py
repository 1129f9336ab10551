"""The end of a rank is the end of its worker group: killed, hung, refused or never started. No process is left."""

import os
import queue
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from crossdock.workers.model.graphs import recording
from crossdock.workers.replica.config import TransferConfig
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.ranks.rank_loader import RankFailed, why_failed
from crossdock.workers.replica.ranks.rank_messages import JoinWorkerGroup, RankFailure, encode
from crossdock.workers.replica.ranks.rank_socket import AuthenticationFailed, RankSocket, WorkerGroupAddress
from crossdock.workers.replica.ranks.worker_group import WorkerGroup
from crossdock.workers.replica.serving.follower import follow
from tests.workers.architectures import build
from tests.workers.ranks import PROCESSES, saved
from tests.workers.replica.ranks.test_worker_group import works
from tests.workers.worker_groups import spec_of


class Victim:
    """A worker group of two whose follower has a process of its own, which tests may harm."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.spec = spec_of(path, 2, 1, **options)
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.worker_group = WorkerGroup(self.spec, "127.0.0.1", self.lost.put)
        self.process = PROCESSES.Process(target=follow, args=(self.spec, 1, self.worker_group.address), daemon=True)
        self.process.start()

    def engine(self) -> Engine:
        return new_engine(self.worker_group.load(), self.spec.engine, worker_group=self.worker_group)

    def close(self) -> None:
        self.worker_group.close()
        self.process.kill()
        self.process.join()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return saved(build("llama", {}), tmp_path)


@pytest.fixture
def victim(path: Path) -> Iterator[Victim]:
    victim = Victim(path, rank_timeout_s=240.0)
    yield victim
    victim.close()


def harm(victim: Victim, signal_: signal.Signals) -> float:
    """Return the seconds from the signal, under load, until the driver knows."""
    assert victim.process.pid is not None
    engine = victim.engine()
    for submission in works(8, num_tokens=80):
        engine.add(submission)
    for _ in range(5):
        engine.step()
    os.kill(victim.process.pid, signal_)
    since = time.monotonic()
    with pytest.raises(RuntimeError) as failure:
        for _ in iter(engine.step, None):
            pass
    victim.worker_group.fail(failure.value)
    return time.monotonic() - since


def test_killed_rank_is_noticed_at_once(victim: Victim) -> None:
    harm(victim, signal.SIGKILL)
    assert "its process has ended" in victim.lost.get(timeout=240)
    assert victim.lost.empty(), "reported once"


def test_hung_rank_is_noticed_at_the_deadline(path: Path) -> None:
    victim = Victim(path, rank_timeout_s=6.0)  # no step before it hangs may take so long, on a slow machine either
    try:
        assert harm(victim, signal.SIGSTOP) > 5
    finally:
        victim.close()
    assert "rank 0 " in victim.lost.get(timeout=240)  # the rank that waited for the other


def test_rank_that_dies_while_others_record_steps_ends_the_start(
    victim: Victim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver does not wait for its agreement until the deadline, and does not go on without graphs."""

    def kill(_: Callable[[], None]) -> None:
        assert victim.process.pid is not None
        os.kill(victim.process.pid, signal.SIGKILL)

    monkeypatch.setattr(recording, "_has_graphs", lambda device: True)
    monkeypatch.setattr(recording, "_stream_capture", lambda: (kill, lambda run: run))
    with pytest.raises(RuntimeError):
        victim.engine()
    assert "its process has ended" in victim.lost.get(timeout=240)


def test_follower_whose_driver_is_gone_ends(path: Path) -> None:
    """The connection ends without a message, as at the death of the driver's process."""
    victim = Victim(path)
    victim.engine()
    for follower in victim.worker_group._followers.values():
        follower.socket.close()
    victim.process.join(240)
    assert victim.process.exitcode == 1
    victim.close()


def test_follower_that_waits_for_a_dead_driver_ends(path: Path) -> None:
    """The driver is gone before the world of the ranks is complete: the follower is blocked in joining it."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = WorkerGroupAddress("127.0.0.1", listener.getsockname()[1], store.port, b"c" * 32)
        process = PROCESSES.Process(target=follow, args=(spec_of(path, 2, 1), 1, address), daemon=True)
        process.start()
        driver = RankSocket(listener.accept()[0], address.cookie, is_driver=True)
        assert driver.receive() == encode(JoinWorkerGroup(1))
        driver.close()
    process.join(240)
    assert process.exitcode == 1


def test_rank_that_cannot_start_reports_why(path: Path) -> None:
    """The driver raises the rank's own words. A stranger at the same port is refused."""
    victim = Victim(path, max_model_len=100_000)  # of 256 positions
    address = victim.worker_group.address
    guess = WorkerGroupAddress(address.host, address.port, address.store_port, b"guess")
    with pytest.raises((AuthenticationFailed, ConnectionError, EOFError)):
        RankSocket.connect(guess)
    with pytest.raises(ValueError, match="max_model_len"):
        victim.worker_group.load()
    assert "max_model_len (100000) is more than the model's own 256" in victim.lost.get(timeout=240)
    victim.close()


@pytest.mark.parametrize(
    "first",
    [encode(JoinWorkerGroup(0)), encode(JoinWorkerGroup(2)), encode(JoinWorkerGroup(-1)), b"\xc1"],
    ids=["the driver's rank", "no rank", "negative", "no message"],
)
def test_follower_with_a_wrong_first_message_is_refused(path: Path, first: bytes) -> None:
    worker_group = WorkerGroup(spec_of(path, 2, 1), "127.0.0.1", lambda _: None)
    link = RankSocket.connect(worker_group.address)
    link.send(first)
    with pytest.raises((EOFError, OSError)):
        link.receive()
    link.close()
    worker_group.close()


def test_follower_that_sends_no_message_of_a_rank_ends_the_worker_group(path: Path) -> None:
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    worker_group = WorkerGroup(spec_of(path, 2, 1), "127.0.0.1", lost.put)
    link = RankSocket.connect(worker_group.address)
    link.send(encode(JoinWorkerGroup(1)))
    link.send(b"\xc1")
    assert "rank 1 (tensor 1 of 2, stage 0 of 1): sent MessagePack data is malformed" in lost.get(timeout=240)
    with pytest.raises(RankFailed, match=r"rank 1 .*: sent MessagePack data is malformed"):
        worker_group.open_docks("m", "mixed", TransferConfig(), lambda *_: None)
    link.close()
    worker_group.close()


def test_refusal_of_a_follower_is_an_error_of_the_user_without_a_traceback(path: Path) -> None:
    """Serve shows a ValueError as one line and does not try again."""
    worker_group = WorkerGroup(spec_of(path, 2, 1), "127.0.0.1", lambda _: None)
    link = RankSocket.connect(worker_group.address)
    link.send(encode(JoinWorkerGroup(1)))
    link.send(encode(RankFailure(why_failed(UnicodeError("model: no\nsuch form")), "Traceback")))
    with pytest.raises(ValueError, match=r"^model: no\nsuch form$"):
        worker_group.open_docks("m", "mixed", TransferConfig(), lambda *_: None)
    link.close()
    worker_group.close()


def test_rank_that_never_comes_is_reported_after_the_start_timeout(path: Path) -> None:
    worker_group = WorkerGroup(spec_of(path, 2, 1, start_timeout_s=1.0), "127.0.0.1", lambda _: None)
    with pytest.raises(Exception, match=r"[Tt]imeout|[Tt]imed out"):
        worker_group.load()
    worker_group.close()
    # It counts the group that it tried; that of the next worker group must agree.
    torch.distributed.distributed_c10d._world.group_count = 0
