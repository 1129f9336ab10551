"""Pages in an object store: what was stored comes back, and whatever the store does costs seconds only."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from crossdock.workers.replica.tiers import object_tier
from crossdock.workers.replica.tiers.file_tier import FileTier
from crossdock.workers.replica.tiers.object_tier import ObjectTier, is_store
from crossdock.workers.schedule.memory.block_pool import STATES
from crossdock.workers.schedule.prefixes.tier_pages import PageKey
from tests.workers.architectures import build
from tests.workers.ranks import Ranks, saved
from tests.workers.replica.engine.test_tiers import PAGE_SIZE, PROMPTS, answers, engine_on, model_of, offer_all
from tests.workers.replica.engines import generated
from tests.workers.replica.ranks.test_worker_group_tiers import TWO, engine_with_files
from tests.workers.replica.tiers.object_server import BUCKET, Fault, ObjectServer, Request, object_server
from tests.workers.replica.tiers.test_file_tier import CONTENT, FINGERPRINT, key_of, only_file

pytest.importorskip("obstore", reason="needs obstore: pip install 'crossdock[objects]'")

URL = f"s3://{BUCKET}/kv/pages"
SIZE = len(CONTENT) + 65  # with its header


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with object_server(monkeypatch) as server:
        yield server


def opened(most_bytes: int = 1 << 20, fingerprint: bytes = FINGERPRINT) -> ObjectTier:
    return ObjectTier(URL, most_bytes, fingerprint)


def stored(tier: ObjectTier, key: PageKey) -> set[PageKey]:
    return tier.write(key, [memoryview(CONTENT[:100]), memoryview(CONTENT[100:])])


def read(tier: ObjectTier, key: PageKey) -> bytes | None:
    into = bytearray(len(CONTENT))
    return bytes(into) if tier.read(key, memoryview(into)) else None


def page_of(server: ObjectServer, key: PageKey) -> str:
    (found,) = (path for path in server.objects if path.endswith(key.page_hash.hex()))
    return found


def test_url_of_a_store_is_told_from_a_folder() -> None:
    assert all(map(is_store, ("s3://bucket/kv", "gs://bucket", "az://account/container")))
    assert not any(map(is_store, ("/var/cache/kv", "s3", "s3:/bucket", "kv", "https://host/kv")))


@pytest.mark.parametrize("group", [0, 7, STATES])
def test_page_comes_back_to_another_process(server: ObjectServer, group: int) -> None:
    stored(opened(), key_of(1, group))
    other = opened()
    assert other.changes() == ({key_of(1, group)}, set())
    assert other.changes() == (set(), set())
    assert read(other, key_of(1, group)) == CONTENT


def test_object_is_what_a_file_of_the_same_page_is(server: ObjectServer, tmp_path: Path) -> None:
    """So a folder can be copied to a bucket, and back."""
    stored(opened(), key_of(1))
    FileTier(tmp_path, 1 << 20, FINGERPRINT).write(key_of(1), [memoryview(CONTENT)])
    file = only_file(tmp_path)
    assert server.objects[f"kv/pages/{file.relative_to(tmp_path)}"][0] == file.read_bytes()


def test_looks_list_a_large_store_bit_by_bit(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.per_list = 3
    monkeypatch.setattr(object_tier, "_LISTED_AT_ONCE", 3)
    monkeypatch.setattr(object_tier, "_LISTS", 2)
    writer, reader = opened(), opened()
    for number in range(20):
        stored(writer, key_of(number))
    known, num_looks = set[PageKey](), 0
    while len(known) < 20:
        before, num_looks = server.seen["LIST"], num_looks + 1
        came, gone = reader.changes()
        assert not gone
        assert server.seen["LIST"] - before <= 3
        known |= came
    assert num_looks > 3
    stored(reader, key_of(100))
    del server.objects[page_of(server, key_of(7))]
    lost = [reader.changes() for _ in range(2 * num_looks + 2)]
    assert set().union(*(gone for _, gone in lost)) == {key_of(7)}, "not the page that was written meanwhile"
    assert set().union(*(came for came, _ in lost)) == set()


@pytest.mark.parametrize("spoil", ["cut", "lengthened", "changed", "swapped"])
def test_object_that_is_not_what_was_stored_is_a_miss_and_deleted(server: ObjectServer, spoil: str) -> None:
    tier = opened()
    for number in (1, 2):
        stored(tier, key_of(number))
    paths = [page_of(server, key_of(number)) for number in (1, 2)]
    content, written = server.objects[paths[0]]
    spoilt = {
        "cut": content[:-1],
        "lengthened": content + b"x",
        "changed": content[:-1] + b"x",
        "swapped": server.objects[paths[1]][0],
    }
    server.objects[paths[0]] = spoilt[spoil], written
    assert read(tier, key_of(1)) is None
    assert paths[0] not in server.objects
    assert read(tier, key_of(2)) == CONTENT


def test_objects_written_longest_ago_make_room_also_those_of_other_models(server: ObjectServer) -> None:
    other = opened(fingerprint=bytes(16))
    stored(other, key_of(50))
    tier = opened(5 * SIZE)
    tier.changes()
    gone = set[PageKey]()
    for number in range(12):
        gone |= stored(tier, key_of(number))
        held = [len(content) for content, _ in server.objects.values()]
        assert sum(held) <= tier.num_bytes <= 5 * SIZE
    assert read(other, key_of(50)) is None
    assert gone == {key_of(number) for number in range(12)} - {key for key in map(key_of, range(12)) if read(tier, key)}
    assert read(tier, key_of(11)) == CONTENT
    with pytest.raises(OSError, match="is larger than all objects may be"):
        stored(opened(100), key_of(1))


def test_pages_that_are_expected_are_fetched_at_once(server: ObjectServer) -> None:
    tier = opened()
    keys = [key_of(number) for number in range(20)]
    for key in keys:
        stored(tier, key)
    server.delay_s = 0.02
    assert [read(tier, key) for key in keys[:3]] == [CONTENT] * 3
    assert server.most_at_once == 1
    before = server.seen["GET"]
    tier.expect(keys)
    assert [read(tier, key) for key in keys] == [CONTENT] * 20
    assert server.seen["GET"] - before == 20
    assert server.most_at_once > 4
    tier.expect(keys[:10])
    assert read(tier, keys[0]) == CONTENT
    tier.expect(keys[15:16])
    assert read(tier, keys[15]) == CONTENT, "what was expected before is forgotten"


@pytest.mark.parametrize("fault", ["error", "hang", "cut"])
def test_fault_of_the_store_ends_within_its_deadline_and_the_next_request_is_right(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    monkeypatch.setattr(object_tier, "_ANSWER_S", 4.0)  # a busy machine needs a part of it for an answer
    tier = opened(4 * SIZE)
    stored(tier, key_of(1))
    tier.changes()
    started = time.monotonic()
    server.faults = dict.fromkeys(("PUT", "GET", "LIST", "DELETE"), fault)
    with pytest.raises(OSError, match="Error"):
        stored(tier, key_of(2))
    with pytest.raises(OSError, match="Error"):
        read(tier, key_of(1))
    assert tier.changes() == (set(), set())
    assert time.monotonic() - started < 240, "of a hang without a deadline"
    server.faults = {}
    assert read(tier, key_of(1)) == CONTENT
    assert tier.changes() == ({key_of(1)}, set()), "a page that could not be read is told of again"
    stored(tier, key_of(3))
    assert read(tier, key_of(3)) == CONTENT


def test_store_that_cannot_delete_takes_no_page_beyond_its_bound(server: ObjectServer) -> None:
    tier = opened(SIZE + SIZE // 2)
    stored(tier, key_of(1))
    server.faults = {"DELETE": "error"}
    for number in range(2, 5):
        with pytest.raises(OSError, match="Error"):
            stored(tier, key_of(number))
    assert sum(len(content) for content, _ in server.objects.values()) == SIZE


@pytest.mark.parametrize("request_", ["PUT", "LIST"])
def test_store_that_cannot_be_written_to_or_listed_is_refused(server: ObjectServer, request_: Request) -> None:
    server.faults = {request_: "error"}
    with pytest.raises(ValueError, match="kv_cache_files: s3://bucket/kv/pages must be a store that can be written to"):
        opened()


def test_engine_that_starts_again_finds_its_pages_in_the_store(server: ObjectServer) -> None:
    settings = {"kv_cache_files": f"{URL},1GiB"}
    model = model_of("llama")
    server.delay_s = 0.005
    with engine_on(model, 20) as plain:
        expected, _ = answers(plain, PROMPTS[:3])
    with engine_on(model, 20, **settings) as first:
        assert answers(first, PROMPTS[:3])[0] == expected
    server.faults = {"GET": "cut"}
    with engine_on(model, 20, **settings) as second:
        assert answers(second, PROMPTS[:1]) == (expected[:1], [0])
        assert second.tiers is not None
        assert second.tiers.counts()[0].missed == 1
    server.faults = {}
    with engine_on(model, 20, **settings) as third:
        tokens, cached = answers(third, PROMPTS[:1])
    assert tokens == expected[:1]
    assert cached[0] >= 10 * PAGE_SIZE
    assert server.most_at_once > 1, "pages of one prompt are fetched together"


def set_environment(values: dict[str, str]) -> None:
    os.environ.update(values)


def give_environment(ranks: Ranks) -> None:
    """Let the other ranks find the server."""
    names = [name for name in os.environ if name.startswith(("AWS_", "SSL_"))]
    for number in range(len(ranks.processes)):
        ranks.start(number, set_environment, {name: os.environ[name] for name in names})
        ranks.answer(number)


def test_ranks_keep_their_parts_in_objects_of_their_own(server: ObjectServer, ranks: Ranks, tmp_path: Path) -> None:
    give_environment(ranks)
    module = build("llama", {})
    path = saved(module, tmp_path)
    expected = generated(module, PROMPTS[:2], 5)
    with engine_with_files(ranks, path, TWO, URL) as engine:
        assert answers(engine, PROMPTS[:2]) == (expected, [0, 0])
        offer_all(engine)
    pages = [each.removeprefix("kv/pages/").split("/") for each in server.objects if not each.endswith(".writable")]
    first, second = {own for own, *_ in pages}
    assert [page for own, *page in pages if own == first] == [page for own, *page in pages if own == second] != []
    with engine_with_files(ranks, path, TWO, URL) as again:
        assert answers(again, PROMPTS[:2]) == (expected, [88, 88])
        assert again.tiers is not None
        assert again.tiers.counts()[0].missed == 0


def test_each_rank_reads_its_parts_ahead(
    server: ObjectServer, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver fetches one after the other here, so that what is fetched at once is what the other rank reads."""
    monkeypatch.setattr(object_tier, "_FETCHES", 1)
    give_environment(ranks)
    module = build("llama", {})
    path = saved(module, tmp_path)
    expected = generated(module, PROMPTS[:1], 5)
    with engine_with_files(ranks, path, TWO, URL) as engine:
        assert answers(engine, PROMPTS[:1]) == (expected, [0])
        offer_all(engine)
    server.delay_s = 0.05
    with engine_with_files(ranks, path, TWO, URL) as again:
        assert answers(again, PROMPTS[:1]) == (expected, [88])
    assert server.most_at_once > 4
