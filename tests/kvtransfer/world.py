"""Senders and receivers of several processes, a network with any delays, writes that land at any time, and processes
that die. Every event is checked: bytes are right, frontiers only grow, freed pages stay untouched."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from crossdock.kvtransfer.events import Arrived, Committed, Failed, Offered, Released, WriterStopped
from crossdock.kvtransfer.messages import TransferMessage
from crossdock.kvtransfer.next_write import TargetRank
from crossdock.kvtransfer.protocol_outputs import ProtocolOutput, Send, Write
from crossdock.kvtransfer.receiver import Receiver
from crossdock.kvtransfer.records import GroupPages
from crossdock.kvtransfer.sender import Sender

PAGE_SIZE = 4
WINDOWS = (None, 6, 3)  # tokens, of each group of layers
POOL = 16  # pages of a target: few, so that they are used again at once
STATE_PAGES = 2  # of the recurrent state of one request
PAGE_BYTES = (10,) * (len(WINDOWS) + 1)  # of each group, and of the state
DEADLINE, GRACE = 5.0, 1.0
Content: TypeAlias = tuple[str, int, int, int]  # of a page: request, source rank, group of layers, number
GARBAGE: Content = ("garbage", -1, -1, -1)

Key = tuple[str, int]  # request, epoch


def first_seen(group: int, position: int) -> int:
    """Return the number of a group's first page that the token at `position` sees."""
    window = WINDOWS[group]
    return 0 if window is None else max(0, position - window + 1) // PAGE_SIZE


@dataclass(eq=False)
class Source:
    """A source rank, and its memory: the content of its pages until they are released."""

    name: str
    rank: int
    sender: Sender
    memory: dict[int, Content] = field(default_factory=dict)
    pages: dict[Key, list[list[int]]] = field(default_factory=dict)  # of each group, from number 0 on; of the state
    is_dead: bool = False


@dataclass(eq=False)
class Goal:
    """A target rank, its memory by (page, source rank), and by page the transfer that may write there."""

    name: str
    receiver: Receiver
    memory: dict[tuple[int, int], Content] = field(default_factory=dict)
    owners: dict[int, Key] = field(default_factory=dict)
    is_dead: bool = False


@dataclass(eq=False)
class Attempt:
    """One epoch of one request: a replica of one or two source ranks, and a target."""

    key: Key
    sources: list[Source]
    goal: Goal
    num_tokens: int
    first_page: int
    is_shipped: bool = False
    is_expected: bool = False
    is_offered: bool = False
    is_granted: bool = False
    granted: list[GroupPages] = field(default_factory=list)
    granted_state: tuple[int, ...] = ()
    num_computed: dict[str, int] = field(default_factory=dict)
    frontier: int = 0
    has_arrived: bool = False
    has_stopped: bool = False
    num_released: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    num_cancels: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def num_pages(self) -> int:
        return -(-self.num_tokens // PAGE_SIZE)


@dataclass(eq=False)
class OpenWrite:
    """A write that its transport has not completed."""

    source: Source
    write: Write
    has_landed: bool = False
    lands_until: float = float("inf")  # of a dead source or a broken connection: bytes are still on their way


class World:
    """Replicas of source ranks, targets, and the network between them. Every event is checked against the protocol."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_processes = 0
        self.num_pages = 0
        self.channel: dict[tuple[str, str, str], deque[TransferMessage]] = defaultdict(deque)
        self.writes: list[OpenWrite] = []
        self.attempts: dict[Key, Attempt] = {}
        self.epochs: dict[str, int] = defaultdict(int)
        self.sources: dict[str, Source] = {}
        self.goals: dict[str, Goal] = {}
        self.replicas = [[self.new_source(0), self.new_source(1)], [self.new_source(0)]]
        self.targets = [self.new_goal(), self.new_goal()]

    def new_source(self, rank: int) -> Source:
        self.num_processes += 1
        source = Source(f"source-{self.num_processes}", rank, Sender(rank, PAGE_SIZE, max_write_bytes=4 * 10))
        self.sources[source.name] = source
        return source

    def new_goal(self) -> Goal:
        self.num_processes += 1
        name = f"goal-{self.num_processes}"
        self.goals[name] = Goal(name, Receiver(PAGE_SIZE, name.encode(), GRACE))
        return self.goals[name]

    # -- callers -----------------------------------------------------------------------------------------------------

    def begin(self, request: str, replica: int, number: int, tokens: int, has: int, started: str) -> None:
        self.epochs[request] += 1
        key = request, self.epochs[request]
        first_page = min(has, (tokens - 1) // PAGE_SIZE)
        attempt = Attempt(key, list(self.replicas[replica]), self.targets[number], tokens, first_page)
        attempt.frontier = first_page * PAGE_SIZE
        self.attempts[key] = attempt
        for source in attempt.sources:
            source.pages[key] = []
            for size in (*[attempt.num_pages] * len(WINDOWS), STATE_PAGES):
                pages = list(range(self.num_pages, self.num_pages + size))
                self.num_pages += size
                source.pages[key].append(pages)
                source.memory.update(dict.fromkeys(pages, GARBAGE))
        if started in ("both", "target"):
            self.start_target(attempt)
        if started in ("both", "source"):
            self.start_source(attempt)

    def pick(self, index: int, wanted: str) -> Attempt | None:
        """Return one of the attempts for which the `wanted` step is still to be done."""
        fits = {
            "ship": lambda a: not a.is_shipped,
            "expect": lambda a: not a.is_expected,
            "offer": lambda a: a.is_shipped and not a.is_granted,
            "grant": lambda a: (
                a.is_expected and a.is_offered and not a.is_granted and not a.has_stopped and not a.goal.is_dead
            ),
            "compute": lambda a: a.is_shipped and self.epochs[a.key[0]] == a.key[1] and not a.has_arrived,
            "any": lambda a: True,
        }[wanted]
        found = [attempt for attempt in self.attempts.values() if fits(attempt)]
        return found[index % len(found)] if found else None

    def ship(self, index: int) -> None:
        if attempt := self.pick(index, "ship"):
            self.start_source(attempt)

    def start_source(self, attempt: Attempt) -> None:
        attempt.is_shipped = True
        for source in attempt.sources:
            if not source.is_dead and not attempt.goal.is_dead:
                targets = {attempt.goal.name: TargetRank(POOL, PAGE_BYTES, len(attempt.sources), has_state=True)}
                self.run(source, source.sender.ship(*attempt.key, targets, DEADLINE, self.now))

    def expect(self, index: int) -> None:
        if attempt := self.pick(index, "expect"):
            self.start_target(attempt)

    def start_target(self, attempt: Attempt) -> None:
        if not attempt.goal.is_dead and not any(source.is_dead for source in attempt.sources):
            attempt.is_expected = True
            sources = {source.name: (source.rank, PAGE_BYTES) for source in attempt.sources}
            self.run(attempt.goal, attempt.goal.receiver.expect(*attempt.key, sources, DEADLINE, self.now))

    def grant(self, index: int) -> None:
        if attempt := self.pick(index, "grant"):
            self.grant_to(attempt)

    def grant_to(self, attempt: Attempt) -> None:
        goal = attempt.goal
        free = [page for page in range(POOL) if page not in goal.owners]
        firsts = [max(attempt.first_page, first_seen(group, attempt.num_tokens)) for group in range(len(WINDOWS))]
        if len(free) < sum(attempt.num_pages - first for first in firsts) + STATE_PAGES:
            self.run(goal, goal.receiver.wait(*attempt.key, 1.0, self.now))
            return
        attempt.is_granted = True
        for first in firsts:
            pages = tuple(free.pop(0) for _ in range(attempt.num_pages - first))
            attempt.granted.append(GroupPages(first, pages))
            goal.owners.update(dict.fromkeys(pages, attempt.key))
        attempt.granted_state = tuple(free[:STATE_PAGES])
        goal.owners.update(dict.fromkeys(attempt.granted_state, attempt.key))
        granted = attempt.granted, self.now, attempt.granted_state
        self.run(goal, goal.receiver.grant(*attempt.key, attempt.first_page, *granted))

    def wait_for_room(self, index: int) -> None:
        if attempt := self.pick(index, "grant"):
            self.run(attempt.goal, attempt.goal.receiver.wait(*attempt.key, 1.0, self.now))

    def offer(self, index: int, rank: int) -> None:
        attempt = self.pick(index, "offer")
        source = attempt.sources[rank % len(attempt.sources)] if attempt else None
        if attempt and source and not source.is_dead:
            self.run(source, source.sender.offer(*attempt.key))

    def compute(self, index: int, rank: int, tokens: int) -> None:
        if attempt := self.pick(index, "compute"):
            self.compute_at(attempt, attempt.sources[rank % len(attempt.sources)], tokens)

    def compute_at(self, attempt: Attempt, source: Source, tokens: int) -> None:
        if source.is_dead or attempt.num_released[source.name]:
            return
        done = attempt.num_computed.get(source.name, 0)
        if done == attempt.num_tokens:
            return
        done = attempt.num_computed[source.name] = min(attempt.num_tokens, done + tokens)
        groups = []
        *held_pages, state = source.pages[attempt.key]
        for number, page in enumerate(state):
            source.memory[page] = (attempt.key[0], source.rank, done, number)
        for group, held in enumerate(held_pages):
            first, pages = first_seen(group, done), held[: -(-done // PAGE_SIZE)]
            for number, page in enumerate(pages):  # other requests use the pages that the window has passed
                source.memory[page] = GARBAGE if number < first else (attempt.key[0], source.rank, group, number)
            groups.append(GroupPages(first, tuple(pages[first:])))
        if done == attempt.num_tokens:
            finished = done, attempt.key[0].encode(), self.now, tuple(state)
            self.run(source, source.sender.finish(attempt.key[0], groups, *finished))
        else:
            self.run(source, source.sender.chunk(attempt.key[0], groups, done, self.now))

    def cancel_ship(self, index: int, rank: int) -> None:
        attempt = self.pick(index, "any")
        if attempt and attempt.is_shipped:
            source = attempt.sources[rank % len(attempt.sources)]
            if not source.is_dead:
                attempt.num_cancels[source.name] += 1
                self.run(source, source.sender.cancel(*attempt.key, self.now))

    def cancel_expect(self, index: int) -> None:
        attempt = self.pick(index, "any")
        if attempt and attempt.is_expected and not attempt.goal.is_dead:
            self.run(attempt.goal, attempt.goal.receiver.cancel(*attempt.key, self.now))

    # -- network, time and faults ------------------------------------------------------------------------------------

    def deliver(self, index: int) -> None:
        ready = [key for key, messages in self.channel.items() if messages]
        if ready:
            self.deliver_one(ready[index % len(ready)])

    def deliver_one(self, key: tuple[str, str, str]) -> None:
        sender, receiver, _ = key
        message = self.channel[key].popleft()
        if receiver in self.goals and not self.goals[receiver].is_dead:
            goal = self.goals[receiver]
            self.run(goal, goal.receiver.receive(sender, message, self.now))
        elif receiver in self.sources and not self.sources[receiver].is_dead:
            source = self.sources[receiver]
            self.run(source, source.sender.receive(sender, message, self.now))

    def lose(self, index: int) -> None:
        """Lose a message, as a connection does that breaks with messages under way."""
        ready = [key for key, messages in self.channel.items() if messages]
        if ready:
            self.channel[ready[index % len(ready)]].popleft()

    def land(self, index: int) -> None:
        write = self.writes[index % len(self.writes)] if self.writes else None
        if write and not write.has_landed and self.now <= write.lands_until:
            self.land_one(write)

    def land_one(self, open_write: OpenWrite) -> None:
        open_write.has_landed = True
        goal, write = self.goals[open_write.write.peer], open_write.write
        if goal.is_dead:
            return
        key = write.message.request, write.message.epoch
        for copy in write.copies:
            for source_page, page in zip(copy.source_pages, copy.target_pages, strict=True):
                assert goal.owners.get(page) == key, f"{key} wrote to page {page} of {goal.owners.get(page)}"
                goal.memory[page, open_write.source.rank] = open_write.source.memory[source_page]

    def complete(self, index: int) -> None:
        write = self.writes[index % len(self.writes)] if self.writes else None
        if write and write.has_landed and write.lands_until == float("inf"):
            self.complete_one(write)

    def complete_one(self, write: OpenWrite) -> None:
        self.writes.remove(write)
        message, source = write.write.message, write.source
        self.channel[source.name, write.write.peer, message.request].append(message)
        self.run(source, source.sender.write_done(message.request, message.epoch, write.write.peer, self.now))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.writes = [write for write in self.writes if self.now <= write.lands_until]
        for source in self.sources.values():
            if not source.is_dead:
                self.run(source, source.sender.tick(self.now))
        for goal in self.goals.values():
            if not goal.is_dead:
                self.run(goal, goal.receiver.tick(self.now))

    def kill_replica(self, replica: int) -> None:
        """Kill every rank of a replica. Writes they had open may still land, within the grace period."""
        for source in self.replicas[replica]:
            source.is_dead = True
            for write in self.writes:
                if write.source is source:
                    write.lands_until = min(write.lands_until, self.now + GRACE / 2)
            for goal in self.goals.values():
                if not goal.is_dead:
                    self.run(goal, goal.receiver.peer_lost(source.name, True, "dead", self.now))
        self.replicas[replica] = [self.new_source(source.rank) for source in self.replicas[replica]]

    def kill_target(self, number: int) -> None:
        goal = self.targets[number]
        goal.is_dead = True
        for source in self.sources.values():
            if not source.is_dead:
                self.break_writes(source, goal)
                self.run(source, source.sender.peer_lost(goal.name, True, "dead", self.now))
        self.targets[number] = self.new_goal()

    def break_connection(self, replica: int, number: int) -> None:
        """Break a connection between living processes. The failed write may have landed, or land within the grace
        period."""
        source, goal = self.replicas[replica][0], self.targets[number]
        self.break_writes(source, goal)
        self.run(source, source.sender.peer_lost(goal.name, False, "broken", self.now))
        self.run(goal, goal.receiver.peer_lost(source.name, False, "broken", self.now))

    def break_writes(self, source: Source, goal: Goal) -> None:
        for write in [w for w in self.writes if w.source is source and w.write.peer == goal.name]:
            if write.lands_until == float("inf"):
                # From now on the pages it reads may be used again, so bytes that land late may be wrong.
                write.lands_until = self.now + GRACE / 2
                message = write.write.message
                outputs = source.sender.write_failed(message.request, message.epoch, goal.name, "broken", self.now)
                self.run(source, outputs)

    # -- outputs -----------------------------------------------------------------------------------------------------

    def run(self, process: Source | Goal, outputs: Sequence[ProtocolOutput]) -> None:
        for output in outputs:
            match output:
                case Send(peer, message):
                    self.channel[process.name, peer, message.request].append(message)
                case Write():
                    assert isinstance(process, Source)
                    assert not any(
                        w.source is process and w.write.peer == output.peer and w.lands_until == float("inf")
                        and (w.write.message.request, w.write.message.epoch)
                        == (output.message.request, output.message.epoch)
                        for w in self.writes
                    ), "two writes of one delivery are open"  # fmt: skip
                    self.writes.append(OpenWrite(process, output))
                case _:
                    self.note(process, output)

    def note(self, process: Source | Goal, event: object) -> None:
        assert isinstance(event, Released | Offered | Committed | Arrived | WriterStopped | Failed)
        attempt = self.attempts[event.request, event.epoch]
        match event:
            case Committed():
                assert event.num_tokens > attempt.frontier
                assert not attempt.has_arrived
                assert not attempt.has_stopped
                attempt.frontier = event.num_tokens
                self.check_bytes(attempt)
            case Arrived():
                assert not attempt.has_arrived
                assert not attempt.has_stopped
                attempt.has_arrived = True
                assert event.result == event.request.encode()
                assert event.num_tokens == attempt.num_tokens
                attempt.frontier = event.num_tokens
                self.check_bytes(attempt)
                for source in attempt.sources:
                    for number, page in enumerate(attempt.granted_state):
                        expected = (attempt.key[0], source.rank, attempt.num_tokens, number)
                        assert attempt.goal.memory[page, source.rank] == expected
                self.free(attempt)
            case WriterStopped():
                attempt.has_stopped = True
                self.free(attempt)
            case Released():
                attempt.num_released[process.name] += 1
                assert isinstance(process, Source)
                for page in [page for pages in process.pages[attempt.key] for page in pages]:
                    process.memory[page] = GARBAGE  # another request may use the pages from now on
            case Failed():
                assert not attempt.has_arrived or event.sending
            case Offered():
                attempt.is_offered = True

    def check_bytes(self, attempt: Attempt) -> None:
        """Assert that every committed page is in place, of every group and from every source rank."""
        for group, granted in enumerate(attempt.granted):
            for number in range(granted.first, -(-attempt.frontier // PAGE_SIZE)):
                page = granted.pages[number - granted.first]
                for source in attempt.sources:
                    expected = (attempt.key[0], source.rank, group, number)
                    assert attempt.goal.memory[page, source.rank] == expected

    def free(self, attempt: Attempt) -> None:
        for page in [page for page, key in attempt.goal.owners.items() if key == attempt.key]:
            del attempt.goal.owners[page]

    def settle(self) -> None:
        """Cancel every transfer at both ends and deliver every message and write: nothing may stay open."""
        for attempt in self.attempts.values():
            if attempt.is_expected and not attempt.goal.is_dead:
                self.run(attempt.goal, attempt.goal.receiver.cancel(*attempt.key, self.now))
        for _ in range(200):
            for write in list(self.writes):
                if not write.has_landed and self.now <= write.lands_until:
                    self.land_one(write)
                if write.lands_until == float("inf") and not self.goals[write.write.peer].is_dead:
                    self.complete_one(write)
            for key in [key for key, messages in self.channel.items() if messages]:
                while self.channel[key]:
                    self.deliver_one(key)
            self.pass_time(0.5)  # longer than all deadlines and pauses between repeated messages
        for goal in self.goals.values():
            if not goal.is_dead:
                ended_badly = [e.key for e in self.attempts.values() if e.goal is goal and goal.owners]
                assert not goal.owners, f"quarantined for good: {goal.owners}, {ended_badly}"
                assert len(goal.receiver) == 0
        for attempt in self.attempts.values():
            for source in attempt.sources:
                if attempt.is_shipped and not source.is_dead:
                    self.run(source, source.sender.cancel(*attempt.key, self.now))
                    assert attempt.num_released[source.name] >= 1
        for source in self.sources.values():
            assert source.is_dead or len(source.sender) == 0
