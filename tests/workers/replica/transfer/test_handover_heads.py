"""A head in two pools: the first decode step drafts, from states that came with the prompt's pages."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from crossdock.workers.draft.head_drafter import MOST_KEPT
from crossdock.workers.draft.mtp_head import MtpHead
from tests.sweeps import rest_in_soak
from tests.workers.architectures import build
from tests.workers.draft.eagle_reference import LAYERS, EagleReference, write_head
from tests.workers.draft.mtp_reference import plain, target_of, write_checkpoint
from tests.workers.draft.noted_heads import Noted, drafter_of, head_config, noting
from tests.workers.ranks import Ranks, saved
from tests.workers.replica.engines import tokens_of
from tests.workers.replica.sides import Side, closing, prompts, ship, submission
from tests.workers.replica.speculating import History, Oracle, engine_of, serve, speculating
from tests.workers.worker_groups import engine_of_ranks

NUM_TOKENS = 10
TEXTS = [prompts()[number] for number in (0, 1, 3, 5, 6)]  # 1 to 223 tokens


def side(folder: Path, **config: Any) -> Side:
    """Return a replica whose head in `folder` drafts."""
    return Side("tcp", speculative_config=head_config(folder, 3), **config)


@cache
def expected() -> list[list[int]]:
    """Return the tokens of an engine without drafts."""
    works = [submission(text, NUM_TOKENS) for text in TEXTS]
    found, _ = serve(engine_of(target=build("llama", {})), History(works, [0] * len(works), {}))
    return [tokens_of(found[work.id]) for work in works]


async def test_first_decode_step_drafts_from_the_states_of_the_last_prompt_tokens(tmp_path: Path) -> None:
    """As plain torch does from these states; once more from cached prefixes, which leave fewer of them."""
    folder = write_head(tmp_path, build("llama", {}))
    reference = EagleReference(folder, build("llama", {}))
    wanted = expected()
    async with closing(side(folder, max_num_batched_tokens=40), side(folder)) as (prefill, decode):
        for cached in (0, 16):
            works = [submission(text, NUM_TOKENS) for text in TEXTS]
            answers = {work.id: tokens for work, tokens in zip(works, wanted, strict=True)}
            noted = noting(decode.engine, answers)
            assert await asyncio.gather(*(ship(prefill, decode, work) for work in works)) == wanted
            decode.engine.speculation.drafter = noted.head  # type: ignore[union-attr]
            for text in TEXTS:
                notes = [note for note in noted.notes if note[0][: len(text)] == text]
                assert len(notes[0][0]) == len(text) + 1, "of the first decode step"
                first = max(len(text) - MOST_KEPT, (len(text) - 1) // 16 * cached)
                for whole, drafts in notes[::3]:
                    assert drafts == reference.drafts(whole, len(drafts), first)
    assert decode.engine.scheduler.verification is not None
    assert sum(decode.engine.scheduler.verification.totals.num_accepted_at) > 10


@pytest.mark.parametrize("kind", ["no head", "another head", "damaged"])
async def test_decode_replica_without_states_of_its_head_drafts_from_its_second_step_on(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = build("llama", {})
    folder = write_head(tmp_path / "head", target)
    wanted = expected()
    layers = [0, 2, 3] if kind == "another head" else list(LAYERS)
    sent = write_head(tmp_path / "other", target, eagle_aux_hidden_state_layer_ids=layers)
    other = Side("tcp") if kind == "no head" else side(sent)
    if kind == "damaged":
        head = drafter_of(other.engine)
        whole = head.hand_over
        monkeypatch.setattr(type(head), "hand_over", lambda self, name: whole(name)[:-1])
    works = [submission(text, NUM_TOKENS) for text in TEXTS]
    async with closing(other, side(folder)) as (prefill, decode):
        noted = noting(decode.engine, {work.id: tokens for work, tokens in zip(works, wanted, strict=True)})
        with caplog.at_level(logging.WARNING):
            assert await asyncio.gather(*(ship(prefill, decode, work) for work in works)) == wanted
    assert min(len(text) for text, _ in noted.notes if text[: len(TEXTS[-1])] == TEXTS[-1]) == len(TEXTS[-1]) + 2
    warned = [record.getMessage() for record in caplog.records if "another head" in record.getMessage()]
    assert len(warned) == (kind != "no head"), "once, however many prompts come"


async def test_replica_without_a_head_takes_prompts_of_one_with_a_head(tmp_path: Path) -> None:
    wanted = expected()
    async with closing(side(write_head(tmp_path, build("llama", {}))), Side("tcp")) as (prefill, decode):
        assert await asyncio.gather(*(ship(prefill, decode, submission(text, NUM_TOKENS)) for text in TEXTS)) == wanted


@pytest.mark.parametrize("is_prefill_whole", [True, False])
async def test_states_travel_between_replicas_of_unequal_ranks(
    ranks: Ranks, tmp_path: Path, is_prefill_whole: bool
) -> None:
    path = saved(build("llama", {}), tmp_path / "target")
    folder = write_head(tmp_path / "head", build("llama", {}))
    wanted = expected()
    settings = {"speculative_config": head_config(folder, 3), "max_num_batched_tokens": 80}
    with engine_of_ranks(ranks, path, 2, 1, **settings) as engine:
        sides = (side(folder), Side("tcp", engine=engine))
        async with closing(*(sides if is_prefill_whole else reversed(sides))) as (prefill, decode):
            works = [submission(text, NUM_TOKENS) for text in TEXTS]
            noted = noting(decode.engine, {work.id: tokens for work, tokens in zip(works, wanted, strict=True)})
            assert await asyncio.gather(*(ship(prefill, decode, work) for work in works)) == wanted
    lengths = {len(text) for text, _ in noted.notes}
    assert {len(text) + 1 for text in TEXTS} <= lengths, "each stream drafts in its first decode step"


MODELS = ["deepseek_v3", "glm_moe_dsa", "nemotron_h", "qwen3_5_text"]


@pytest.mark.parametrize("name", rest_in_soak(MODELS, "glm_moe_dsa", "nemotron_h"))
async def test_first_decode_step_drafts_from_the_last_states_of_an_mtp_head(tmp_path: Path, name: str) -> None:
    """Latents and keys of indexers travel with the pages of some models, recurrent states with those of others."""
    config = head_config(write_checkpoint(tmp_path, name), 3, method="mtp")
    texts = [text for text in prompts()[:8] if len(text) < 100]
    works = [submission(text, NUM_TOKENS) for text in texts]
    reference = serve(engine_of(target=target_of(name)), History(works, [0] * len(works), {}))[0]
    answers = {each: tokens_of(deltas) for each, deltas in reference.items()}
    engines = [
        engine_of(target=target_of(name), speculative_config=config, max_num_batched_tokens=80) for _ in range(2)
    ]
    async with closing(*(Side("tcp", engine=engine) for engine in engines)) as (prefill, decode):
        noted = noting(decode.engine, answers)
        assert await asyncio.gather(*(ship(prefill, decode, work) for work in works)) == list(answers.values())
    for text in texts:
        notes = [note for note in noted.notes if note[0][: len(text)] == text]
        assert len(notes[0][0]) == len(text) + 1, "of the first decode step"
        for whole, drafts in notes[::3]:
            assert drafts == plain(name).drafts(whole, len(drafts), max(len(text) - MOST_KEPT, 0))


@dataclass
class _OwnDrafts(Noted):
    """Notes what a head drafts, and gives these drafts."""

    def propose(self, wanted: Mapping[str, int], forced: Mapping[str, Sequence[int]] = {}) -> dict[str, list[int]]:
        drafts = self.head.propose(wanted, forced)
        self.notes += [(list(self.texts[name]), found) for name, found in drafts.items()]
        return drafts


async def test_drafts_that_share_an_indexers_choice_are_those_of_a_mixed_replica_and_as_many_are_accepted(
    tmp_path: Path,
) -> None:
    """The choice does not travel: the first draft of each step makes it, on the replica that decodes.

    Prompts are no longer than the states that travel. So the head reads the same rows on both.
    """
    name = "glm_moe_dsa"
    config = head_config(write_checkpoint(tmp_path, name), 3, method="mtp")
    works = [submission(prompts()[number][: 2 * number], 32) for number in range(1, 9)]
    engines = [engine_of(target=target_of(name), speculative_config=config) for _ in range(3)]
    noted = []
    for engine in engines[1:]:
        head = drafter_of(engine)
        assert isinstance(head.head, MtpHead)
        assert head.head.choice is not None
        noted.append(_OwnDrafts(head, Oracle({}, 0, Random(0))))
        speculating(engine, noted[-1])
    mixed = serve(engines[2], History(works, [0] * len(works), {}))[0]
    async with closing(*(Side("tcp", engine=engine) for engine in engines[:2])) as (prefill, decode):
        found = await asyncio.gather(*(ship(prefill, decode, work) for work in works))
    assert found == [tokens_of(deltas) for deltas in mixed.values()]
    assert sorted(noted[0].notes) == sorted(noted[1].notes)
    assert max(len(text) for text, _ in noted[0].notes) > 2 * target_of(name).config.index_topk
    totals = [engine.scheduler.verification.totals for engine in engines[1:] if engine.scheduler.verification]
    assert totals[0] == totals[1]
    assert sum(totals[0].num_accepted_at) > 0
