"""A small model drafts what it would generate itself, for several streams at once, within its own pool."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ByteSize

from crossdock.workers.draft.draft_model import CATCH_UP_TOKENS, DraftModel
from crossdock.workers.draft.drafter import new_drafter
from crossdock.workers.draft.passes import DraftPasses, new_stream
from crossdock.workers.draft.prompt_lookup import PromptLookup
from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.schedule.cost.cost import NO_LIMIT
from crossdock.workers.schedule.drafts.speculative_config import SpeculativeConfig
from crossdock.workers.schedule.memory.pages import PagePool
from tests.workers.architectures import build
from tests.workers.quantised import CASES, SIZES, write
from tests.workers.replica.engines import MAX_MODEL_LEN, VOCAB_SIZE, tiny_model

PAGE_SIZE = 16


def prompt_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()


def expected(prompts: dict[str, list[int]], num_tokens: int, module: Any = None) -> dict[str, list[int]]:
    """Return the greedy continuations of a model like the one that drafts, which attends without pages."""
    module = module or build("llama", {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_MODEL_LEN})
    found = {}
    with torch.inference_mode():
        for name, prompt in prompts.items():
            tokens = list(prompt)
            for _ in range(num_tokens):
                tokens.append(int(module(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
            found[name] = tokens[len(prompt) :]
    return found


def drafter(num_pages: int = 200) -> DraftModel:
    return DraftModel(tiny_model(), PagePool(num_pages, PAGE_SIZE, enable_prefix_caching=False))


def test_same_model_as_target_drafts_its_greedy_tokens() -> None:
    prompts = {"a": prompt_of(40, 0), "b": prompt_of(7, 1), "c": prompt_of(33, 2)}
    wanted = expected(prompts, 8)
    drafting = drafter()
    texts = {name: list(prompt) for name, prompt in prompts.items()}
    for name, text in texts.items():
        drafting.add(name, text)
    first = drafting.propose({"a": 4, "b": 2, "c": 3})
    assert first == {"a": wanted["a"][:4], "b": wanted["b"][:2], "c": wanted["c"][:3]}
    for name, text in texts.items():
        text += wanted[name][: len(first[name]) + 1]  # all are accepted, and one token more is sampled
    second = drafting.propose(dict.fromkeys(texts, 3))
    assert second == {name: wanted[name][len(first[name]) + 1 :][:3] for name in texts}


def test_quantised_small_model_drafts_the_tokens_of_its_dequantised_weights(tmp_path: Path) -> None:
    sizes = SIZES | {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_MODEL_LEN}
    module = write(tmp_path, CASES["awq"], sizes=sizes).eval()
    config = SpeculativeConfig(method="draft_model", model=str(tmp_path), num_speculative_tokens=6)
    drafting, prompt = DraftModel.load(config, tiny_model()), prompt_of(40, 4)
    drafting.add("a", prompt)
    assert drafting.propose({"a": 6}) == expected({"a": prompt}, 6, module)


def test_rejected_drafts_are_forgotten() -> None:
    drafting, text = drafter(), prompt_of(30, 3)
    drafting.add("a", text)
    drafts = drafting.propose({"a": 5})["a"]
    for accepted in (2, 0, 1):
        other = (drafts[accepted] + 1) % VOCAB_SIZE
        text += [*drafts[:accepted], other]
        drafts = drafting.propose({"a": 4})["a"]
        assert drafts == expected({"a": text}, 4)["a"]


def test_drafts_after_forced_tokens_continue_the_text_with_them() -> None:
    drafting, text, forced = drafter(), prompt_of(30, 8), prompt_of(4, 9)
    drafting.add("a", text)
    continued = expected({"a": text + forced}, 3)["a"]
    assert drafting.propose({"a": 3}, {"a": forced}) == {"a": continued}
    text += forced[:2]  # a step had room for two of them
    assert drafting.propose({"a": 3}, {"a": forced[2:]}) == {"a": continued}
    assert drafting.propose({"a": 3}) == expected({"a": text}, 3), "as if nothing were forced"
    text += [*forced[2:], continued[0], (continued[1] + 1) % VOCAB_SIZE]
    assert drafting.propose({"a": 3}) == expected({"a": text}, 3)


def test_long_prompt_is_computed_over_several_calls_while_others_draft() -> None:
    drafting = drafter()
    long, short = prompt_of(2 * CATCH_UP_TOKENS + 50, 4), prompt_of(5, 5)
    drafting.add("long", long)
    drafting.add("short", short)
    calls = [drafting.propose({"long": 2, "short": 2}) for _ in range(3)]
    assert ["long" in drafts for drafts in calls] == [False, False, True]
    assert all(len(drafts["short"]) == 2 for drafts in calls)
    assert calls[-1]["long"] == expected({"a": long}, 2)["a"]


def test_full_pool_takes_pages_of_streams_that_do_not_draft() -> None:
    drafting = drafter(num_pages=4)
    texts = {name: prompt_of(40, seed) for seed, name in enumerate("abc")}
    for name, text in texts.items():
        drafting.add(name, text)
    assert "a" in drafting.propose({"a": 3})
    assert drafting.propose({"b": 3})["b"] == expected({"b": texts["b"]}, 3)["b"]
    assert len(drafting.propose({"b": 3, "c": 3})) == 1  # there are pages for one of the two
    drafting.remove("b")
    drafting.remove("c")
    assert drafting.propose({"a": 3})["a"] == expected({"a": texts["a"]}, 3)["a"]
    drafting.remove("a")
    assert drafting.pages.block_pool.num_available == 4


def test_text_as_long_as_the_small_model_takes_has_no_drafts() -> None:
    drafting = DraftModel(tiny_model(max_model_len=64), PagePool(10, PAGE_SIZE, enable_prefix_caching=False))
    text = prompt_of(62, 6)
    drafting.add("a", text)
    assert drafting.match_length("a") > 0
    assert len(drafting.propose({"a": 8})["a"]) == 2
    text += [1, 2]
    assert drafting.match_length("a") == 0
    assert drafting.propose({"a": 8}) == {}


def test_longer_drafts_and_more_streams_are_predicted_to_take_longer() -> None:
    drafting = drafter()
    assert drafting.seconds(0, 0) == 0
    assert 0 < drafting.seconds(1, 1) < drafting.seconds(1, 4) <= drafting.seconds(8, 4)


@pytest.mark.parametrize("most", [1, 3])
def test_drafts_are_at_most_as_many_as_wanted(most: int) -> None:
    drafting = drafter()
    drafting.add("a", prompt_of(9, 7))
    assert [len(drafts) for drafts in drafting.propose({"a": most}).values()] == [most]


def saved(directory: Path, vocab_size: int) -> str:
    """Save a random model with a vocabulary of so many tokens; return its directory."""
    build("llama", {"vocab_size": vocab_size, "max_position_embeddings": MAX_MODEL_LEN}).save_pretrained(directory)
    return str(directory)


def test_small_model_is_loaded_from_its_directory(tmp_path: Path) -> None:
    config = SpeculativeConfig(model=saved(tmp_path, VOCAB_SIZE), draft_kv_cache_memory=ByteSize(1 << 20))
    drafting, text = new_drafter(config, tiny_model()), prompt_of(20, 8)
    answer = expected({"a": text}, 60)["a"]
    drafting.add("a", text)
    for start in range(0, 60, 4):  # in bfloat16, one of twenty tokens would be another one
        assert drafting.propose({"a": 4})["a"] == answer[start : start + 4]
        text += answer[start : start + 4]


def test_other_vocabulary_is_refused_with_both_sizes(tmp_path: Path) -> None:
    config = SpeculativeConfig(model=saved(tmp_path, VOCAB_SIZE + 64), draft_kv_cache_memory=ByteSize(1 << 20))
    with pytest.raises(ValueError, match=f"model: .* {VOCAB_SIZE + 64} tokens .* {VOCAB_SIZE}"):
        new_drafter(config, tiny_model())


def test_memory_for_less_than_a_page_is_refused(tmp_path: Path) -> None:
    config = SpeculativeConfig(model=saved(tmp_path, VOCAB_SIZE), draft_kv_cache_memory=ByteSize(100))
    with pytest.raises(ValueError, match=r"draft_kv_cache_memory \(100\) must be at least \d+ bytes"):
        new_drafter(config, tiny_model())


def test_method_chooses_the_drafter() -> None:
    assert isinstance(new_drafter(SpeculativeConfig(method="suffix"), tiny_model()), PromptLookup)


@pytest.mark.parametrize("most_context", [64.0, NO_LIMIT])
def test_predicted_seconds_of_drafts_stop_growing_where_an_indexer_chooses_tokens(most_context: float) -> None:
    """The device is simulated: a row has a price for each token that it attends to, none for those scored alone."""
    now = 0.0

    def row_seconds(position: int) -> float:
        return 1e-4 + 1e-5 * min(position + 1, most_context)

    def compute(inputs: StepInputs) -> torch.Tensor:
        nonlocal now
        now += sum(row_seconds(position) for position in inputs.positions.tolist())
        return torch.zeros(len(inputs.wanted), dtype=torch.int64)

    pages = PagePool(200, PAGE_SIZE, enable_prefix_caching=False)
    passes = DraftPasses(compute, pages, lambda: now, most_context=most_context)
    stream = new_stream("a", [0] * 1001)
    assert passes.make_room(stream, 1001, ())
    for context in (*range(4, 60, 4), *range(100, 300, 10), 1000):
        stream.num_computed_tokens = context
        passes.run([passes.part(stream, 1)])
    predicted = passes.seconds(1, 2) - passes.seconds(1, 1)
    assert predicted == pytest.approx(row_seconds(1000), rel=0.15)


@pytest.mark.parametrize("shares_choice", [False, True])
def test_seconds_of_first_drafts_count_what_is_scored_and_those_of_further_ones_where_they_choose(
    shares_choice: bool,
) -> None:
    """The device is simulated: a row has a price for each token that it scores, and further drafts may score none."""
    now = 0.0
    is_further = False

    def row_seconds(position: int, scores: bool) -> float:
        return 1e-4 + 1e-5 * min(position + 1, 256) + 4e-6 * max(position - 255, 0) * scores

    def compute(inputs: StepInputs) -> torch.Tensor:
        nonlocal now
        scores = not (is_further and shares_choice)
        now += sum(row_seconds(position, scores) for position in inputs.positions.tolist())
        return torch.zeros(len(inputs.wanted), dtype=torch.int64)

    pages = PagePool(400, PAGE_SIZE, enable_prefix_caching=False)
    passes = DraftPasses(compute, pages, lambda: now, most_context=256.0, shares_choice=shares_choice)
    stream = new_stream("a", [0] * 1501)
    assert passes.make_room(stream, 1501, ())
    for context in (*range(4, 1000, 40), 1000):
        for is_further, num_tokens in ((False, 2), (True, 1), (True, 1)):
            stream.num_computed_tokens = context
            passes.run([passes.part(stream, num_tokens)], is_further=is_further)
    assert passes.seconds(1, 1) == pytest.approx(2 * row_seconds(1000, scores=True), rel=0.15)
    further = passes.seconds(1, 3) - passes.seconds(1, 1)
    assert further == pytest.approx(2 * row_seconds(1000, scores=not shares_choice), rel=0.15)
