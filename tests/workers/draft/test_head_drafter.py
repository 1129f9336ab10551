"""A head of EAGLE-3 drafts what plain torch drafts, at every step, and an engine with it gives the tokens without."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import ByteSize
from transformers import PreTrainedModel

from crossdock.workers.draft.head_drafter import HeadDrafter
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.schedule.request.submission import SamplingParams, Submission
from tests.workers.draft.eagle_reference import EagleReference, write_head
from tests.workers.replica.engines import tokens_of
from tests.workers.replica.speculating import (
    NUM_REQUESTS,
    VOCAB_SIZE,
    History,
    Oracle,
    check_request,
    engine_of,
    expected,
    least_pages,
    module,
    serve,
)


@cache
def plain() -> PreTrainedModel:
    """Return the target once more, whose attention is its own."""
    return module.__wrapped__()


def head_config(folder: Path, num_tokens: int = 4, **others: Any) -> dict[str, Any]:
    """Return the settings of a head that always drafts as many tokens."""
    config = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": num_tokens, "adaptive": False}
    return config | {"draft_kv_cache_memory": 4 << 20} | others


def drafter_of(engine: Engine) -> HeadDrafter:
    """Return the head of an engine."""
    assert engine.speculation is not None
    drafter = engine.speculation.drafter  # type: ignore[attr-defined]
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


def noting(engine: Engine, answers: Mapping[str, Sequence[int]], share_right: float = 0.7) -> Noted:
    """Return what takes the place of an engine's drafter."""
    noted = Noted(drafter_of(engine), Oracle(answers, share_right, random.Random(3)))
    assert engine.speculation is not None
    engine.speculation.drafter = noted  # type: ignore[attr-defined]
    return noted


@pytest.mark.parametrize("changed", [{}, {"norm_before_residual": True}])
@pytest.mark.parametrize("draft_vocab", [None, 100])
def test_head_in_an_engine_drafts_as_in_plain_torch_at_every_step(
    tmp_path: Path, changed: dict[str, Any], draft_vocab: int | None
) -> None:
    """Prompts come in chunks, streams join and leave, and some drafts are accepted, others not."""
    folder = write_head(tmp_path, module(), draft_vocab=draft_vocab, **changed)
    history, reference = History.random(5, NUM_REQUESTS), expected(5)
    settings = {"enable_prefix_caching": False, "max_num_batched_tokens": 40, "max_num_seqs": 4}
    engine = engine_of(speculative_config=head_config(folder), **settings)
    noted = noting(engine, {name: tokens_of(deltas) for name, deltas in reference.items()})
    found, _ = serve(engine, History(history.works, history.arrivals, {}))
    for name, deltas in reference.items():
        check_request(found[name], deltas, was_aborted=False)
    oracle = EagleReference(folder, plain())
    assert len(noted.notes) > 30
    for text, drafts in noted.notes:
        assert drafts == oracle.drafts(text, len(drafts))
    assert drafter_of_noted(engine).pages.block_pool.num_available == drafter_of_noted(engine).pages.num_pages


def drafter_of_noted(engine: Engine) -> HeadDrafter:
    assert engine.speculation is not None
    noted = engine.speculation.drafter  # type: ignore[attr-defined]
    assert isinstance(noted, Noted)
    return noted.head


@pytest.mark.parametrize("seed", range(4))
def test_any_history_with_a_head_gives_the_tokens_without(tmp_path: Path, seed: int) -> None:
    """With few pages requests are preempted and computed again; with prefixes in pages, states are missing."""
    folder = write_head(tmp_path, module())
    draw, reference = random.Random(seed), expected(seed)
    config: dict[str, Any] = {
        "speculative_config": head_config(folder, draw.choice([1, 3, 6]), adaptive=draw.random() < 0.5),
        "max_num_batched_tokens": draw.choice([24, 40, 80]),
        "max_num_seqs": draw.choice([2, 4, 8]),
        "num_pages": draw.choice([0, 2, 92]) + least_pages("llama"),
    }
    engine = engine_of(**config)
    noting(engine, {name: tokens_of(deltas) for name, deltas in reference.items()})
    found, aborted = serve(engine, History.random(seed, NUM_REQUESTS))
    for name, deltas in reference.items():
        check_request(found[name], deltas, name in aborted)
    assert engine.scheduler.verification is not None
    assert sum(engine.scheduler.verification.totals.num_accepted_at) > 5


def test_head_without_states_of_a_cached_prefix_drafts_from_the_states_after_it(tmp_path: Path) -> None:
    folder = write_head(tmp_path, module())
    engine = engine_of(speculative_config=head_config(folder))
    prompt = [3 + 5 * number % 250 for number in range(50)]
    greedy = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    works = [Submission(name, prompt, greedy) for name in ("first", "second")]
    answer = tokens_of(serve(engine_of(), History(works[:1], [0], {}))[0]["first"])
    noted = noting(engine, {"first": answer, "second": answer})
    found, _ = serve(engine, History(works, [0, 100], {}))
    assert tokens_of(found["first"]) == tokens_of(found["second"]) == answer
    assert found["second"][0].num_cached_tokens == 48
    oracle = EagleReference(folder, plain())
    of_second = noted.notes[len(noted.notes) // 2 :]
    assert len(of_second) > 3
    for text, drafts in of_second:
        assert drafts == oracle.drafts(text, len(drafts), first=48)


def test_full_pool_of_a_head_takes_pages_of_the_stream_that_drafted_least_recently(tmp_path: Path) -> None:
    """A page has 16 rows: eight streams of up to 128 tokens need many more than these pages."""
    folder = write_head(tmp_path, module())
    reference = expected(5)
    memory = 6 * 16 * 2 * 2 * 16 * 4  # six pages
    engine = engine_of(speculative_config=head_config(folder, draft_kv_cache_memory=memory))
    noted = noting(engine, {name: tokens_of(deltas) for name, deltas in reference.items()})
    history = History.random(5, NUM_REQUESTS)
    found, _ = serve(engine, History(history.works, history.arrivals, {}))
    for name, deltas in reference.items():
        check_request(found[name], deltas, was_aborted=False)
    assert noted.head.pages.num_pages == 6
    assert noted.notes


def test_memory_for_less_than_a_page_is_refused(tmp_path: Path) -> None:
    folder = write_head(tmp_path, module())
    with pytest.raises(ValueError, match=r"draft_kv_cache_memory \(100\) must be at least \d+ bytes"):
        engine_of(speculative_config=head_config(folder, draft_kv_cache_memory=ByteSize(100)))


def test_longer_drafts_and_more_streams_are_predicted_to_take_longer(tmp_path: Path) -> None:
    drafter = drafter_of(engine_of(speculative_config=head_config(write_head(tmp_path, module()))))
    assert drafter.seconds(0, 0) == 0
    assert 0 < drafter.seconds(1, 1) < drafter.seconds(1, 4) <= drafter.seconds(8, 4)
    assert drafter.head.config.layer.vocab_size == VOCAB_SIZE
