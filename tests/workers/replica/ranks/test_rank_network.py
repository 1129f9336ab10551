"""The ranks of a worker group listen on their given addresses alone, and after the start to no stranger."""

import contextlib
import errno
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from crossdock.workers.replica.config import TransferConfig
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.ranks import worker_group as worker_group_module
from crossdock.workers.replica.ranks.rank_messages import JoinWorkerGroup, encode
from crossdock.workers.replica.ranks.rank_network import WorkerGroupStore
from crossdock.workers.replica.ranks.rank_socket import RankSocket
from crossdock.workers.replica.ranks.worker_group import WorkerGroup
from crossdock.workers.replica.serving.follower import follow
from crossdock.workers.replica.serving.model_start import worker_group_host
from tests.waiting import eventually
from tests.workers.architectures import build
from tests.workers.ranks import PROCESSES, saved
from tests.workers.replica.ranks.test_worker_group import tokens, works
from tests.workers.worker_groups import spec_of

DRIVER, FOLLOWER = "127.0.0.1", "127.0.0.2"  # two addresses of this machine stand for two nodes


def listening(pid: int | None = None) -> set[tuple[str, int]]:
    """Return the addresses and ports at which a process listens; None: this one."""
    found = psutil.Process(pid).net_connections("inet")
    return {(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN}


def hosts(found: set[tuple[str, int]]) -> set[str]:
    return {host for host, _ in found}


def is_refused(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=240).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return saved(build("llama", {}), tmp_path)


@pytest.fixture
def worker_group(path: Path) -> Iterator[WorkerGroup]:
    """A worker group whose follower has not come yet."""
    worker_group = WorkerGroup(spec_of(path, 2, 1), DRIVER, lambda _: None)
    yield worker_group
    worker_group.close()


def test_ranks_on_two_nodes_listen_on_their_own_addresses(path: Path) -> None:
    """The driver on one, the follower on another: for the group, for torch, and for pages of other replicas."""
    before = listening()
    spec = spec_of(path, 2, 1)
    worker_group = WorkerGroup(spec, DRIVER, lambda _: None)
    process = PROCESSES.Process(target=follow, args=(spec, 1, worker_group.address, FOLLOWER), daemon=True)
    process.start()
    try:
        engine = new_engine(worker_group.load(), spec.engine, worker_group=worker_group)
        assert hosts(listening() - before) == {DRIVER}
        loaded = listening(process.pid)
        assert hosts(loaded) == {FOLLOWER}
        told = TransferConfig(transport="tcp", host=DRIVER)  # as the driver's own dock is
        worker_group.open_docks("m", "mixed", told, lambda *_: None)
        docked = listening(process.pid)
        assert len(docked - loaded) == 1
        assert hosts(docked) == {FOLLOWER}
        assert [len(row) for row in tokens(engine, works(4))] == [8] * 4
    finally:
        worker_group.close()
        process.join(240)
    assert process.exitcode == 0


def test_worker_group_that_has_started_listens_no_more(path: Path) -> None:
    """Neither for followers nor at the store of torch, which authenticates no process."""
    spec = spec_of(path, 2, 1)
    worker_group = WorkerGroup(spec, DRIVER, lambda _: None)
    assert not is_refused(DRIVER, worker_group.address.port)
    assert not is_refused(DRIVER, worker_group.address.store_port)
    process = PROCESSES.Process(target=follow, args=(spec, 1, worker_group.address), daemon=True)
    process.start()
    try:
        worker_group.load()
        assert is_refused(DRIVER, worker_group.address.port)
        assert is_refused(DRIVER, worker_group.address.store_port)
    finally:
        worker_group.close()
        process.join(240)
    assert process.exitcode == 0


def test_follower_joins_a_driver_that_had_no_free_descriptor(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, numbers = socket.socket.accept, iter([errno.EMFILE, errno.ENFILE, errno.ECONNABORTED])

    def accept_later(listener: socket.socket) -> tuple[socket.socket, object]:
        if number := next(numbers, 0):
            raise OSError(number, "not now")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    worker_group = WorkerGroup(spec_of(path, 2, 1), DRIVER, lambda _: None)
    try:
        link = RankSocket.connect(worker_group.address)
        link.send(encode(JoinWorkerGroup(1)))
        eventually(lambda: worker_group._followers, "the follower does not join")
        link.close()
    finally:
        worker_group.close()


def test_sealed_store_still_serves_those_who_came_before() -> None:
    store = WorkerGroupStore(DRIVER)
    client = dist.TCPStore(DRIVER, store.port, is_master=False)  # type: ignore[attr-defined]
    store.seal()
    client.set("a", "b")
    assert store.store.get("a") == b"b"
    assert is_refused(DRIVER, store.port)


def test_strangers_beyond_the_bound_are_closed_and_a_follower_still_joins(
    worker_group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest go: a follower proves the cookie at once."""
    monkeypatch.setattr(worker_group_module, "_MAX_STRANGERS", 3)
    with contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection((DRIVER, worker_group.address.port))) for _ in range(10)
        ]
        for stranger in strangers[:7]:
            stranger.settimeout(240)
            while stranger.recv(64):  # the worker group's own half of the proof, then the end
                pass
        assert len(worker_group._strangers) == 3
        link = RankSocket.connect(worker_group.address)
        link.send(encode(JoinWorkerGroup(1)))
        worker_group._wait(lambda _: True, "did not join")
        link.close()


@pytest.mark.parametrize(("nodes", "host"), [(["a", "a"], "127.0.0.1"), (["a", "b"], "192.0.2.7")])
def test_driver_is_reached_by_loopback_only_where_all_ranks_are_on_its_node(
    nodes: list[str], host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.util.get_current_placement_group", lambda: None)
    monkeypatch.setattr("ray.util.placement_group_table", lambda _: {"bundles_to_node_id": dict(enumerate(nodes))})
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "192.0.2.7")
    assert worker_group_host() == host
