"""A prefill and a decode replica without models, threads and network: real schedulers, page pools, handovers and
transfer protocol. Messages are late or lost as a test chooses. A small router places requests again.

Pages have content: of each token, a hash of all tokens up to it. Steps check what they read, in every group of layers,
and writes copy it."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from types import SimpleNamespace
from typing import Any, NamedTuple
from zlib import crc32

import msgspec

from crossdock.kvtransfer.calls import DockCall, PeerDeadCall
from crossdock.kvtransfer.dock_core import DockCore, DockCounts
from crossdock.kvtransfer.events import Figures
from crossdock.kvtransfer.layout import LayerShape, PageGroup, PoolSpec, Shard
from crossdock.kvtransfer.messages import Checksum, Grant, Pages
from crossdock.kvtransfer.plan import GroupRanges, PageCopies
from crossdock.kvtransfer.transport import Memory, Peer, Received, TransportEvent, WriteDone, WriteFailed
from crossdock.workers.replica.config import TransferConfig
from crossdock.workers.replica.engine.engine import Step
from crossdock.workers.replica.transfer.handover import Handover
from crossdock.workers.schedule.drafts.drafting import DraftPolicy
from crossdock.workers.schedule.drafts.speculative_config import SpeculativeConfig
from crossdock.workers.schedule.memory.pages import PagePool
from crossdock.workers.schedule.memory.prefix_index import HOLE, Window
from crossdock.workers.schedule.prefixes.loading import PrefixLoad
from crossdock.workers.schedule.prefixes.tier_pages import PageKey, PageTier, TierPages
from crossdock.workers.schedule.request.batch import Scheduled
from crossdock.workers.schedule.request.page_hashes import PageHash
from crossdock.workers.schedule.request.request import FinishReason, Request, TokenDelta
from crossdock.workers.schedule.request.submission import Leg, SamplingParams, Submission
from tests.workers.schedule.model_free_replica import (
    CLASSES,
    COST,
    begin_step,
    first_seen,
    new_scheduler,
    reference_output,
    sampled_by,
)

PAGE_SIZE = 4
LONGEST = 60  # tokens of a request
DRAFTS = SpeculativeConfig(method="ngram", num_speculative_tokens=5)
TRANSFER = TransferConfig(deadline_s=3.0, grace_s=0.5)


class OpenWrite(NamedTuple):
    """Pages on their way from one dock to another, with the message that follows them. `number`: of the sender's."""

    source: str
    number: int
    target: str
    copies: Sequence[PageCopies]
    message: bytes


@dataclass(eq=False)
class WorldTransport:
    """Moves the pages and messages of one dock when the test lets the world do so."""

    name: str
    world: "World"
    kind: str = "world"
    lost_is_fence: bool = True
    busy_seconds: float = inf
    idle_seconds: float = inf
    num_writes: int = 0

    def open(self, name: str, memory: Memory) -> bytes:
        return b""

    def connect(self, peer: Peer, page_bytes: int, num_pages: int, ranges: GroupRanges) -> None:
        pass

    def write(self, peer: str, copies: Sequence[PageCopies], message: bytes) -> int:
        self.num_writes += 1
        self.world.writes.append(OpenWrite(self.name, self.num_writes, peer, copies, message))
        return self.num_writes

    def send(self, peer: str, message: bytes) -> None:
        self.world.post(self.name, peer, message)

    def poll(self, seconds: float) -> list[TransportEvent]:
        return []

    def wake(self) -> None:
        pass

    def disconnect(self, peer: str, *, is_idle: bool = False) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(eq=False)
class WorldChecksums:
    """Sums the content of pages, which stays as it is from the begin of a write to its end, and then at the target."""

    name: str
    world: "World"

    def of_write(self, copies: Sequence[PageCopies], _: PoolSpec) -> Checksum:
        content = [self.content(copy.source_pages) for copy in copies]
        states = [copy.target_pages for copy in copies if copy.group == len(self.world.windows)]
        return Checksum(crc32(repr(content).encode()), states[0] if states else ())

    def agrees(self, message: Pages, grant: Grant, _: PoolSpec) -> bool:
        if message.checksum is None:  # no page came with it
            return True
        end = message.first_page + message.num_pages
        starts = [max(message.first_page, group.first) for group in grant.groups]
        pages = [
            group.pages[start - group.first : end - group.first]
            for start, group in zip(starts, grant.groups, strict=True)
            if start < end
        ]
        states = [message.checksum.state_pages] if message.checksum.state_pages else []
        content = [self.content(each) for each in [*pages, *states]]
        return crc32(repr(content).encode()) == message.checksum.crc32

    def content(self, pages: Sequence[int]) -> list[list[int | None]]:
        return [self.world.replicas[self.name].memory[page] for page in pages]


@dataclass(eq=False)
class WorldDock:
    """Takes the calls of `ReplicaDock` for its one rank, by the core of a real dock."""

    name: str
    world: "World"
    on_event: Callable[[object], None]
    core: DockCore = field(init=False)

    def __post_init__(self) -> None:
        spec = self.world.spec
        two_pages = 2 * spec.page_bytes  # of a write: states are divided too
        transport = WorldTransport(self.name, self.world)
        own = self.world.rank_blob(self.name)
        checksums: Any = WorldChecksums(self.name, self.world)
        times = TRANSFER.grace_s, two_pages, self.world.clock
        self.core = DockCore(transport, spec, own, self.on_event, *times, checksums)

    @property
    def blob(self) -> bytes:
        return self.world.blob(self.name)

    def call(self, call: DockCall) -> None:
        self.core.make(call, self.core.partners_of(call), self.world.now)


@dataclass(eq=False)
class PoolReplica:
    """One replica: steps as `EngineThread` does, with every token known from the tokens before it."""

    name: str
    world: "World"
    num_pages: int
    settings: dict[str, Any]
    is_dead: bool = False
    inbox: deque[Callable[[], None]] = field(default_factory=deque)

    memory: dict[int, list[int | None]] = field(default_factory=dict)  # by page: the content of its tokens
    stored: dict[PageKey, list[list[int | None]]] = field(default_factory=dict)  # by evicted page: its content
    loads: list[PrefixLoad] = field(default_factory=list)  # that end before the next step

    def __post_init__(self) -> None:
        defaults = {"max_num_batched_tokens": 24, "max_num_seqs": 8, "admission": "queue", "slo_classes": CLASSES}
        drafting = DraftPolicy(DRAFTS) if self.world.is_drafting else None
        settings = defaults | self.settings
        self.tier = PageTier("host", store_s=1e-4, load_s=1e-4)
        self.scheduler = new_scheduler(
            self.num_pages,
            LONGEST,
            cost=COST,
            drafting=drafting,
            windows=self.world.windows,
            state_pages=self.world.state_pages,
            tiers=TierPages([self.tier]) if self.world.has_tiers else None,
            on_evict=self.store if self.world.has_tiers else None,
            **settings,
        )
        self.pages: PagePool = self.scheduler.pages
        self.config, self.executor = SimpleNamespace(page_size=PAGE_SIZE), SimpleNamespace(vocab_size=1000)
        self.dock = WorldDock(self.name, self.world, lambda event: self.inbox.append(lambda: self.handle(event)))
        self.head = None  # which would draft
        self.handover = Handover(self, self.dock, TRANSFER, self.world.transferred)  # type: ignore[arg-type]

    # -- what Handover calls of an Engine ----------------------------------------------------------------------------

    def clock(self) -> float:
        return self.world.now

    def abort(self, request_id: str) -> Request | None:
        return self.scheduler.abort(request_id)

    def arrive(self, request_id: str, token_id: int) -> None:
        self.scheduler.handoff.start_decoding(request_id, token_id, self.world.now)

    def ship(self, request_id: str) -> None:
        self.scheduler.handoff.finish_sent(request_id)

    def take_returned(self) -> list[Request]:
        return self.scheduler.table.take_returned()

    # -- what EngineThread does --------------------------------------------------------------------------------------

    def add(self, submission: Submission) -> None:
        if self.scheduler.table.get(submission.id) is not None:
            self.leave(submission.id, submission.epoch - 1)
        self.scheduler.add(Request(submission, self.world.now))
        self.handover.add(submission)

    def leave(self, request_id: str, epoch: int) -> None:
        """Abort an attempt, or any before it."""
        request = self.scheduler.table.get(request_id)
        if request is not None and request.epoch <= epoch:
            self.scheduler.abort(request_id)
            self.handover.aborted(request)

    def handle(self, event: Any) -> None:
        self.report(self.handover.handle(event))

    def report(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            self.world.post(self.name, "router", delta)

    def store(self, group: int, page_hash: PageHash, pages: Sequence[int], _: float) -> None:
        key = PageKey(group, page_hash)
        self.stored[key] = [list(self.memory[page]) for page in pages]
        self.tier.stored(key, 1e-4)

    def end_loads(self) -> None:
        """End the loads that began before the last step."""
        loads, self.loads = self.loads, self.scheduler.loading.take_begun()
        for load in loads:
            for number in iter(load.take, None):
                each = load.pages[number]
                self.memory.update(zip(each.pages, map(list, self.stored[each.key]), strict=True))
                self.world.num_loaded += len(each.pages)
                load.land()
            self.scheduler.loading.end(load)

    def step(self) -> bool:
        """Do one turn. Return whether something was computed."""
        while self.inbox:
            self.inbox.popleft()()
        self.end_loads()
        self.report(self.handover.plan())
        batch = None
        if self.scheduler.table.has_work:
            batch = begin_step(self.scheduler, self.world.now)
            self.handover.scheduled(batch)
            for part in batch.scheduled:
                self.compute(part)
            sampled = {
                part.request.id: sampled_by(part, [*part.request.token_ids, *part.drafts])
                for part in batch.scheduled
                if part.samples
            }
            deltas = self.scheduler.update(batch, sampled, self.world.now)
            self.report(deltas)
            self.report(self.handover.step(Step(batch, deltas, self.world.now)))
        else:
            self.report(self.handover.step(None))
        return bool(batch)

    def compute_state(self, part: Scheduled, tokens: Sequence[int]) -> None:
        """Check the recurrent state that a part of a step reads, and write the one after it."""
        assert len(part.state.write) == self.world.state_pages
        assert len(part.state.read) == (self.world.state_pages if part.start else 0)
        for number, page in enumerate(part.state.read):
            found, expected = self.memory[page], [hash((number, *tokens[: part.start]))]
            assert found == expected, f"{part.request.id} reads another state at {part.start}"
        for number, page in enumerate(part.state.write):
            self.memory[page] = [hash((number, *tokens))]

    def compute(self, part: Scheduled) -> None:
        """Check the tokens that a part of a step reads, and write its own, in every group of layers."""
        tokens = [*part.request.token_ids[: part.start + part.num_tokens - len(part.drafts)], *part.drafts]
        end = part.start + part.num_tokens
        assert len(tokens) == end
        self.compute_state(part, tokens)
        for group, pages in enumerate((part.pages, *part.further_pages)):
            window = self.world.windows[group]
            for position in range(first_seen(window, part.start), end):
                page, at = pages[position // PAGE_SIZE], position % PAGE_SIZE
                assert page != HOLE, f"{part.request.id} reads a page of token {position} that was given back"
                content = hash((group, *tokens[: position + 1]))
                if position < part.start:
                    found = self.memory[page][at]
                    assert found == content, f"{part.request.id} reads another token at {position} of group {group}"
                else:
                    if at == 0 or len(self.memory.get(page, ())) != PAGE_SIZE:  # it may have been a state's
                        self.memory[page] = [None] * PAGE_SIZE
                    self.memory[page][at] = content


@dataclass(eq=False)
class Client:
    """One request of a client, as the router knows it."""

    submission: Submission
    began: float
    attempt: int = 0
    began_at: int = 0  # tokens of the output before this attempt
    output: list[int] = field(default_factory=list)
    prefill: str = ""
    decode: str = ""
    is_over: bool = False
    num_returned: int = 0
    shows_decode: bool = False  # the decode replica has pages for this attempt, or has computed the prompt itself


class World:
    """Two replicas, what travels between them, and a router. `both_ways`: every other request is prefilled by the
    decode replica, as between two mixed ones. `is_fetching`: prompts share prefixes, and who computes one asks the
    other replica for all of it; every third request has no other leg."""

    def __init__(
        self,
        prefill_pages: int,
        decode_pages: int,
        both_ways: bool = False,
        is_drafting: bool = False,
        windows: Sequence[Window] = (None,),
        state_pages: int = 0,
        is_fetching: bool = False,
        has_tiers: bool = False,
        **settings: Any,
    ) -> None:
        self.now = 0.0
        self.has_tiers = has_tiers
        self.num_loaded = 0  # pages, from tiers
        self.is_fetching = is_fetching
        self.windows = windows  # of each group of layers
        self.state_pages = state_pages  # of the recurrent state of one request
        self.num_copied = 0  # pages, from replica to replica
        self.num_fetched = 0  # prefixes that have arrived
        self.num_damaged = 0  # writes of which a page is another one at the target
        self.num_refused = 0  # transfers that ended with such a page
        self.both_ways = both_ways
        self.is_drafting = is_drafting
        self.channels: dict[tuple[str, str], deque[Any]] = {}
        self.writes: list[OpenWrite] = []
        self.clients: dict[str, Client] = {}
        self.sizes = {"P": prefill_pages, "D": decode_pages}
        self.settings = settings
        self.count = 0
        self.replicas: dict[str, PoolReplica] = {}
        self.prefill, self.decode = self.start("P"), self.start("D")

    def clock(self) -> float:
        return self.now

    @cached_property
    def spec(self) -> PoolSpec:
        """The pool of each replica, by the number of its groups: one layer in each."""
        layers = (LayerShape(1, 1, 1),) * len(self.windows)
        groups = tuple(PageGroup(None, (number,)) for number in range(len(layers)))
        shard = Shard(0, ((0, 1),) * len(layers))
        state = "states" if self.state_pages else ""
        return PoolSpec("model", "int8", 1, PAGE_SIZE, layers, (shard,), 0, 1000, groups, state)

    def rank_blob(self, name: str) -> bytes:
        return Peer(name, WorldTransport.kind, b"", self.spec).pack()

    def blob(self, name: str) -> bytes:
        """Return the blob of a replica of one rank, by the name of its dock."""
        return msgspec.msgpack.encode([self.rank_blob(name)])

    def start(self, role: str) -> PoolReplica:
        name = f"{role}{self.count}"
        self.count += 1
        replica = self.replicas[name] = PoolReplica(name, self, self.sizes[role], self.settings)
        return replica

    def transferred(self, request: str, direction: str, figures: Figures, outcome: str) -> None:
        self.num_fetched += (direction, outcome) == ("fetched", "arrived")
        self.num_refused += outcome == "checksum"
        assert self.num_refused <= self.num_damaged, "pages that nothing has damaged are refused"

    # -- router ------------------------------------------------------------------------------------------------------

    def submit(self, num_tokens: int, slo_class: str, max_tokens: int) -> Client:
        """Send a new request of a client to both replicas."""
        name = f"r{len(self.clients)}"
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        number = len(self.clients) % 2 if self.is_fetching else len(self.clients) * 7
        number = len(self.clients) % 5 if self.has_tiers and not self.is_fetching else number  # evicted ones come back
        prompt = [(number + at) % 40 + 1 for at in range(num_tokens)]
        client = self.clients[name] = Client(Submission(name, prompt, sampling, slo_class=slo_class), self.now)
        self.place(client)
        return client

    def place(self, client: Client) -> None:
        work = client.submission
        client.shows_decode, client.began_at = False, len(client.output)
        client.prefill, client.decode = self.prefill.name, self.decode.name
        if self.both_ways and int(work.id[1:]) % 2:
            client.prefill, client.decode = client.decode, client.prefill
        common = {
            "epoch": client.attempt,
            "output_token_ids": tuple(client.output),
            "may_refuse": False,
            "waited_s": self.now - client.began,
        }
        legs = [(Leg.RECEIVE, client.decode, client.prefill), (Leg.SEND, client.prefill, client.decode)]
        if self.is_fetching and int(work.id[1:]) % 3 == 0:
            legs = [(Leg.LOCAL, client.decode, client.prefill)]
        for leg, name, peer in legs:
            if self.is_fetching and leg is not Leg.RECEIVE:
                common |= {"source": self.blob(peer), "source_tokens": len(work.prompt_token_ids) + len(client.output)}
            submission = Submission(
                work.id,
                work.prompt_token_ids,
                work.sampling,
                slo_class=work.slo_class,
                leg=leg,
                peer=self.blob(peer),
                **common,
            )
            self.post("router", name, submission)

    def give_up(self, client: Client) -> None:
        for name in (client.prefill, client.decode):
            self.post("router", name, (client.submission.id, client.attempt))

    def place_again(self, client: Client) -> None:
        self.give_up(client)
        client.attempt += 1
        self.place(client)

    def leave(self, client: Client) -> None:
        """The client is gone."""
        if not client.is_over:
            client.is_over = True
            self.give_up(client)

    def hear(self, replica: str, delta: TokenDelta) -> None:
        client = self.clients[delta.request_id]
        if client.is_over or delta.epoch != client.attempt:
            return
        if replica == client.decode:
            is_grant = not delta.token_ids and delta.finish_reason is None
            client.shows_decode |= is_grant or delta.first == client.began_at
            assert client.shows_decode or not delta.token_ids, "tokens of pages that it has not granted"
        fresh = delta.token_ids[max(len(client.output) - delta.first, 0) :]
        assert delta.first <= len(client.output) or replica == client.decode
        if delta.first > len(client.output):  # the first token is late: its channel is another one
            self.post(replica, "router", delta)
            return
        client.output += fresh
        match delta.finish_reason:
            case None | FinishReason.SHIPPED:
                pass
            case FinishReason.RETURNED:
                client.num_returned += 1
                self.place_again(client)
            case _:
                assert delta.finish_reason is FinishReason.LENGTH, delta
                client.is_over = True
                self.give_up(client)
                expected = reference_output(client.submission.prompt_token_ids, client.submission.sampling, LONGEST)
                assert client.output == expected

    # -- network and faults ------------------------------------------------------------------------------------------

    def post(self, sender: str, receiver: str, message: Any) -> None:
        self.channels.setdefault((sender, receiver), deque()).append(message)

    def ready(self) -> list[tuple[str, str]]:
        return sorted(key for key, messages in self.channels.items() if messages)

    def deliver(self, key: tuple[str, str]) -> None:
        sender, receiver = key
        message = self.channels[key].popleft()
        if receiver == "router":
            self.hear(sender, message)
            return
        replica = self.replicas[receiver]
        if replica.is_dead:
            return
        if isinstance(message, Submission):
            replica.inbox.append(lambda: replica.add(message))
        elif isinstance(message, tuple):
            replica.inbox.append(lambda: replica.leave(*message))
        else:
            replica.dock.core.handle(Received(sender, message))

    def lose(self, key: tuple[str, str]) -> None:
        """Lose a message between the replicas, as a transport without connections may."""
        if "router" not in key:
            self.channels[key].popleft()

    def land(self, number: int, *, is_damaged: bool = False) -> None:
        """End an open write: its data and its message are at the target. `is_damaged`: the last page as another one."""
        write = self.writes.pop(number)
        source, target = self.replicas[write.source], self.replicas[write.target]
        if source.is_dead:
            return
        if target.is_dead:
            source.dock.core.handle(WriteFailed(write.number, "dead"))
            return
        for copy in write.copies:
            for here, there in zip(copy.source_pages, copy.target_pages, strict=True):
                target.memory[there] = list(source.memory[here])
                self.num_copied += 1
        if is_damaged:
            self.num_damaged += 1
            target.memory[write.copies[-1].target_pages[-1]] = [-1] * PAGE_SIZE
        self.post(write.source, write.target, write.message)
        source.dock.core.handle(WriteDone(write.number))

    def kill(self, role: str) -> None:
        """End a replica; another of its role starts, and the router hears of the death."""
        old = self.prefill if role == "P" else self.decode
        old.is_dead = True
        new = self.start(role)
        if role == "P":
            self.prefill = new
        else:
            self.decode = new
        for replica in (self.prefill, self.decode):
            replica.dock.call(PeerDeadCall(self.rank_blob(old.name)))
        for client in self.clients.values():
            if not client.is_over and old.name in (client.prefill, client.decode):
                self.place_again(client)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for replica in (self.prefill, self.decode):
            replica.dock.core.tick()

    # -- to the end --------------------------------------------------------------------------------------------------

    def go_round(self) -> bool:
        """Deliver what is on its way, land all writes, and step both replicas. Return whether anything was there."""
        keys = self.ready()
        for key in keys:
            for _ in range(len(self.channels[key])):
                self.deliver(key)
        is_moving = bool(keys or self.writes)
        while self.writes:
            self.land(0)
        for replica in (self.prefill, self.decode):
            is_moving |= replica.step()
        self.pass_time(0.01)
        return is_moving

    def settle(self) -> None:
        """Go on without faults: every request ends, and every page is free."""
        began = self.now
        while not all(client.is_over for client in self.clients.values()) and self.now < began + 40.0:
            if not self.go_round():
                self.pass_time(0.1)  # only a clock ends what waits now
        open_requests = [client.submission.id for client in self.clients.values() if not client.is_over]
        assert not open_requests, f"not everything ends: {open_requests}; {self.describe()}"
        for _ in range(50):
            self.go_round()
            self.pass_time(0.2)
        for replica in (self.prefill, self.decode):
            counts = replica.pages.counts()
            assert counts.owned == counts.quarantined == 0, f"{replica.name}: {counts}"
            assert not replica.scheduler.table.requests()
            assert replace(replica.dock.core.counts, num_unknown=0) == DockCounts(0, 0, 0, 0)

    def describe(self) -> str:
        return "; ".join(
            f"{replica.name}: held {[each.id for each in replica.scheduler.table.held]}, "
            f"waiting {[each.id for each in replica.scheduler.table.waiting]}, "
            f"running {[each.id for each in replica.scheduler.table.running]}, {replica.pages.counts()}"
            for replica in (self.prefill, self.decode)
        )
