"""Faults to plant in the scheduler, and how many histories a state machine needs to find each."""

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

ROOM = "crossdock.workers.schedule."


class Fault(NamedTuple):
    """A line of the scheduler, and what stands there if someone gets it wrong."""

    what: str
    module: str  # below `ROOM`, where the function is looked up
    function: str  # with its class
    line: str
    wrong: str
    histories: int = 600  # within which it must be found; more than 600: in a long run alone


PAGES = [
    Fault("evicted page stays in the index", "memory.block_pool", "BlockPool._evict", "self._forget(page)", "pass"),
    Fault(
        "shared page counts one owner",
        "memory.block_pool",
        "BlockPool.share",
        "num_owners[page] += 1",
        "num_owners[page] = 1",
    ),
    Fault(
        "page is indexed before it is full",
        "kv",
        "index_full_pages",
        "num_computed_tokens // size",
        "num_computed_tokens // size + 1",
        histories=5000,
    ),
    Fault(
        "page that a step writes is released",
        "table",
        "RequestTable.end",
        "elif not request.num_in_flight_tokens:",
        "else:",
    ),
    Fault(
        "pages of a request that ended in flight stay",
        "table",
        "RequestTable.release_after_flight",
        "and not is_used",
        "and False",
    ),
]
PREFIXES = [
    Fault("hit leaves no token to compute", "kv", "match_prefix", "request.num_tokens - 1", "request.num_tokens"),
    Fault("hit has a hole in a window", "memory.prefix_index", "PrefixIndex._last_gap", "== HOLE", "is None"),
    Fault(
        "hit ends without a state",
        "memory.prefix_index",
        "PrefixIndex._last_snapshot",
        "not in self.snapshots",
        "is None",
    ),
]
WINDOWS = [
    Fault(
        "window passes a page too early",
        "memory.pages",
        "PagePool.slide",
        "position, self.page_size)",
        "position + self.page_size, self.page_size)",
    ),
    Fault("window passes no page", "memory.pages", "PagePool.slide", "if first > held.first:", "if False:"),
]
STATES = [
    Fault("snapshot is written again", "memory.owned_states", "OwnedStates.next", "if snapshot or (", "if ("),
    Fault(
        "state after a wrong token is kept", "memory.owned_states", "OwnedStates.undo", "return False", "return True"
    ),
    Fault(
        "state with a rejected draft is kept",
        "recurrent.states",
        "RecurrentStates.end",
        "return part.start",
        "return end",
    ),
    Fault(
        "state of a failed step is kept",
        "table",
        "RequestTable.drop_flights",
        "if is_in_flight and self.pages.state_pages:",
        "if False:",
    ),
    Fault(
        "state that arrives is released at once",
        "table",
        "RequestTable.recall",
        "self._quarantine(request)",
        "self.pages.release(request.owner)",
    ),
]
DRAFTS = [
    Fault("rejected drafts count as computed", "scheduler", "Scheduler.update", "end = request.num_tokens - 1", "pass"),
    Fault("draft follows the last token", "drafts.verify", "Verification._most", "left - 1", "left"),
    Fault("drafts make a stream late", "drafts.verify", "Verification._seconds", "slack = stream.due - now", "pass"),
]
AHEAD = [
    Fault(
        "assumption moves a deadline",
        "ahead",
        "assume_ended",
        "request, request.due = part.request, due",
        "request = part.request",
    ),
    Fault("request that is over is scheduled ahead", "ahead", "_is_over", "or table.is_full(request)", ""),
    Fault(
        "stages decode a stream twice",
        "scheduler",
        "_choose_streams",
        "if not stream.num_in_flight_tokens",
        "",
    ),
]
PREEMPTION = [
    Fault("preempted request keeps its place", "table", "RequestTable._requeue", "request.num_computed_tokens = ", ""),
    Fault(
        "request in flight is preempted",
        "table",
        "RequestTable.keeps_pages",
        "or request.num_in_flight_tokens > 0",
        "",
        histories=5000,
    ),
    Fault(
        "preempted request keeps its pages",
        "table",
        "RequestTable.preempt",
        "self.pages.release(request.owner)",
        "pass",
    ),
]
PICTURES = [
    Fault(
        "embeddings that a step reads are evicted",
        "pictures.encoding",
        "Encoding._kept_from",
        "each.id in self._in_step or ",
        "",
        histories=5000,
    ),
    Fault(
        "device is not told of an eviction",
        "pictures.encoding",
        "Encoding._evict",
        "self._evicted.append(content_hash)",
        "pass",
    ),
    Fault("embeddings of a failed step are kept", "pictures.encoding", "Encoding.clear", "self._rows.clear()", "pass"),
    Fault(
        "chunk ends inside a picture",
        "pictures.encoding",
        "Encoding._before",
        "if self.keeps_items_whole:",
        "if False:",
        histories=5000,
    ),
]
ABORTS = [
    Fault("aborted request stays listed", "table", "RequestTable.end", "self.waiting.remove(request)", "pass"),
    Fault(
        "aborted request keeps its pages",
        "table",
        "RequestTable.end",
        "self.pages.release(request.owner)",
        "pass",
    ),
    Fault(
        "prompt that was sent never ends",
        "handoff",
        "Handoff.finish_sent",
        "self.table.end(self.table.request(request_id), FinishReason.SHIPPED)",
        "pass",
    ),
]
AWAITED = [
    Fault(
        "page that may be written is free", "prefixes.awaited", "Awaited.end", "if may_be_written and", "if False and"
    ),
    Fault(
        "page counts before it has landed",
        "prefixes.awaited",
        "Awaited.land",
        "prefix.hashes[:num_pages]",
        "prefix.hashes",
        5000,
    ),
    Fault(
        "state counts before it has landed",
        "prefixes.awaited",
        "Awaited.land",
        "num_pages == len(prefix.hashes)",
        "True",
        5000,
    ),
]
TIERS = [
    Fault(
        "page that is loaded may still be computed",
        "request.coming_pages",
        "ArrivingTail.claim",
        "self.pending.popleft() + 1",
        "self.pending.popleft() + 2",
    ),
    Fault(
        "request goes on behind a page that has not landed",
        "prefixes.loading",
        "TierLoading._use",
        "load.tail.landed_from = load.landed_from",
        "load.tail.landed_from = load.landed_from - 1",
    ),
    Fault(
        "page of a load is counted twice",
        "prefixes.awaited",
        "Awaited._allocate",
        "pages.share(owner, whole)",
        "pages.share(owner, whole) or pages.block_pool.share(whole.pages)",
    ),
    Fault(
        "loads of two epochs are mixed up",
        "prefixes.awaited",
        "Awaited._owner",
        "{request.coming.num_awaited}",
        "{min(request.coming.num_awaited, 1)}",
    ),
    Fault(
        "load counts a page that is lost",
        "prefixes.loading",
        "TierLoading._use",
        "load.prefix, load.landed_until",
        "load.prefix, len(load.prefix.hashes)",
    ),
    Fault(
        "page that a tier still fills is used again",
        "prefixes.loading",
        "TierLoading.take_back",
        "only=being_filled",
        "only=()",
    ),
    Fault(
        "page that a tier still fills is released by the step in flight",
        "prefixes.loading",
        "TierLoading._is_wanted",
        "or request.num_in_flight_tokens > 0",
        "",
        3000,
    ),
    Fault(
        "page is offered when it is another's",
        "memory.block_pool",
        "BlockPool.offer",
        "else (page,)",
        "else (page ^ 1,)",
    ),
]
FETCHES = [  # found by two replicas that fetch from each other
    Fault(
        "page of a fetch is free while another replica writes",
        "prefixes.borrowed",
        "BorrowedPrefixes.end",
        "self.awaited.end(fetch.prefix, may_be_written)",
        "self.awaited.end(fetch.prefix)",
    ),
    Fault(
        "fetches of two epochs are mixed up",
        "prefixes.borrowed",
        "BorrowedPrefixes.stopped",
        "self._quarantined.pop(key, None)",
        "self._quarantined.popitem()[1] if self._quarantined else None",
    ),
]
FAULTS = (*PAGES, *PREFIXES, *WINDOWS, *STATES, *DRAFTS, *AHEAD, *PREEMPTION, *PICTURES, *ABORTS, *AWAITED, *TIERS)


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Compile a function of the scheduler again with the wrong line, and put it in the place of the right one."""
    *outer, name = fault.function.split(".")
    owner = import_module(ROOM + fault.module)
    for each in outer:
        owner = getattr(owner, each)
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(fault.line) == 1, f"{fault.function} has no single {fault.line!r}: plant the fault elsewhere"
    names: dict[str, object] = {}
    exec(
        compile(source.replace(fault.line, fault.wrong), fault.what, "exec"),
        inspect.unwrap(function).__globals__,
        names,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, names[name])
        yield


def histories_to_find(fault: Fault, machine: type[RuleBasedStateMachine], steps: int = 40) -> int | None:
    """Return after how many histories a machine fails with a fault planted; None: it does not."""
    count = 0

    class Counted(machine):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            nonlocal count
            count += 1
            super().__init__()

    search = settings(
        max_examples=fault.histories,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    with planted(fault):
        try:
            run_state_machine_as_test(Counted, settings=search)
        except Exception:  # a wrong page shows as a wrong token, a missing key or an assertion of the scheduler
            if not count:
                raise
            return count
    return None
