"""A follower: computes its part of each step as the driver asks, and ends with the driver."""

import contextlib
import logging
import os
import queue
import threading
import traceback
from collections.abc import Callable

import torch.distributed as dist

from crossdock.kvtransfer.dock import Dock
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.new_weights import NewWeights
from crossdock.workers.model.runner import Runner
from crossdock.workers.model.step_messages import StepReceiver
from crossdock.workers.replica.config import ReplicaSpec
from crossdock.workers.replica.ranks.pool_layout import held_layers, memory_of, pool_spec
from crossdock.workers.replica.ranks.rank_loader import load_rank, why_failed
from crossdock.workers.replica.ranks.rank_memory import RankMemory
from crossdock.workers.replica.ranks.rank_messages import (
    AdapterLoaded,
    AllocatePool,
    CallWeights,
    ChangeMemory,
    CloseDock,
    CopyPages,
    DockOpened,
    DropAdapter,
    EndRank,
    FileCall,
    FilesCalled,
    FollowerMessage,
    JoinWorkerGroup,
    LoadAdapter,
    MalformedRankMessage,
    OpenDock,
    OpenFiles,
    OrderedMessage,
    PhaseEnded,
    PutWeights,
    RankFailure,
    RankReady,
    RecordSteps,
    RunStep,
    WeightMethod,
    WeightsCalled,
    decode_driver_message,
    encode,
)
from crossdock.workers.replica.ranks.rank_socket import RankSocket, WorkerGroupAddress
from crossdock.workers.replica.tiers.page_copies import PoolCopies
from crossdock.workers.replica.tiers.page_files import PageFiles, open_parts
from crossdock.workers.replica.tiers.part_keeper import PartKeeper
from crossdock.workers.replica.transfer.replica_dock import open_dock
from crossdock.workers.schedule.request.submission import Adapter

logger = logging.getLogger(__name__)


def follow(
    spec: ReplicaSpec,
    rank: int,
    address: WorkerGroupAddress,
    host: str | None = None,
    transfer_host: str | None = None,
    on_weights: Callable[[NewWeights], None] = lambda _: None,
) -> None:
    """Run a follower: load its part and do what the driver asks, until the driver ends it.

    When the driver is gone without a message, the process ends on the spot, whatever it was doing.

    Args:
        host: the address of this node at which the other ranks reach this one; None: the one that leads to the driver.
        transfer_host: the address of this node at which other replicas reach its pages; None: the same.
        on_weights: is given the new weights of this rank, once its part is loaded.

    Raises:
        Exception: any failure here, after a report to the driver.
    """
    link = RankSocket.connect(address, host)

    def send(message: FollowerMessage) -> None:
        link.send(encode(message))

    send(JoinWorkerGroup(rank))

    def answer(called: FilesCalled) -> None:
        with contextlib.suppress(OSError):
            send(called)

    parts = PartKeeper(f"rank {rank}", answer)
    inbox = _listen(link, parts)
    try:
        store = dist.TCPStore(address.host, address.store_port, is_master=False)  # type: ignore[attr-defined]
        own = link.own_address
        loaded = load_rank(spec, rank, store, own, lambda phase: send(PhaseEnded(phase)))
        send(RankReady(held_layers(loaded.model), *loaded.budget))
        weights = NewWeights(loaded.model)
        on_weights(weights)
        _work(spec, rank, loaded.model, weights, inbox, parts, link, transfer_host or own)
    except Exception as error:
        with contextlib.suppress(OSError):
            send(RankFailure(why_failed(error), traceback.format_exc()))
        raise


def _work(
    spec: ReplicaSpec,
    rank: int,
    model: LoadedModel,
    weights: NewWeights,
    inbox: queue.SimpleQueue[OrderedMessage],
    parts: PartKeeper,
    link: RankSocket,
    transfer_host: str,
) -> None:
    """Do what the driver asks, in order, until it asks to end."""
    num_pages = 0
    dock: Dock | None = None
    copies: PoolCopies | None = None
    page_size = spec.engine.page_size
    steps = StepReceiver()
    runner = Runner(model, page_size)
    while True:
        match inbox.get():
            case RunStep(inputs):
                runner.compute(steps.unpack(inputs))
            case LoadAdapter(adapter_name, path, fingerprint):
                adapter = Adapter(adapter_name, path, fingerprint)
                threading.Thread(target=_load_adapter, args=(model, adapter, link), name="adapter", daemon=True).start()
            case DropAdapter(fingerprint):
                if model.adapters is not None:
                    model.adapters.drop(fingerprint)
            case CallWeights(method, argument):
                threading.Thread(target=_call_weights, args=(weights, method, argument, link), daemon=True).start()
            case PutWeights():
                weights.put()
            case AllocatePool(num_pages, num_slots):
                model.allocate_pool(num_pages, page_size)
                copies = PoolCopies(model.pool.by_page, num_slots)
                model.pool.watch(copies.claim, copies.settle)
            case CopyPages() as copy:
                assert copies is not None, "pages are copied before the pool is allocated"
                copies.apply(copy)
            case OpenFiles(fingerprint):
                assert copies is not None, "files are opened before the pool is allocated"
                place, most_bytes = spec.engine.kv_files
                assert place, "the driver has no files either"
                own = open_parts(place, most_bytes, fingerprint, rank, spec.num_ranks)
                parts.open(PageFiles(own, copies), model.wait)
            case RecordSteps(max_num_seqs, max_num_batched_tokens, most_drafts):
                runner = Runner.recorded(
                    model, page_size, max_num_seqs, max_num_batched_tokens, most_drafts=most_drafts
                )
            case OpenDock(by_rank, name, role, transfer):
                layout = pool_spec(by_rank, rank, model, name, page_size, num_pages)
                transfer = transfer.model_copy(update={"host": transfer_host})  # the driver's may be another node's
                dock = open_dock(
                    memory_of(model.pool.tensor),
                    layout,
                    role,
                    transfer,
                    lambda event: link.send(encode(event)),
                    before_grant=model.pool.before_others,
                )
                link.send(encode(DockOpened(dock.blob)))
            case CloseDock():
                assert dock is not None, "a dock is closed before it is open"
                if not dock.drain(spec.rank_timeout_s):
                    raise RuntimeError("transfers of pages have not ended, and the pool is about to move")
                dock.close()
            case ChangeMemory(what):
                RankMemory(model, weights, runner).change(what)
            case EndRank():
                parts.close()
                dist.destroy_process_group()
                return
            case call:
                assert dock is not None, f"{call} before the dock is open"
                model.wait()  # pages that are shipped must have been written
                dock.call(call)
        parts.handled()


def _load_adapter(model: LoadedModel, adapter: Adapter, link: RankSocket) -> None:
    """Load an adapter, and report how that ended."""
    failure = ""
    try:
        assert model.adapters is not None, "the driver has no adapters either"
        model.adapters.load(adapter)
    except Exception as error:
        failure = f"{error}"
    with contextlib.suppress(OSError):
        link.send(encode(AdapterLoaded(adapter.fingerprint, failure)))


def _call_weights(weights: NewWeights, method: WeightMethod, argument: str, link: RankSocket) -> None:
    """Call the rank's new weights, and report how that ended."""
    failure = ""
    found = dict[str, str]()
    try:
        found = weights.call(method, argument)
    except Exception as error:
        failure = f"{error}" or type(error).__name__
    with contextlib.suppress(OSError):
        link.send(encode(WeightsCalled(failure, found)))


def _listen(link: RankSocket, parts: PartKeeper) -> queue.SimpleQueue[OrderedMessage]:
    """Return a queue of the driver's messages, in order; calls of files go to `parts`. The thread that reads them sees
    the driver's end at once."""
    inbox: queue.SimpleQueue[OrderedMessage] = queue.SimpleQueue()

    def read() -> None:
        try:
            while True:
                message = decode_driver_message(link.receive())
                if isinstance(message, FileCall):
                    parts.call(message)
                    continue
                inbox.put(message)
                if isinstance(message, EndRank):
                    return
        except MalformedRankMessage as error:
            logger.error("this rank ends: its driver sent %s", error)
            os._exit(1)
        except Exception as error:
            if not isinstance(error, EOFError | OSError):
                logger.error("this rank ends: a message of its driver cannot be read", exc_info=error)
            os._exit(1)  # a collective that waits for the dead would hold the process and its memory until its deadline

    threading.Thread(target=read, name="driver", daemon=True).start()
    return inbox
