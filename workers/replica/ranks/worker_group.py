"""The ranks of one replica, as the driver sees them. All begin together, and all end when one ends or hangs.

The driver schedules and samples. Each follower computes its part of a step, which comes in one message over a socket.
The end of that connection shows either side at once that the other is gone. Tensors go by torch.distributed, whose
calls have a deadline: that is how a hung rank is found.
"""

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from crossdock.kvtransfer.events import Event
from crossdock.workers.model.memory.kv_memory import PageBudget
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.replica.config import ReplicaSpec, TransferConfig
from crossdock.workers.replica.ranks.pool_layout import HeldLayers, held_layers
from crossdock.workers.replica.ranks.rank_loader import driver_of, failure_of, load_rank, position_of
from crossdock.workers.replica.ranks.rank_messages import (
    AdapterLoaded,
    CallWeights,
    ChangeMemory,
    CloseDock,
    DockOpened,
    DriverMessage,
    EndRank,
    FileCall,
    FilesCalled,
    FollowerMessage,
    JoinWorkerGroup,
    MalformedRankMessage,
    MemoryChange,
    OpenDock,
    PhaseEnded,
    RankFailure,
    RankReady,
    RunStep,
    WeightMethod,
    WeightsCalled,
    decode_follower_message,
    encode,
)
from crossdock.workers.replica.ranks.rank_network import WorkerGroupStore, listen_on
from crossdock.workers.replica.ranks.rank_socket import RankSocket, WorkerGroupAddress
from crossdock.workers.replica.ranks.step_deadline import StepDeadline

logger = logging.getLogger(__name__)

_RETRY_S = 0.1  # until a connection is accepted again after a failure
_LAST_WORDS_S = 1.0  # for a rank that ends to report why
_MAX_STRANGERS = 16  # connections that have not proved the cookie yet

_Answer = TypeVar("_Answer", WeightsCalled, FilesCalled)


@dataclass(slots=True, eq=False)
class _Follower:
    socket: RankSocket
    ready: RankReady | None = None  # once it has loaded its part
    blob: bytes | None = None  # of its dock, once that is open
    answers: dict[type, Any] = field(default_factory=dict)  # how the last call of each kind ended; none: it goes on
    adapters: dict[str, str] = field(default_factory=dict)  # loads that have ended: why each failed, by fingerprint


def common_page_budget(budgets: Iterable[PageBudget]) -> PageBudget:
    """Return as many pages as every rank has memory for, and the bytes of the largest page of any rank."""
    ranks = list(budgets)
    return PageBudget(min(rank.num_pages for rank in ranks), max(rank.page_bytes for rank in ranks))


class WorkerGroup:
    """The followers of a driver. `on_lost` is called once, on any thread, with the reason why the group has ended.

    `host`: the driver's address for its followers. Its ports there are open until all followers have joined.
    """

    def __init__(self, spec: ReplicaSpec, host: str, on_lost: Callable[[str], None]) -> None:
        self.spec = spec
        self.position = position_of(spec, driver_of(spec))
        self._on_event: Callable[[int, Event], None] = _refuse  # until docks are open
        self._on_lost = on_lost
        self._followers: dict[int, _Follower] = {}
        self._changed = threading.Condition()  # a follower has reported something, or the worker group is lost
        self._why: str | None = None  # the worker group is lost
        self._is_closing = False
        self.num_sent = 0  # messages to all followers, but for calls of files; raised before a message is sent
        self._is_deaf = False  # it accepts no further connection
        self._held: HeldLayers = ()
        self._own_budget = PageBudget(0, 0)
        self.experts: Sequence[str] = ()  # a line about each way in which the ranks could divide them
        self._strangers: dict[socket.socket, None] = {}  # oldest first
        self._listener = listen_on(host)
        self._store = WorkerGroupStore(host)
        self.address = WorkerGroupAddress(
            host, self._listener.getsockname()[1], self._store.port, secrets.token_bytes(32)
        )
        threading.Thread(target=self._accept, name="worker group listener", daemon=True).start()

    def load(self) -> LoadedModel:
        """Load the driver's own part while the followers load theirs.

        Raises:
            ValueError: the driver or a follower refuses the model.
            RankFailed: a follower could not load its part.
        """
        model, self._own_budget, self.experts = load_rank(
            self.spec,
            self.position.rank,
            self._store.store,
            self.address.host,
            lambda phase: logger.info("%s: %s", self.position, phase),
        )
        self._held = held_layers(model)
        self._wait(lambda follower: follower.ready is not None, "did not load its part")
        self._store.seal()
        return model

    @property
    def page_budget(self) -> PageBudget:
        """How many pages every rank has memory for."""
        return common_page_budget(self._budgets)

    @property
    def page_bytes(self) -> int:
        """The bytes of a page, of all ranks together."""
        return sum(rank.page_bytes for rank in self._budgets)

    @property
    def _budgets(self) -> list[PageBudget]:
        """List what each rank that is ready has memory for."""
        ready = [follower.ready for follower in self._followers.values() if follower.ready is not None]
        return [self._own_budget, *(PageBudget(rank.num_pages, rank.page_bytes) for rank in ready)]

    @property
    def held_by_rank(self) -> list[HeldLayers]:
        """The layers each rank holds, by rank."""
        held = {rank: follower.ready.held for rank, follower in self._followers.items() if follower.ready is not None}
        return [held.get(rank, self._held) for rank in range(self.spec.num_ranks)]

    def run_step(self, inputs: bytes) -> None:
        """Have every follower compute its part of a step."""
        self.broadcast(RunStep(inputs))

    def open_docks(
        self, model: str, role: str, transfer: TransferConfig, on_event: Callable[[int, Event], None]
    ) -> dict[int, bytes]:
        """Have every follower open a dock over its pool. Returns the blobs of the docks, by rank.

        `on_event` gets the rank and every event of its dock, on one thread for each rank."""
        self._on_event = on_event
        for follower in self._followers.values():
            follower.blob = None
        self.broadcast(OpenDock(tuple(self.held_by_rank), model, role, transfer))
        self._wait(lambda follower: follower.blob is not None, "did not open its pool to transfers")
        return {rank: follower.blob or b"" for rank, follower in self._followers.items()}

    def close_docks(self) -> None:
        """Have every follower close its dock, whose transfers have ended."""
        self.broadcast(CloseDock())

    def wait_for_adapter(self, fingerprint: str) -> str:
        """Wait until every follower has loaded an adapter. Returns why one of them could not; empty: all have."""

        def missing() -> list[int]:
            return [rank for rank, each in self._followers.items() if fingerprint not in each.adapters]

        with self._changed:
            self._changed.wait_for(lambda: self._why is not None or not missing(), self.spec.start_timeout_s)
            if missing():
                return self._why or f"{position_of(self.spec, missing()[0])} did not load it"
            failures = [follower.adapters.pop(fingerprint) for follower in self._followers.values()]
        return next(filter(None, failures), "")

    def call_weights(self, method: WeightMethod, argument: str) -> Callable[[], list[WeightsCalled]]:
        """Have every follower call its new weights. Returns a function that waits for all of them, and returns how
        each ended. One call goes on at a time."""
        wait = self._call(CallWeights(method, argument), WeightsCalled)
        return lambda: wait() or [WeightsCalled(self._reason, {})]

    def call_files(self, call: FileCall) -> Callable[[], list[FilesCalled]]:
        """Have every follower do the same with its files. Returns a function that waits for all of them, and returns
        how each ended, by rank. One call goes on at a time.

        The function raises `failure_of` where the worker group is lost.
        """
        wait = self._call(call, FilesCalled)

        def answers() -> list[FilesCalled]:
            if found := wait():
                return found
            raise failure_of(self._reason)

        return answers

    def _call(self, message: DriverMessage, kind: type[_Answer]) -> Callable[[], list[_Answer]]:
        """Call every follower. Returns a function that waits for their answers, and returns them by rank; none: the
        worker group is lost."""
        followers = [self._followers[rank] for rank in sorted(self._followers)]
        for follower in followers:
            follower.answers.pop(kind, None)
        self.broadcast(message)

        def wait() -> list[_Answer]:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._reason != "" or all(kind in follower.answers for follower in followers)
                )
            return [] if self._reason else [follower.answers[kind] for follower in followers]

        return wait

    @property
    def _reason(self) -> str:
        """Say why no follower answers any more; empty: they do."""
        return self._why or ("the replica ends" if self._is_closing else "")

    def broadcast(self, message: DriverMessage) -> None:
        """Send one message to every follower. A follower that is gone is noticed by the thread that reads from it."""
        if not isinstance(message, FileCall):
            with self._changed:
                self.num_sent += 1
        data = encode(message)
        for follower in self._followers.values():
            with contextlib.suppress(OSError):
                follower.socket.send(data)

    def change_memory(self, what: MemoryChange) -> None:
        """Have every follower change its memory, see `ChangeMemory`."""
        self.broadcast(ChangeMemory(what))

    def step_deadline(self) -> StepDeadline:
        """Return a deadline for steps from now on: if no step ends for `rank_timeout_s`, the worker group ends."""
        seconds = self.spec.rank_timeout_s
        return StepDeadline(seconds, lambda: self._lost(f"a rank hangs: no step has ended for {seconds:g} s"))

    def fail(self, error: BaseException) -> None:
        """End the group: the driver's part of a step raised. Another rank that is gone, the usual cause, is given as
        the reason."""
        with self._changed:
            self._changed.wait_for(lambda: self._why is not None, _LAST_WORDS_S)
        self._lost(f"{self.position}: {type(error).__name__}: {error}")

    def close(self) -> None:
        """End the followers, after all messages to them have been sent."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self.broadcast(EndRank())
        self._stop_listening()
        for follower in self._followers.values():
            follower.socket.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _wait(self, is_done: Callable[[_Follower], bool], failure: str) -> None:
        """Wait until `is_done` for every follower. Raises as `failure_of`: one is not in time, or the group is lost."""

        def missing() -> list[int]:
            followers = self._followers
            return [
                rank
                for rank in range(self.spec.num_ranks)
                if rank != self.position.rank and (rank not in followers or not is_done(followers[rank]))
            ]

        with self._changed:
            self._changed.wait_for(lambda: self._why is not None or not missing(), self.spec.start_timeout_s)
            if self._why is None and missing():
                late = position_of(self.spec, missing()[0])
                self._why = f"{late} {failure} within {self.spec.start_timeout_s:.0f} s"
            if self._why is not None:
                raise failure_of(self._why)

    # -- threads: one listens, one reads from each follower ----------------------------------------------------------

    def _accept(self) -> None:
        told = ""
        while not self._is_deaf:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:  # closed; or this process has no free descriptor: the follower waits meanwhile
                if not self._is_deaf:
                    if str(error) != told:
                        logger.error("a connection of another rank is not accepted now: %s", error)
                    told = str(error)
                    time.sleep(_RETRY_S)
                continue
            with self._changed:
                self._strangers[connection] = None
                if len(self._strangers) > _MAX_STRANGERS:  # a follower proves itself at once: the oldest is none
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    _shut_down(oldest)
            threading.Thread(target=self._serve, args=(connection,), name="rank", daemon=True).start()

    def _stop_listening(self) -> None:
        self._is_deaf = True
        _shut_down(self._listener)  # wakes the thread that accepts
        self._listener.close()

    def _serve(self, connection: socket.socket) -> None:
        """Read all messages of one follower, until it is gone. A connection of another process is closed."""
        try:
            try:
                link = RankSocket(connection, self.address.cookie, is_driver=True)
            finally:
                with self._changed:
                    self._strangers.pop(connection, None)
            rank = self._join(link)
        except (EOFError, OSError, MalformedRankMessage) as error:
            connection.close()
            logger.warning("refused a connection to the ranks of this replica: %s", error or "it ended")
            return
        position = position_of(self.spec, rank)
        try:
            while True:
                self._take(rank, decode_follower_message(link.receive()))
        except MalformedRankMessage as error:
            self._lost(f"{position}: sent {error}")
        except (EOFError, OSError):
            self._lost(f"{position}: its process has ended")
        except Exception as error:
            logger.exception("a message of %s cannot be handled", position)
            self._lost(f"{position}: {type(error).__name__}: {error}")

    def _join(self, link: RankSocket) -> int:
        """Read the first message of a follower, and take it into the worker group. Returns its rank."""
        message = decode_follower_message(link.receive())
        with self._changed:
            free = set(range(self.spec.num_ranks)) - {self.position.rank, *self._followers}
            if not isinstance(message, JoinWorkerGroup) or message.rank not in free:
                raise MalformedRankMessage(f"{message} does not name a rank that is awaited")
            self._followers[message.rank] = _Follower(link)
            self._changed.notify_all()
            if len(free) == 1:  # it was the last
                self._stop_listening()
        return message.rank

    def _take(self, rank: int, message: FollowerMessage) -> None:
        follower = self._followers[rank]
        position = position_of(self.spec, rank)
        match message:
            case PhaseEnded(text):
                logger.info("%s: %s", position, text)
            case RankReady():
                follower.ready = message
            case DockOpened(blob):
                follower.blob = blob
            case AdapterLoaded(fingerprint, failure):
                follower.adapters[fingerprint] = failure
            case WeightsCalled() | FilesCalled():
                follower.answers[type(message)] = message
            case RankFailure(reason, traceback):
                logger.error("%s failed:\n%s", position, traceback)
                self._lost(f"{position}: {reason}")
            case JoinWorkerGroup():
                raise MalformedRankMessage(f"{message} a second time")
            case _:
                self._on_event(rank, message)
                return
        with self._changed:
            self._changed.notify_all()

    def _lost(self, why: str) -> None:
        with self._changed:
            if self._why is not None or self._is_closing:
                return
            self._why = why
            self._changed.notify_all()
        self._on_lost(why)


def _refuse(rank: int, event: Event) -> None:
    raise MalformedRankMessage(f"rank {rank} reports {event} before its dock is open")


def _shut_down(connection: socket.socket) -> None:
    """End a connection or a listener whose thread may be waiting in it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
