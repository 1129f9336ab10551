"""Engines whose head drafts, and what is noted of its drafts."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crossdock.workers.draft.head_drafter import HeadDrafter
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.engine.speculation import Speculation
from tests.workers.replica.speculating import Oracle, speculating


def head_config(folder: Path, num_tokens: int = 4, **others: Any) -> dict[str, Any]:
    """Return the settings of a head that always drafts as many tokens."""
    config = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": num_tokens, "adaptive": False}
    return config | {"draft_kv_cache_memory": 4 << 20} | others


def drafter_of(engine: Engine) -> HeadDrafter:
    """Return the head of an engine."""
    assert isinstance(engine.speculation, Speculation)
    drafter = engine.speculation.drafter
    assert isinstance(drafter, HeadDrafter)
    return drafter


@dataclass
class Noted:
    """Lets a head draft, notes what it drafted after which text, and gives drafts that are right more often."""

    head: HeadDrafter
    oracle: Oracle
    notes: list[tuple[list[int], list[int]]] = field(default_factory=list)  # texts, and the drafts after them
    texts: dict[str, Sequence[int]] = field(default_factory=dict)

    def add(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.texts[request_id] = token_ids
        self.head.add(request_id, token_ids)
        self.oracle.add(request_id, token_ids)

    def remove(self, request_id: str) -> None:
        self.head.remove(request_id)
        self.oracle.remove(request_id)

    def seconds(self, num_streams: int, num_tokens: int) -> float:
        return self.head.seconds(num_streams, num_tokens)

    def match_length(self, request_id: str, forced: Sequence[int] = ()) -> int:
        return self.head.match_length(request_id, forced)

    def propose(self, wanted: Mapping[str, int], forced: Mapping[str, Sequence[int]] = {}) -> dict[str, list[int]]:
        drafts = self.head.propose(wanted, forced)
        self.notes += [(list(self.texts[name]), found) for name, found in drafts.items()]
        return self.oracle.propose(dict.fromkeys(drafts, 4), forced)


def noting(
    engine: Engine,
    answers: Mapping[str, Sequence[int]],
    share_right: float = 0.7,
    num_prompt: Mapping[str, int] = {},
) -> Noted:
    """Put a drafter that notes in the place of an engine's own, and return it. `num_prompt`: as of `Oracle`."""
    vocab_size = engine.executor.vocab_size
    noted = Noted(drafter_of(engine), Oracle(answers, share_right, random.Random(3), vocab_size, num_prompt))
    speculating(engine, noted)
    return noted
