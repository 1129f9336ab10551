"""Which LoRA adapters a replica holds: those of running requests, then those that waiting requests will need first."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from crossdock.workers.schedule.request.request import Request, Status
from crossdock.workers.schedule.request.submission import Adapter
from crossdock.workers.schedule.table import RequestTable

_NEWEST = 0.3  # weight of the newest load in the mean seconds of loads


@dataclass(frozen=True, slots=True)
class SlotChange:
    """An adapter to load, and the adapter that leaves its slot; None: the slot was empty."""

    loads: Adapter
    drops: str | None  # fingerprint


@dataclass(slots=True)
class AdapterSlots:
    """The slots for adapters of one replica. A request starts once its adapter is loaded, and holds the slot then.

    Where there are more adapters than slots, the least recently used adapter leaves that no request holds, and none of
    the next waiting requests needs.
    """

    table: RequestTable
    num_slots: int  # 0: the replica takes no adapters
    load_s: float = 0.5  # mean seconds of recent loads; before the first, a guess
    num_loads: int = 0
    _loading: dict[str, None] = field(default_factory=dict)  # fingerprints

    def begin(self, waiting: Sequence[Request]) -> list[SlotChange]:
        """Return the loads to begin now. Each must end with `end`. `waiting`: requests in the order of their start."""
        if not self.num_slots:
            return []
        loaded = self.table.loaded_adapters
        wanted = self._wanted(waiting)
        changes = []
        for fingerprint, adapter in wanted.items():
            if fingerprint in loaded or fingerprint in self._loading:
                continue
            dropped = None
            if len(loaded) + len(self._loading) >= self.num_slots:
                dropped = next((each for each in loaded if each not in wanted), None)
                if dropped is None:  # the adapters in the slots are still loading
                    break
                del loaded[dropped]
            self._loading[fingerprint] = None
            changes.append(SlotChange(adapter, dropped))
        return changes

    def startable(self, prefills: Sequence[Request]) -> list[Request]:
        """Return the requests whose adapters are loaded. `prefills`: in the order of their start.

        Behind a starving request that has no adapter yet, no other starts that holds a slot: one becomes free then.
        """
        found = list[Request]()
        keeps_slots = False
        for request in prefills:
            lacks = self.table.lacks_adapter(request)
            keeps_slots |= lacks and self.table.is_starving(request)
            is_kept = keeps_slots and request.adapter is not None and request.status is Status.WAITING
            if not is_kept and not lacks:
                found.append(request)
        return found

    def use(self, adapter: Adapter) -> None:
        """Note that a request has come for an adapter: the others are less recently used."""
        if adapter.fingerprint in self.table.loaded_adapters:
            self.table.loaded_adapters[adapter.fingerprint] = self.table.loaded_adapters.pop(adapter.fingerprint)

    def end(self, fingerprint: str, seconds: float | None) -> list[Request]:
        """End a load that took `seconds`; None: it failed. Returns the requests that then cannot be served."""
        del self._loading[fingerprint]
        if seconds is None:
            return [each for each in self.table.waiting if each.adapter and each.adapter.fingerprint == fingerprint]
        self.load_s += (seconds - self.load_s) * (_NEWEST if self.num_loads else 1.0)
        self.num_loads += 1
        self.table.loaded_adapters[fingerprint] = None
        return []

    def _wanted(self, waiting: Sequence[Request]) -> dict[str, Adapter]:
        """Return the adapters that should be in slots, by fingerprint: those that requests hold come first."""
        table = self.table
        wanted = dict[str, Adapter]()
        for request in (*table.running, *table.held, *waiting):
            if request.adapter is not None and len(wanted) < self.num_slots:
                wanted[request.adapter.fingerprint] = request.adapter
        return wanted
