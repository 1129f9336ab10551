"""Three pools in any history: one replica encodes, one computes prompts and one decodes. Every request ends, every page
comes back, and what a step reads of a picture is what was encoded."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from crossdock.workers.replica.transfer.landing import Landing
from crossdock.workers.schedule.batch import Batch, Scheduled
from crossdock.workers.schedule.pictures.arriving_rows import ArrivingRows
from crossdock.workers.schedule.pictures.encoding import Encoding
from crossdock.workers.schedule.pictures.encoding_leg import encoding_leg
from crossdock.workers.schedule.pictures.items import Item, items_in
from crossdock.workers.schedule.request import TokenDelta
from crossdock.workers.schedule.submission import Leg, Submission
from tests.workers.replica.any_pools import AnyPools
from tests.workers.replica.pools_world import PAGE_SIZE, TRANSFER, Client, PoolReplica, SansIoDock, World, blob_of

ROWS = "/rows"  # ends the name of the dock where a replica's embeddings land


def item(start: int, length: int, content: int) -> Item:
    return Item(start, length, length, "image", content.to_bytes(16, "little"))


@dataclass(eq=False)
class RowsNode:
    """The dock where rows land, as another process of the network sees it."""

    replica: "PictureReplica"
    dock: SansIoDock
    memory: dict[int, Any] = field(default_factory=dict)  # rows by page

    @property
    def is_dead(self) -> bool:
        return self.replica.is_dead


@dataclass(eq=False)
class PictureReplica(PoolReplica):
    """A replica that takes rows, and encodes what does not come."""

    capacity: int = 30
    num_landing: int = 6
    embeddings: dict[bytes, list[Any]] = field(default_factory=dict)
    num_encoded: int = 0

    def __post_init__(self) -> None:
        self.encoding = Encoding(self.capacity, arriving=ArrivingRows(self.num_landing, PAGE_SIZE))
        self.settings = self.settings | {"encoding": self.encoding}
        super().__post_init__()
        name = self.name + ROWS
        dock = SansIoDock(name, self.world, lambda event: self.inbox.append(lambda: self.landing.handle(event)))  # type: ignore[arg-type]
        self.node = RowsNode(self, dock)
        self.world.replicas[name] = self.node  # type: ignore[assignment]
        self.landing = Landing(self, dock, TRANSFER)  # type: ignore[arg-type]
        self.on_scheduled.append(self.encode)

    def add(self, submission: Submission) -> None:
        super().add(submission)
        self.landing.add(submission)

    def step(self) -> bool:
        while self.inbox:
            self.inbox.popleft()()
        self.landing.plan()
        return super().step()

    def encode(self, batch: Batch) -> None:
        """Do the encoder's work of a step, and check what its parts read."""
        for content_hash in batch.encoder.evicted:
            del self.embeddings[content_hash]
        for content_hash, pages, num_rows, _ in batch.encoder.landed:
            rows = [row for page in pages for row in self.node.memory[page]][:num_rows]
            assert rows == [(content_hash, number) for number in range(num_rows)], "rows of another picture"
            self.embeddings[content_hash] = rows
        for each in batch.encoder.items:
            self.embeddings[each.content_hash] = [(each.content_hash, number) for number in range(each.num_rows)]
            self.num_encoded += 1
        for part in batch.scheduled:
            for each in items_in(part.request.items, part.start, part.start + part.num_tokens):
                assert each.content_hash in self.embeddings


@dataclass(eq=False)
class EncoderReplica(PoolReplica):
    """A replica that encodes: its pages hold rows."""

    def __post_init__(self) -> None:
        self.encoding = Encoding(60)
        self.settings = self.settings | {"encoding": self.encoding}
        super().__post_init__()
        self.scheduler.eos_token_ids = ()

    def compute(self, part: Scheduled) -> None:
        rows = list[Any]([None]) * part.request.num_tokens
        for each in part.request.items:
            rows[each.start : each.end] = [(each.content_hash, number) for number in range(each.num_rows)]
        for position in range(part.start + part.num_tokens):
            page = self.memory.setdefault(part.pages[position // PAGE_SIZE], [None] * PAGE_SIZE)
            if position < part.start:
                assert page[position % PAGE_SIZE] == rows[position], "a prefix hit on another picture"
            page[position % PAGE_SIZE] = rows[position]


class EncodingWorld(World):
    """A third replica beside those of `World`, and a router that has it encode all pictures."""

    def __init__(self, encoder_pages: int, num_landing: int, *sizes: int, both_ways: bool, **settings: Any) -> None:
        self.num_landing = num_landing
        self.encoder_pages = encoder_pages
        super().__init__(*sizes, both_ways, **settings)
        self.sizes["E"] = encoder_pages
        self.encoder = self.start("E")
        self.encoders: dict[str, str] = {}  # by request id

    def start(self, role: str) -> PoolReplica:
        name = f"{role}{self.count}"
        self.count += 1
        if role == "E":
            replica: PoolReplica = EncoderReplica(name, self, self.encoder_pages, self.settings)
        else:
            replica = PictureReplica(name, self, self.sizes[role], self.settings, num_landing=self.num_landing)
        self.replicas[name] = replica
        return replica

    def ask(self, num_tokens: int, items: Sequence[Item], slo_class: str, max_tokens: int) -> Client:
        """Send a new request with pictures to three replicas."""
        self.next_items = items
        return self.submit(num_tokens, slo_class, max_tokens)

    def place(self, client: Client) -> None:
        if not client.attempt:
            client.submission = replace(client.submission, items=self.next_items)
        super().place(client)
        if not client.submission.items:
            return
        self.encoders[client.submission.id] = self.encoder.name
        for channel in (self.channels["router", client.prefill], self.channels["router", client.decode]):
            work = replace(channel.pop(), items=client.submission.items)
            encoder = blob_of(self.encoder.name) if work.leg is Leg.SEND else b""
            channel.append(replace(work, encoder=encoder))
            if work.leg is Leg.SEND:
                leg = encoding_leg(replace(work, peer=blob_of(client.prefill + ROWS)), PAGE_SIZE)
                self.post("router", self.encoder.name, leg)

    def give_up(self, client: Client) -> None:
        super().give_up(client)
        if (encoder := self.encoders.get(client.submission.id)) is not None:
            self.post("router", encoder, (client.submission.id, client.attempt))

    def hear(self, replica: str, delta: TokenDelta) -> None:
        if not replica.startswith("E"):  # whose end ends no attempt
            super().hear(replica, delta)

    def docks(self) -> list[SansIoDock]:
        pair = (self.prefill, self.decode)
        landing = [replica.node.dock for replica in pair if isinstance(replica, PictureReplica)]
        return [self.encoder.dock, *landing]

    def kill(self, role: str) -> None:
        if role == "E":
            dead = self.encoder.name
            self.encoder.is_dead = True
            self.encoder = self.start("E")
        else:
            dead = (self.prefill if role == "P" else self.decode).name + ROWS
            super().kill(role)
        for dock in self.docks():
            dock.peer_lost(dead, True)

    def pass_time(self, seconds: float) -> None:
        super().pass_time(seconds)
        for dock in self.docks():
            dock.tick()

    def go_round(self) -> None:
        super().go_round()
        self.encoder.step()

    def settle(self, most_rounds: int = 4000) -> None:
        super().settle(most_rounds)
        assert not self.encoder.scheduler.table.requests()
        counts = self.encoder.pages.counts()
        assert counts.owned == counts.quarantined == 0
        for replica in (self.prefill, self.decode):
            assert isinstance(replica, PictureReplica)
            assert replica.landing.rows.num_free == self.num_landing
            assert not replica.landing.rows.num_transfers
        for dock in self.docks():
            assert len(dock.sender) == len(dock.receiver) == 0


class EncodingPools(AnyPools):
    """Requests with pictures arrive, leave and lose replicas, on pages that few of them fill."""

    @initialize(
        spare=st.tuples(st.integers(1, 15), st.integers(1, 15), st.integers(1, 15)),
        landing=st.integers(1, 16),
        both_ways=st.booleans(),
        seqs=st.integers(2, 8),
    )
    def begin(self, spare: tuple[int, int, int], landing: int, both_ways: bool, seqs: int) -> None:
        sizes = [15 + each for each in spare]
        self.world = EncodingWorld(
            sizes[0], landing, *sizes[1:], both_ways=both_ways, max_num_seqs=seqs, starvation_s=5.0
        )

    @rule(
        sizes=st.lists(st.tuples(st.integers(0, 9), st.sampled_from([3, 8, 12]), st.integers(0, 2)), max_size=4),
        slo_class=st.sampled_from(["interactive", "standard", "batch"]),
        max_tokens=st.integers(1, 8),
        count=st.integers(1, 4),
    )
    def ask(self, sizes: list[tuple[int, int, int]], slo_class: str, max_tokens: int, count: int) -> None:
        place, items = 0, list[Item]()
        for gap, length, content in sizes:
            if place + gap + length < 48:
                items.append(item(place + gap, length, length * 100 + content))
                place += gap + length
        for _ in range(count):
            self.world.ask(place + 2, items, slo_class, max_tokens)

    @rule(choices=st.lists(st.integers(0, 99), min_size=1, max_size=30))
    def go_on(self, choices: list[int]) -> None:
        """Deliver messages, end writes and step replicas, in any order."""
        for choice in choices:
            kind, number = choice % 6, choice // 6
            ready = self.world.ready()
            if kind < 2 and ready:
                self.world.deliver(ready[number % len(ready)])
            elif kind == 2 and self.world.writes:
                self.world.land(number % len(self.world.writes))
            else:
                (self.world.prefill, self.world.decode, self.world.encoder)[kind % 3].step()

    @rule(role=st.sampled_from("PDEE"))
    def kill(self, role: str) -> None:
        self.world.kill(role)


TestEncodingPools = EncodingPools.TestCase
TestEncodingPools.settings = settings(
    max_examples=30, stateful_step_count=20, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


def test_pictures_are_encoded_by_the_encode_replica_alone() -> None:
    world = EncodingWorld(40, 40, 40, 40, both_ways=False)  # with landing pages for all
    for number in range(6):
        world.ask(40, [item(4, 8, number), item(20, 12, 100 + number)], "standard", 4)
    world.settle()
    assert isinstance(world.prefill, PictureReplica)
    assert world.prefill.encoding.totals.num_copied == 12
    assert world.prefill.num_encoded == 0
