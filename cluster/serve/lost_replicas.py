"""Sentences for the terminal about replicas that were lost and that came back. Pure: notices and time come in."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from crossdock.cluster.dispatch.losses import loss_text

_MERGED_S = 1.0  # several ingresses lose one replica: their notices are told as one sentence


class LostReplicas:
    """Turns notices of ingresses and of replicas into sentences, each of them once."""

    def __init__(self, starts: Mapping[str, Mapping[str, Any]]) -> None:
        """`starts`: the notices of the replicas that were up at first."""
        self._starts = dict(starts)  # of all replicas so far, by name
        self._heard: set[tuple[str, int]] = set()  # the notices of ingresses that were read
        self._losses: dict[str, list[Mapping[str, Any]]] = {}  # by replica, not told yet
        self._first: dict[str, float] = {}  # when the first notice about a replica came
        self._missing: dict[str, list[float]] = {}  # when replicas of a pool were lost that have not come back

    def hear(
        self, losses: Mapping[str, Mapping[str, Any]], starts: Mapping[str, Mapping[str, Any]], now: float
    ) -> Iterator[str]:
        """Yield the sentences that are due now. `losses`: notices of ingresses; `starts`: notices of replicas."""
        for slot, notice in losses.items():
            key = slot.rpartition("-")[0], notice["number"]
            if key not in self._heard:
                self._heard.add(key)
                self._losses.setdefault(notice["replica"], []).append(notice)
                self._first.setdefault(notice["replica"], now)
        for replica in [name for name, first in self._first.items() if now - first >= _MERGED_S]:
            del self._first[replica]
            yield self._lost(replica, self._losses.pop(replica), now)
        for replica, start in starts.items():
            is_new = "ready" not in self._starts.get(replica, {"ages": {}})["ages"]
            self._starts[replica] = start
            if is_new and "ready" in start["ages"]:
                yield self._up(replica, start, now)

    def _lost(self, replica: str, notices: list[Mapping[str, Any]], now: float) -> str:
        went_on = sum((Counter(notice["went_on"]) for notice in notices), Counter[str]())
        first = notices[0]
        count = sum(notice["num_requests"] for notice in notices)
        text = loss_text(replica, first["role"], first["reason"], count, went_on)
        start = self._starts.get(replica)
        if start is None:
            return f"{text}; another one starts"
        pool = start["pool"]
        self._missing.setdefault(pool, []).append(now)
        seconds = max(each["ages"].get("ready", 0.0) for each in self._starts.values() if each["pool"] == pool)
        log = f". Its log: {start['log']}" if start["log"] else ""
        return f"{text}; another one starts, which took {seconds:.0f} s before{log}"

    def _up(self, replica: str, start: Mapping[str, Any], now: float) -> str:
        missing = self._missing.get(start["pool"])
        since = f", {now - missing.pop(0):.0f} s after the loss" if missing else ""
        return f"replica {replica} ({start['role']}) is up{since}"
