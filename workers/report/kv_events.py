"""Writes the events of a replica's cached pages in the form of vLLM's KV events: settings and messages.

The messages are those of vLLM 0.33: `EventBatch` is an array, its events are maps with the name of their class under
`type`. Readers of vLLM's events, such as llm-d's and Dynamo's routers, read ours.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Literal, Self, TypeAlias

from msgspec import Struct
from msgspec.msgpack import Encoder
from pydantic import BaseModel, ConfigDict, Field, model_validator

from crossdock.workers.schedule.memory.page_events import PageEvent, RemovedPages, StoredPages, TieredPages
from crossdock.workers.schedule.request.page_hashes import PageHash

NEEDS_PYZMQ = (
    "kv_events_config: events need pyzmq, which is not installed; pip install 'crossdock[kv-events]', or leave it out"
)
_ENDPOINT = r"tcp://[^\s/]+:\d{1,5}|ipc://\S+"
_MEDIA = {"": "GPU", "host": "CPU", "files": "STORAGE"}  # vLLM's words. GPU: the pool that steps read, on CPUs too
_SALT_BYTES = 16


class KVEventsConfig(BaseModel):
    """Where a replica publishes what happens to its cached pages. Names and defaults as in vLLM."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enable_kv_cache_events: bool | None = Field(
        None, description="Publish events; null: if publisher is zmq, as in SGLang."
    )
    publisher: Literal["null", "zmq"] | None = Field(
        None, description="zmq: publish; null as a word: do not; null: as enable_kv_cache_events says."
    )
    endpoint: str = Field(
        "tcp://*:5557",
        pattern=rf"^({_ENDPOINT})$",
        description="ZMQ address of events: tcp://*:PORT listens, tcp://HOST:PORT connects, ipc://PATH listens. A "
        "replica that finds the port taken listens on the next one.",
    )
    replay_endpoint: str | None = Field(
        None,
        pattern=rf"^({_ENDPOINT})$",
        description="ZMQ address that sends earlier events again, tcp://*:PORT; null: none.",
    )
    buffer_steps: int = Field(10_000, ge=1, description="Batches of events that are kept to be sent again.")
    hwm: int = Field(100_000, ge=1, description="Batches that wait for one slow reader, before it misses some.")
    max_queue_size: int = Field(100_000, ge=1, description="Batches that wait to be published, before some are lost.")
    topic: str = Field("", description="Topic of all messages.")

    @property
    def is_on(self) -> bool:
        """Whether anything is published."""
        if self.enable_kv_cache_events is None:
            return self.publisher == "zmq"
        return self.enable_kv_cache_events and self.publisher != "null"

    @property
    def listens(self) -> bool:
        """Whether readers connect to the replica, by vLLM's rule; else the replica connects to one reader."""
        return "*" in self.endpoint or "::" in self.endpoint or self.endpoint.startswith("ipc://")

    @property
    def fits_replicas(self) -> bool:
        """Whether several replicas of one machine can publish: each on a port of its own."""
        addresses = [self.endpoint, *([self.replay_endpoint] if self.replay_endpoint else [])]
        return self.listens and all(address.startswith("tcp://") for address in addresses)

    @model_validator(mode="after")
    def _addresses_differ(self) -> Self:
        if self.replay_endpoint == self.endpoint and not self.endpoint.endswith(":0"):  # which is any free port
            raise ValueError(f"replay_endpoint ({self.replay_endpoint}) must be another address than endpoint")
        return self


def offset_port(endpoint: str, offset: int) -> str:
    """Return an endpoint whose port is larger by `offset`. Paths, and port 0, which is any free port, stay.

    Raises:
        ValueError: there is no such port.
    """
    found = re.fullmatch(r"(tcp://.*:)(\d+)", endpoint)
    if found is None or int(found[2]) == 0:
        return endpoint
    port = int(found[2]) + offset
    if port > 65_535:
        raise ValueError(f"kv_events_config: {endpoint} plus {offset} is no port: give one below {65_536 - offset}")
    return f"{found[1]}{port}"


class BlockStored(Struct, tag=True, omit_defaults=True, gc=False):
    """Pages that readers may count on. The names and the order are vLLM's."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str | tuple[str, int], ...] | None] | None = None


class BlockRemoved(Struct, tag=True, omit_defaults=True, gc=False):
    """Pages that are gone."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Struct, tag=True, omit_defaults=True, gc=False):
    """All pages are gone."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(Struct, array_like=True, omit_defaults=True, gc=False):
    """The events of one step."""

    ts: float  # Unix time, in seconds
    events: list[Event]
    data_parallel_rank: int | None = None


_ENCODER = Encoder()


def encode(events: Sequence[PageEvent], page_size: int, unix_time: float, rank: int) -> bytes:
    """Return the message of some events. `rank`: tells replicas of one machine apart, as vLLM's data-parallel rank."""
    return _ENCODER.encode(EventBatch(unix_time, [_event(each, page_size) for each in events], rank))


def _event(event: PageEvent, page_size: int) -> Event:
    if isinstance(event, StoredPages):
        parent = None if event.parent is None else _number(event.parent)
        hashes = [_number(each) for each in event.hashes]
        name = event.adapter or None
        return BlockStored(hashes, parent, event.token_ids, page_size, None, _MEDIA[""], name, _extra_keys(event))
    if isinstance(event, RemovedPages):
        return BlockRemoved([_number(each) for each in event.hashes], _MEDIA[event.tier])
    if isinstance(event, TieredPages):
        # As vLLM's offloaded blocks: the reader knows their tokens from when they were stored in a pool.
        return BlockStored([_number(each) for each in event.hashes], None, (), 0, None, _MEDIA[event.tier], None)
    return AllBlocksCleared()


def _number(page_hash: PageHash) -> int:
    """Return the last 64 bits of a hash, as vLLM publishes its own."""
    return int.from_bytes(page_hash[-8:], "big")


def _extra_keys(event: StoredPages) -> list[tuple[str | tuple[str, int], ...] | None] | None:
    """Return for each page the parts of its hash beside its tokens; None: no page has any.

    As in vLLM: the adapter, what the page's pictures are, and, in a prompt's first page, the salt. A hash stands for
    the salt: who knows the salt of others could learn from the times of answers what they ask.
    """
    if not (event.adapter or event.cache_salt or any(event.page_keys)):
        return None
    salt = hashlib.blake2b(event.cache_salt.encode(), digest_size=_SALT_BYTES).hexdigest() if event.cache_salt else ""
    keys = list[tuple[str | tuple[str, int], ...] | None]()
    for number, page_key in enumerate(event.page_keys):
        own: tuple[str | tuple[str, int], ...] = (event.adapter,) if event.adapter else ()
        if page_key:
            own += ((page_key.hex(), 0),)
        if salt and event.parent is None and not number:
            own += (salt,)
        keys.append(own or None)
    return keys
