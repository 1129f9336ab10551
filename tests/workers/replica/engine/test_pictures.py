"""Requests with pictures on an engine: their tokens are those of transformers, whatever happens to them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from pydantic import ByteSize
from torch import Tensor

from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.calibrate import warm_up
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.schedule.drafts.speculative_config import SpeculativeConfig
from crossdock.workers.schedule.request.batch import Batch
from crossdock.workers.schedule.request.items import Item
from crossdock.workers.schedule.request.request import FinishReason, TokenDelta
from crossdock.workers.schedule.request.submission import InvalidField, SamplingParams, Submission
from tests.sweeps import rest_in_soak
from tests.workers.multimodal import (
    BOTH_WAYS,
    FAMILIES,
    NO_PLACEHOLDERS,
    PLAIN,
    PicturePrompt,
    build_multimodal,
    continuation,
    paged_multimodal,
    picture,
)
from tests.workers.replica.engines import before_each_step, engine_on, run, tiny_model, tokens_of

NUM_TOKENS = 6


@pytest.fixture(scope="module", params=rest_in_soak((*FAMILIES, *BOTH_WAYS), "qwen3_vl", *BOTH_WAYS))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str) -> LoadedModel:
    return paged_multimodal(family)


def prompts_of(family: str) -> dict[str, PicturePrompt]:
    """Return prompts that share beginnings: the same text and picture, another picture, two of one kind, text alone."""
    one, other, last = picture(family, 1, (2, 3)), picture(family, 2, (2, 3)), picture(family, 3)
    return {
        "one": PicturePrompt.of(5, one, 9, seed=1),
        "longer": PicturePrompt.of(5, one, 9, last, 4, seed=1),
        "other": PicturePrompt.of(5, other, 9, seed=1),
        "twice": PicturePrompt.of(one, 3, one, seed=2),
        "text": PicturePrompt.of(60, seed=3),
    }


@cache
def expected_of(family: str) -> dict[str, list[int]]:
    module = build_multimodal(family)
    tokens = {name: continuation(module, prompt, NUM_TOKENS) for name, prompt in prompts_of(family).items()}
    assert tokens["one"] != tokens["other"]  # else the test would not see a wrong picture
    return tokens


@pytest.fixture(scope="module")
def prompts(family: str) -> dict[str, PicturePrompt]:
    return prompts_of(family)


@pytest.fixture(scope="module")
def expected(family: str) -> dict[str, list[int]]:
    return expected_of(family)


def submission(name: str, prompt: PicturePrompt, num_tokens: int = NUM_TOKENS, **fields: Any) -> Submission:
    sampling = SamplingParams(num_tokens, temperature=0.0, ignore_eos=True, logit_bias=NO_PLACEHOLDERS)
    return Submission(name, prompt.token_ids, sampling, items=prompt.items, **fields)


def step_tokens(family: str, num_tokens: int) -> int:
    """Return the tokens of a step beside 8 streams, at least as many as a whole picture of the family needs."""
    return max(num_tokens, 36) if family in BOTH_WAYS else num_tokens


def served(engine: Engine, prompts: dict[str, PicturePrompt]) -> dict[str, list[int]]:
    for name, prompt in prompts.items():
        engine.add(submission(name, prompt))
    return {name: tokens_of(deltas) for name, deltas in run(engine).items()}


@pytest.mark.parametrize(
    "config",
    [
        {"max_num_batched_tokens": 512},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8, "page_size": 8, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 512, "enable_chunked_prefill": False},
        {"max_num_batched_tokens": 24, "max_num_seqs": 8, "async_scheduling": True, "page_size": 8},
    ],
    ids=["whole", "small chunks", "no chunks", "ahead"],
)
def test_tokens_equal_transformers(
    family: str,
    model: LoadedModel,
    prompts: dict[str, PicturePrompt],
    expected: dict[str, list[int]],
    config: dict[str, Any],
) -> None:
    config = {**config, "max_num_batched_tokens": step_tokens(family, config["max_num_batched_tokens"])}
    assert served(engine_on(model, **config), prompts) == expected


def test_same_picture_hits_the_prefix_and_another_never_does(
    model: LoadedModel, prompts: dict[str, PicturePrompt], expected: dict[str, list[int]]
) -> None:
    engine = engine_on(model, page_size=4)
    encoding = engine.scheduler.encoding
    cached = {}
    for name in ("one", "longer", "other", "one"):
        engine.add(submission(name, prompts[name]))
        deltas = run(engine)[name]
        cached[name] = deltas[0].num_cached_tokens
        assert tokens_of(deltas) == expected[name]
    own = prompts["one"].items[0]
    assert cached["one"] > own.end  # the second time
    assert cached["longer"] >= own.end // 4 * 4
    assert cached["other"] == own.start // 4 * 4
    assert encoding.totals.num_encoded == 3  # one, the last of `longer`, other


def test_preemption_inside_a_picture_encodes_again_and_tokens_stay(
    family: str, model: LoadedModel, prompts: dict[str, PicturePrompt], expected: dict[str, list[int]]
) -> None:
    """A stream fills the pool; an urgent prompt takes the pages of one that is inside its picture, or just behind."""
    num_tokens = 24 if family in BOTH_WAYS else 16
    engine = engine_on(model, num_pages=200, page_size=4, max_num_batched_tokens=num_tokens, max_num_seqs=4)
    engine.add(submission("one", prompts["one"], slo_class="batch"))
    engine.step()
    request = engine.scheduler.table.get("one")
    assert request is not None
    assert 0 < request.num_computed_tokens < len(prompts["one"].token_ids)
    engine.scheduler.table.preempt(request)
    engine.scheduler.encoding.begin_step()
    assert tokens_of(run(engine)["one"]) == expected["one"]


def test_drafts_after_pictures_are_verified_exactly(
    model: LoadedModel, prompts: dict[str, PicturePrompt], expected: dict[str, list[int]]
) -> None:
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_max=2, prompt_lookup_min=1)
    engine = engine_on(model, speculative_config=speculative)
    assert served(engine, prompts) == expected


def test_small_cache_encodes_again_and_tokens_stay(
    family: str, model: LoadedModel, prompts: dict[str, PicturePrompt], expected: dict[str, list[int]]
) -> None:
    assert model.encoder is not None
    rows = max(item.num_embedding_tokens for prompt in prompts.values() for item in prompt.items)
    memory = ByteSize(rows * model.encoder.embedding_token_bytes)
    num_tokens = step_tokens(family, 16)
    engine = engine_on(model, mm_encoder_cache=memory, max_num_batched_tokens=num_tokens, max_num_seqs=8, page_size=8)
    assert served(engine, prompts) == expected
    assert engine.scheduler.encoding.totals.num_evicted


def test_calibrated_engine_predicts_pictures_and_stays_exact(
    family: str, model: LoadedModel, prompts: dict[str, PicturePrompt], expected: dict[str, list[int]]
) -> None:
    engine, steps = engine_on(model, max_num_batched_tokens=128, max_num_seqs=8), list[Batch]()
    before_each_step(engine, steps.append)
    warm_up(engine)
    assert any(step.encoder.items for step in steps) == (family in BOTH_WAYS)  # a kernel variant of their own
    assert engine.encoder_fit is not None
    assert served(engine, prompts) == expected


def broken(item: Item) -> Item:
    """Return an item of the same content hash, whose tensors the encoder cannot compute."""
    return replace(item, tensors={"pixel_values": item.tensors["pixel_values"][:, :2]})


def test_picture_that_cannot_be_encoded_fails_its_own_request_alone() -> None:
    model, module = paged_multimodal("llava"), build_multimodal("llava")
    good, bad = PicturePrompt.of(5, picture("llava", 1), 9), PicturePrompt.of(5, picture("llava", 2), 9)
    wrong = broken(bad.items[0])
    engine = engine_on(model, page_size=4)
    engine.add(submission("bad", PicturePrompt(bad.token_ids, [wrong])))
    engine.add(submission("good", good))
    deltas = run(engine)
    assert tokens_of(deltas["good"]) == continuation(module, good, NUM_TOKENS)
    last: TokenDelta = deltas["bad"][-1]
    assert last.finish_reason is FinishReason.ERROR
    assert "cannot be encoded" in str(last.error)
    engine.add(submission("again", PicturePrompt(bad.token_ids, [wrong])))  # its embeddings count as known by now
    assert [delta.finish_reason for delta in run(engine)["again"]] == [FinishReason.ERROR]
    assert engine.pages.counts().cached == len(good.token_ids) // 4 + 1, "pages of the failed prompt are not indexed"


def short_of_memory(monkeypatch: pytest.MonkeyPatch, model: LoadedModel, num_times: int, error: Exception) -> list[int]:
    """Let the next calls of the encoder fail. Returns the pictures of each call, as they come."""
    assert model.encoder is not None
    calls, compute = list[int](), model.encoder.features

    def features(items: Sequence[Item]) -> Tensor:
        calls.append(len(items))
        if len(calls) <= num_times:
            raise error
        return compute(items)

    monkeypatch.setattr(type(model.encoder), "features", lambda _, items: features(items))
    return calls


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: not enough memory: you tried")],
)
def test_picture_that_lacked_memory_is_encoded_for_the_next_request(
    monkeypatch: pytest.MonkeyPatch, error: Exception, is_ahead: bool
) -> None:
    """Two pictures at once lack memory. Each is tried alone once: the first one lacks memory again."""
    model, module = paged_multimodal("llava"), build_multimodal("llava")
    prompts = [PicturePrompt.of(5, picture("llava", number), 9) for number in (1, 2)]
    expected = [continuation(module, prompt, NUM_TOKENS) for prompt in prompts]
    engine = engine_on(model, page_size=4, async_scheduling=is_ahead)
    calls = short_of_memory(monkeypatch, model, 2, error)
    for name, prompt in zip("ab", prompts, strict=True):
        engine.add(submission(name, prompt))
    deltas = run(engine)
    assert calls == [2, 1, 1]
    assert deltas["a"][-1].finish_reason is FinishReason.ERROR
    assert "may succeed later" in str(deltas["a"][-1].error)
    assert tokens_of(deltas["b"]) == expected[1]
    assert served(engine, {"again": prompts[0]}) == {"again": expected[0]}


def test_picture_that_lacked_memory_once_is_encoded_in_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = paged_multimodal("llava"), PicturePrompt.of(5, picture("llava", 1), 9)
    calls = short_of_memory(monkeypatch, model, 1, MemoryError())
    assert served(engine_on(model), {"a": prompt}) == {"a": continuation(build_multimodal("llava"), prompt, NUM_TOKENS)}
    assert calls == [1, 1]


def test_failure_is_noticed_though_the_step_behind_has_let_the_picture_go() -> None:
    """The cache holds one picture: the step that runs ahead encodes the second, and forgets the first."""
    model = paged_multimodal("llava")
    prompt = PicturePrompt.of(5, picture("llava", 1), 9, picture("llava", 2), 9)
    first, second = prompt.items
    assert model.encoder is not None
    memory = ByteSize(first.num_embedding_tokens * model.encoder.embedding_token_bytes)
    tokens = -(-first.end // 4) * 4
    engine = engine_on(
        model,
        page_size=4,
        max_num_batched_tokens=tokens,
        max_num_seqs=4,
        mm_encoder_cache=memory,
        async_scheduling=True,
    )
    engine.add(submission("bad", PicturePrompt(prompt.token_ids, [broken(first), second])))
    assert [delta.finish_reason for delta in run(engine)["bad"]] == [FinishReason.ERROR]
    assert engine.pages.counts().owned == 0


def test_prompt_whose_picture_is_in_cached_pages_does_not_need_its_embeddings() -> None:
    model, prompt = paged_multimodal("llava"), PicturePrompt.of(5, picture("llava", 1), 9, seed=1)
    expected = continuation(build_multimodal("llava"), prompt, NUM_TOKENS)
    engine = engine_on(model, page_size=4)
    encoding = engine.scheduler.encoding
    assert model.encoder is not None
    assert served(engine, {"one": prompt}) == {"one": expected}
    encoding.clear()
    model.encoder.clear()
    other = PicturePrompt.of(7, picture("llava", 1), 9, seed=2)
    engine.add(submission("bad", PicturePrompt(other.token_ids, [broken(other.items[0])])))
    assert [delta.finish_reason for delta in run(engine)["bad"]] == [FinishReason.ERROR]
    assert served(engine, {"one": prompt}) == {"one": expected}


def test_pictures_that_cannot_be_encoded_teach_no_cost() -> None:
    """A call that raises at once says nothing about those that compute."""
    engine = engine_on(paged_multimodal("llava"), page_size=4)
    rows = PicturePrompt.of(picture("llava", 1)).items[0].num_embedding_tokens
    engine.calibrate_encoder([((rows,), 10.0)])
    assert engine.encoder_fit is not None
    before = engine.encoder_fit.cost
    for number in range(12):
        bad = PicturePrompt.of(5, picture("llava", number), 9)
        engine.add(submission(str(number), PicturePrompt(bad.token_ids, [broken(bad.items[0])])))
        assert [delta.finish_reason for delta in run(engine)[str(number)]] == [FinishReason.ERROR]
    assert engine.encoder_fit.cost == before


def test_step_that_fails_leaves_no_embeddings_behind() -> None:
    model, module = paged_multimodal("qwen2_vl"), build_multimodal("qwen2_vl")
    prompt = PicturePrompt.of(5, picture("qwen2_vl", 1), 9)
    engine = engine_on(model, page_size=4, max_num_batched_tokens=8, max_num_seqs=4)
    engine.add(submission("a", prompt))
    engine.step()
    engine.step()
    assert [delta.finish_reason for _, delta in engine.fail_all("lost")] == [FinishReason.ERROR]
    engine.add(submission("b", prompt))
    assert tokens_of(run(engine)["b"]) == continuation(module, prompt, NUM_TOKENS)


def test_model_of_text_alone_refuses_pictures_with_the_reason() -> None:
    engine = engine_on(tiny_model())
    with pytest.raises(InvalidField, match="the model takes text alone"):
        engine.add(submission("a", PicturePrompt.of(5, picture("llava", 1), 9)))


@pytest.mark.parametrize(
    ("family", "windows"),
    [
        ("pixtral", {"sliding_window": 16}),
        ("qwen2_vl", {**PLAIN, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    ],
)
def test_layers_with_windows_give_back_pages_inside_pictures(family: str, windows: dict[str, Any]) -> None:
    """One group of layers with a window, and several groups: a prompt longer than the window, in chunks of 16."""
    prompt = PicturePrompt.of(5, picture(family, 1, (4, 4)), 9, picture(family, 2, (4, 3)), 4)
    engine = new_engine(
        wrap_module(build_multimodal(family, **windows)),
        EngineConfig(max_num_batched_tokens=16, max_num_seqs=4, page_size=4, kv_cache_memory=ByteSize(4 << 20)),
    )
    assert engine.pages.has_windows
    assert (engine.pages.num_groups == 1) == (family == "pixtral")
    engine.add(submission("a", prompt))
    assert tokens_of(run(engine)["a"]) == continuation(build_multimodal(family, **windows), prompt, NUM_TOKENS)


@pytest.mark.parametrize("window", [8, 24])
def test_windows_beside_pictures_of_both_directions_give_back_pages(window: int) -> None:
    """Windows of less and of more than a picture, in groups of layers, with steps ahead and a pool that preempts."""
    prompts = {
        str(number): PicturePrompt.of(5 + number, picture("gemma3", 1), 9, picture("gemma3", number), 14, seed=number)
        for number in range(4)
    }
    module = build_multimodal("gemma3", sliding_window=window)
    expected = {name: continuation(module, prompt, NUM_TOKENS) for name, prompt in prompts.items()}
    engine = engine_on(
        wrap_module(build_multimodal("gemma3", sliding_window=window), LoadOptions(96)),
        num_pages=50,
        max_num_batched_tokens=36,
        max_num_seqs=4,
        page_size=4,
        async_scheduling=True,
    )
    assert engine.pages.num_groups > 1
    assert served(engine, prompts) == expected


def test_picture_of_both_directions_that_no_step_has_room_for_is_refused_by_name() -> None:
    engine = engine_on(paged_multimodal("gemma3"), max_num_batched_tokens=24, max_num_seqs=8, page_size=8)
    with pytest.raises(InvalidField, match=r"item 0 of the prompt, image at token 5, .* room for 16"):
        engine.add(submission("a", PicturePrompt.of(5, picture("gemma3", 1), 9)))
