"""KV events over ZMQ: a subscriber reads what a replica caches, and asks again for what it has missed."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

import httpx
import pytest
from msgspec.msgpack import decode

from crossdock.workers.replica.serving.kv_events import KVEventPublisher
from crossdock.workers.report.kv_events import KVEventsConfig
from crossdock.workers.schedule.memory.page_events import PageEvent, RemovedPages
from tests.cluster.ports import free_port
from tests.waiting import eventually, until
from tests.workers.replica.driven import driving
from tests.workers.replica.sides import pair, prompts, ship, submission

zmq = pytest.importorskip("zmq", reason="needs pyzmq: pip install 'crossdock[kv-events]'")

ANY_PORT = {"enable_kv_cache_events": True, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0", "topic": "kv"}
END = (-1).to_bytes(8, "big", signed=True)
MOST_MS = 60_000


@contextmanager
def publishing(**settings: Any) -> Iterator[KVEventPublisher]:
    publisher = KVEventPublisher(KVEventsConfig.model_validate(ANY_PORT | settings), 4)
    try:
        yield publisher
    finally:
        publisher.close()


@contextmanager
def socket(kind: int, address: str) -> Iterator[Any]:
    """Yield a socket that is connected to an address on which a replica listens."""
    context = zmq.Context()
    found = context.socket(kind)
    found.setsockopt(zmq.LINGER, 0)
    found.setsockopt(zmq.RCVTIMEO, MOST_MS)
    if kind == zmq.SUB:
        found.setsockopt(zmq.SUBSCRIBE, b"kv")
    found.connect(address.replace("0.0.0.0", "127.0.0.1"))
    try:
        yield found
    finally:
        found.close()
        context.term()


class Subscriber:
    """Reads batches in order. A subscription begins a moment after its connection: `join` waits for it."""

    def __init__(self, found: Any) -> None:
        self.socket = found
        self.batches: dict[int, list[Any]] = {}

    def join(self, publisher: KVEventPublisher) -> None:
        """Have batches published until one comes."""

        def comes() -> bool:
            publisher.publish([RemovedPages([])])
            return bool(self.socket.poll(10))

        eventually(comes, "no batch came")
        while publisher.num_batches - 1 not in self.batches:
            self.read()

    def read(self) -> list[Any]:
        """Return the next batch."""
        topic, number, message = self.socket.recv_multipart()
        assert topic == b"kv"
        batch: list[Any] = decode(message)
        self.batches[int.from_bytes(number, "big")] = batch
        return batch

    def read_until(self, publisher: KVEventPublisher) -> list[Any]:
        """Return the events of all batches up to the newest."""
        while max(self.batches) < publisher.num_batches - 1:
            self.read()
        return [event for number in sorted(self.batches) for event in self.batches[number][1]]


def replayed(publisher: KVEventPublisher, first: int) -> dict[int, Any]:
    """Return the batches from a number on, as the replay address sends them."""
    assert publisher.replay_endpoint is not None
    found: dict[int, Any] = {}
    with socket(zmq.DEALER, publisher.replay_endpoint) as asking:
        asking.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            empty, number, message = asking.recv_multipart()
            assert empty == b""
            if number == END:
                assert message == b""
                return found
            found[int.from_bytes(number, "big")] = decode(message)


def removed(number: int) -> list[PageEvent]:
    return [RemovedPages([number.to_bytes(16, "big")])]


def test_subscriber_gets_batches_in_order_with_their_numbers() -> None:
    with publishing() as publisher, socket(zmq.SUB, publisher.endpoint) as found:
        reader = Subscriber(found)
        reader.join(publisher)
        first = publisher.num_batches
        for number in range(50):
            publisher.publish(removed(number))
        reader.read_until(publisher)
        hashes = [reader.batches[first + number][1][0]["block_hashes"] for number in range(50)]
        assert hashes == [[number] for number in range(50)]


def test_step_without_events_publishes_nothing() -> None:
    with publishing() as publisher:
        publisher.publish([])
        assert publisher.num_batches == 0


def test_late_subscriber_asks_for_what_it_has_missed() -> None:
    with publishing() as publisher:
        for number in range(5):
            publisher.publish(removed(number))
        eventually(lambda: 4 in replayed(publisher, 0), "the newest batch never came")
        assert [*replayed(publisher, 2)] == [2, 3, 4]
        assert replayed(publisher, 5) == {}


def test_replay_keeps_the_newest_batches() -> None:
    with publishing(buffer_steps=3) as publisher:
        for number in range(8):
            publisher.publish(removed(number))
        eventually(lambda: 7 in replayed(publisher, 0), "the newest batch never came")
        assert [*replayed(publisher, 0)] == [5, 6, 7]


def test_replay_question_that_is_none_is_ignored() -> None:
    with publishing() as publisher:
        publisher.publish(removed(1))
        assert publisher.replay_endpoint is not None
        with socket(zmq.DEALER, publisher.replay_endpoint) as asking:
            asking.send_multipart([b"hello"])
            eventually(lambda: 0 in replayed(publisher, 0), "the replay does not answer any more")


def test_full_queue_loses_batches_and_counts_them_without_a_wait() -> None:
    with publishing(max_queue_size=2) as publisher:
        queue = publisher._queue
        queue.extend([(0, 0.0, [])] * 2)  # the thread sleeps: nothing has roused it
        publisher.publish(removed(1))
        assert (publisher.num_batches, publisher.num_lost) == (1, 1)


def test_second_replica_takes_the_next_free_port_and_rank() -> None:
    with publishing(replay_endpoint=None) as first:
        port = int(first.endpoint.rpartition(":")[2])
        with publishing(endpoint=f"tcp://*:{port}", replay_endpoint=None) as second:
            assert second.rank >= 1  # others on this machine may have the ports in between
            assert second.endpoint.endswith(f":{port + second.rank}")
            assert first.rank == 0


def test_address_that_cannot_be_listened_on_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"kv_events_config: endpoint ipc:///nowhere/kv cannot be used"):
        KVEventPublisher(KVEventsConfig.model_validate({"endpoint": "ipc:///nowhere/kv"}), 4)


def _nothing() -> None:
    """Do nothing between two steps: then the turn before has published its events."""


async def test_events_of_a_served_replica_are_those_of_its_index() -> None:
    settings = ANY_PORT | {"replay_endpoint": None}
    async with driving(kv_events_config=settings) as driven:
        publisher = driven.thread.kv_events
        assert publisher is not None
        with socket(zmq.SUB, publisher.endpoint) as found:
            reader = Subscriber(found)
            reader.join(publisher)
            await driven.run("a", 100)
            await driven.run("b", 50)
            await driven.thread.call(_nothing)
            index = driven.engine.pages.prefixes
            held = {_number(each) for each in index.findable()}
            stored = [each for each in reader.read_until(publisher) if each["type"] == "BlockStored"]
            assert {each for event in stored for each in event["block_hashes"]} == held
            size = driven.engine.config.page_size
            tokens = [token for event in stored for token in event["token_ids"]]
            assert len(tokens) == size * len(held)
            assert tokens[:4] == [4, 3, 4, 5]
            await driven.thread.call(driven.engine.pages.block_pool.clear_cache)
            await driven.thread.call(_nothing)
            assert reader.read_until(publisher)[-1] == {"type": "AllBlocksCleared"}
        assert driven.metric("crossdock_kv_event_batches", outcome="published") == publisher.num_batches
        assert driven.metric("crossdock_kv_event_batches", outcome="lost") == 0


@pytest.mark.skipif(
    not find_spec("dynamo"),
    reason="needs Dynamo's indexer: pip install --no-deps --require-hashes -r tests/no-deps.lock",
)
async def test_indexer_of_dynamo_finds_the_pages_of_a_served_replica() -> None:
    """It subscribes as to vLLM's replicas, and asks for what was published before."""
    async with driving(kv_events_config=ANY_PORT | {"topic": ""}) as driven:
        publisher = driven.thread.kv_events
        assert publisher is not None
        prompts = [[4, *(3 + i % 100 for i in range(99))], [5, *(3 + i % 100 for i in range(49))]]
        await driven.run("a", 100)
        with indexer_of_dynamo(publisher, driven.engine.config.page_size) as found:
            await driven.run("b", 50)
            await until(lambda: _heard(publisher) and [found(each) for each in prompts] == [96, 48])
            assert found([*prompts[0][:40], *prompts[1]]) == 32
            assert found(prompts[0][1:]) == 0
            await driven.thread.call(driven.engine.pages.block_pool.clear_cache)
            await driven.thread.call(_nothing)
            await until(lambda: [found(each) for each in prompts] == [0, 0])


def _heard(publisher: KVEventPublisher) -> bool:
    """Publish a batch, from whose number a subscriber sees what it has missed."""
    publisher.publish([RemovedPages([])])
    return True


@contextmanager
def indexer_of_dynamo(publisher: KVEventPublisher, page_size: int) -> Iterator[Callable[[list[int]], int]]:
    """Start an indexer that reads the events of one replica. Yield how many first tokens of a prompt it knows there."""
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "dynamo.indexer", "--port", url.rpartition(":")[2]]
    model = {"model_name": "tiny"}
    replica = {"instance_id": 1, "block_size": page_size, "dp_rank": 0, **model}
    for name, address in (("endpoint", publisher.endpoint), ("replay_endpoint", publisher.replay_endpoint)):
        replica[name] = f"{address}".replace("0.0.0.0", "127.0.0.1")
    with subprocess.Popen(command) as process, httpx.Client(base_url=url, timeout=240) as client:

        def is_up() -> bool:
            with suppress(httpx.TransportError):
                return client.get("/workers").is_success
            return False

        def known(tokens: list[int]) -> int:
            answer = client.post("/query", json={"token_ids": tokens, **model}).raise_for_status().json()
            return int(answer["scores"].get("1", {}).get("0", 0))

        try:
            eventually(is_up)
            client.post("/register", json=replica).raise_for_status()
            yield known
        finally:
            process.kill()


async def test_events_of_a_served_replica_say_which_pages_its_host_memory_has() -> None:
    """Without a cost every evicted page is stored."""
    small = {"kv_cache_memory": 200 << 10, "max_num_seqs": 1, "kv_cache_host_memory": 64 << 10, "is_warm": False}
    async with driving(kv_events_config=ANY_PORT | {"replay_endpoint": None}, **small) as driven:
        publisher = driven.thread.kv_events
        assert publisher is not None
        with socket(zmq.SUB, publisher.endpoint) as found:
            reader = Subscriber(found)
            reader.join(publisher)
            for name in ("a", "b", "c", "d"):
                await driven.run(name, 100)
            await driven.thread.call(_nothing)
            held: dict[str, set[int]] = {"GPU": set(), "CPU": set()}
            came: dict[str, int] = {"GPU": 0, "CPU": 0}
            for event in reader.read_until(publisher):
                hashes = set(event["block_hashes"])
                if event["type"] == "BlockStored":
                    came[event["medium"]] += len(hashes)
                    held[event["medium"]] |= hashes
                    assert event["medium"] == "GPU" or held["GPU"] >= hashes, "no reader knows the tokens"
                else:
                    held[event["medium"]] -= hashes
            [host] = driven.engine.scheduler.loading.tiers.tiers
            assert held["CPU"] == {_number(key.page_hash) for key in host.pages}
            assert held["GPU"] == {_number(each) for each in driven.engine.pages.prefixes.findable()}
            assert came["CPU"] > len(held["CPU"]) > 0, "some have given way"


def _number(page_hash: bytes) -> int:
    return int.from_bytes(page_hash[-8:], "big")


async def test_decode_replica_publishes_the_pages_that_came_to_it() -> None:
    events = {"kv_events_config": ANY_PORT | {"replay_endpoint": None}}
    async with pair("tcp", **events) as (prefill, decode_side):
        publisher = decode_side.thread.kv_events
        assert publisher is not None
        with socket(zmq.SUB, publisher.endpoint) as found:
            reader = Subscriber(found)
            reader.join(publisher)
            await ship(prefill, decode_side, submission(prompts()[6]))
            await decode_side.thread.call(_nothing)
            held = {_number(each) for each in decode_side.engine.pages.prefixes.findable()}
            assert held
            stored = [each for each in reader.read_until(publisher) if each["type"] == "BlockStored"]
            assert {each for event in stored for each in event["block_hashes"]} == held
