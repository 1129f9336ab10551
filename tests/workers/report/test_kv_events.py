"""KV events as messages: a reader with the types of vLLM 0.33 decodes them."""

from typing import Any

import pytest
from msgspec import Struct
from msgspec.msgpack import Decoder, decode
from pydantic import ValidationError

from crossdock.workers.report.kv_events import KVEventsConfig, encode, offset_port
from crossdock.workers.schedule.memory.page_events import (
    ClearedPages,
    PageEvent,
    RemovedPages,
    StoredPages,
    TieredPages,
)

HASHES = [bytes(range(16)), b"\xff" * 16]
NUMBERS = [0x08090A0B0C0D0E0F, 2**64 - 1]


class VllmEvent(Struct, tag=True, forbid_unknown_fields=True):
    """The base of vLLM's events, which are maps."""


class BlockStored(VllmEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class BlockRemoved(VllmEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(VllmEvent):
    pass


class KVEventBatch(Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


vllm_batch = Decoder(KVEventBatch)


def read(*events: PageEvent) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
    return vllm_batch.decode(encode(events, 2, 5.5, 3)).events


def test_batch_is_an_array_of_maps_as_in_vllm() -> None:
    message = encode([RemovedPages(HASHES)], 2, 5.5, 3)
    assert decode(message) == [5.5, [{"type": "BlockRemoved", "block_hashes": NUMBERS, "medium": "GPU"}], 3]


def test_vllms_types_read_each_event() -> None:
    stored = StoredPages(HASHES, b"\0" * 15 + b"\1", [1, 2, 3, 4], [b"", b""], "", "")
    assert read(stored, RemovedPages(HASHES[:1]), ClearedPages()) == [
        BlockStored([*NUMBERS], 1, [1, 2, 3, 4], 2, None, "GPU", None),
        BlockRemoved([NUMBERS[0]], "GPU"),
        AllBlocksCleared(),
    ]


def test_pages_in_tiers_have_vllms_media_and_no_tokens() -> None:
    """As its offloading connector has them: a reader looks up what it knows of the hashes."""
    events = read(TieredPages(HASHES, "host"), TieredPages(HASHES[:1], "files"), RemovedPages(HASHES[1:], "host"))
    assert events == [
        BlockStored([*NUMBERS], None, [], 0, None, "CPU", None),
        BlockStored(NUMBERS[:1], None, [], 0, None, "STORAGE", None),
        BlockRemoved(NUMBERS[1:], "CPU"),
    ]


def test_extra_keys_say_what_is_in_a_hash_beside_tokens() -> None:
    [event] = read(StoredPages(HASHES, None, [1, 2, 3, 4], [b"", b"\xab"], "sql", "secret"))
    assert isinstance(event, BlockStored)
    assert event.lora_name == "sql"
    assert event.extra_keys is not None
    first, second = event.extra_keys
    assert first is not None
    assert first[0] == "sql"
    assert len(first[1]) == 32
    assert "secret" not in first[1], "a salt keeps others out: nobody else learns it"
    assert second == ("sql", ["ab", 0])


def test_salt_is_in_the_keys_of_a_prompts_first_page_alone() -> None:
    [event] = read(StoredPages(HASHES, b"\1" * 16, [1, 2, 3, 4], [b"", b""], "", "secret"))
    assert isinstance(event, BlockStored)
    assert event.extra_keys == [None, None]


@pytest.mark.parametrize(
    ("endpoint", "moved"),
    [
        ("tcp://*:5557", "tcp://*:5560"),
        ("tcp://[::]:5557", "tcp://[::]:5560"),
        ("tcp://*:0", "tcp://*:0"),
        ("ipc:///run/kv", "ipc:///run/kv"),
    ],
)
def test_replicas_have_ports_of_their_own(endpoint: str, moved: str) -> None:
    assert offset_port(endpoint, 3) == moved


def test_port_beyond_the_last_is_refused() -> None:
    with pytest.raises(ValueError, match=r"65535 plus 1 is no port: give one below 65535"):
        offset_port("tcp://*:65535", 1)


def test_events_are_off_until_they_are_enabled() -> None:
    assert not KVEventsConfig.model_validate({}).is_on
    assert not KVEventsConfig.model_validate({"enable_kv_cache_events": True, "publisher": "null"}).is_on
    assert not KVEventsConfig.model_validate({"enable_kv_cache_events": False, "publisher": "zmq"}).is_on
    assert KVEventsConfig.model_validate({"enable_kv_cache_events": True}).is_on
    assert KVEventsConfig.model_validate({"publisher": "zmq"}).is_on, "SGLang has no other switch"


def test_replica_listens_or_connects_by_vllms_rule() -> None:
    endpoints = {"tcp://*:5557": True, "tcp://[::]:5557": True, "ipc:///run/kv": True, "tcp://router:5557": False}
    assert {each: KVEventsConfig.model_validate({"endpoint": each}).listens for each in endpoints} == endpoints


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("endpoint", "5557", "endpoint"),
        ("replay_endpoint", "tcp://*:5557", "must be another address than endpoint"),
        ("publisher", "kafka", "publisher"),
        ("buffer_steps", 0, "buffer_steps"),
        ("max_queue_size", 0, "max_queue_size"),
        ("port", 5557, "port"),
    ],
)
def test_wrong_setting_is_refused_by_its_name(field: str, value: object, error: str) -> None:
    with pytest.raises(ValidationError, match=error):
        KVEventsConfig.model_validate({field: value})
