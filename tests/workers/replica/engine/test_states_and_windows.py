"""Layers with a state or a window give pages back while a request runs, and its tokens stay those of transformers."""

import random
from typing import Any

import pytest
import torch
from pydantic import ByteSize

from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.sampling import heads
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.calibrate import warm_up
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.schedule.memory.prefix_index import AttentionChunk
from crossdock.workers.schedule.recurrent.states import RecurrentStates
from crossdock.workers.schedule.request.batch import Batch, Scheduled
from crossdock.workers.schedule.request.request import Status
from crossdock.workers.schedule.request.submission import SamplingParams, Submission
from tests.sweeps import rest_in_soak
from tests.workers.architectures import SERVED, WINDOW, build
from tests.workers.replica.engines import before_each_step, generated, greedy, run, served, tokens_of

NUM_TOKENS = 20  # more than a window
WIDE = {"hidden_size": 64, "intermediate_size": 80, "head_dim": 32}  # as layers must be to be fused
WITH_WINDOWS: dict[str, dict[str, Any]] = {
    "gemma2": SERVED["gemma2"],
    "gemma3_text": SERVED["gemma3_text"],
    "gemma4_text": {**SERVED["gemma4_text"], "global_head_dim": 24, "num_global_key_value_heads": 1},
    "gpt_oss": SERVED["gpt_oss"],
    "llama4_text": SERVED["llama4_text"],
    "mistral": SERVED["mistral"],
    "mistral fused": {**SERVED["mistral"], **WIDE},
}
WITH_STATES = ["qwen3_next", "lfm2 conv", "granitemoehybrid", "falcon_h1", "kimi_linear", "lfm3 conv"]
MODELS = {name: SERVED[name] for name in WITH_STATES} | WITH_WINDOWS
BY_DEFAULT = ["lfm3 conv", "llama4_text", "mistral fused"]
"""Convolutions beside a window, attention chunks beside whole attention, and windows alone, fused."""


def prompts() -> list[list[int]]:
    """Return prompts of 1 to 150 tokens; the last two share 100."""
    rng = random.Random(0)
    shared = [rng.randrange(3, 128) for _ in range(100)]
    lengths = (1, 7, 8, 9, 16, 17, 40, 64, 65, 150)
    return [[rng.randrange(3, 128) for _ in range(length)] for length in lengths] + [[*shared, 7], [*shared, 8, 9]]


def engine_on(model: LoadedModel, num_pages: int, **config: Any) -> Engine:
    """Return an engine with the memory of so many pages of 8 tokens, as they are where every layer keeps its pages."""
    memory = ByteSize(num_pages * model.layout(8).page_bytes)
    settings = {"page_size": 8, "max_num_batched_tokens": 64, "max_num_seqs": 12} | config
    return new_engine(model, EngineConfig(kv_cache_memory=memory, **settings))


def served_under_preemption(engine: Engine, texts: list[list[int]]) -> list[list[int]]:
    """Return the tokens after prompts; every fifth step a request is preempted that is not in flight."""
    for number, prompt in enumerate(texts):
        engine.add(Submission(str(number), prompt, greedy(NUM_TOKENS)))
    tokens: dict[str, list[int]] = {str(number): [] for number in range(len(texts))}
    num_steps = 0
    while engine.has_work:
        for delta in engine.step().deltas:
            tokens[delta.request_id] += delta.token_ids
        num_steps += 1
        for request in engine.scheduler.table.requests() if num_steps % 5 == 0 else ():
            if request.status is Status.RUNNING and not request.num_in_flight_tokens:
                engine.scheduler.table.preempt(request)
                break
    return list(tokens.values())


@pytest.fixture(scope="module", params=rest_in_soak(MODELS, *BY_DEFAULT))
def name(request: pytest.FixtureRequest) -> str:
    model_name: str = request.param
    return model_name


@pytest.fixture(scope="module")
def model(name: str) -> LoadedModel:
    return wrap_module(build(name, MODELS[name]))


@pytest.fixture(scope="module")
def expected(name: str) -> list[list[int]]:
    return generated(build(name, MODELS[name]), prompts(), NUM_TOKENS)


def test_groups_of_layers_are_those_of_the_windows(model: LoadedModel, name: str) -> None:
    engine = engine_on(model, 200)
    window = AttentionChunk(WINDOW) if name == "llama4_text" else WINDOW
    alone = [window] if "mistral" in name else [None, window]
    assert [group.window for group in engine.model.groups] == (alone if name in [*WITH_WINDOWS, "lfm3 conv"] else [])
    assert bool(model.kernels) == ("fused" in name)


@pytest.mark.parametrize("num_tokens", rest_in_soak([20, 300], 20))
def test_pages_that_no_request_owns_are_never_read(
    model: LoadedModel, expected: list[list[int]], num_tokens: int
) -> None:
    engine = engine_on(model, 300, enable_prefix_caching=False, max_num_batched_tokens=num_tokens)
    pages, groups = engine.pages, engine.pages.num_groups

    def poison(batch: Batch) -> None:
        owners = [each.owner for each in engine.scheduler.table.requests() if pages.num_held_by(each.owner)]
        owned = {page for owner in owners for group in range(groups) for page in pages.pages_of(owner, group)}
        owned |= {page for owner in owners if pages.state_pages for page in pages.states.by_owner[owner].own}
        model.pool.tensor.view(pages.num_pages, -1)[[page for page in range(pages.num_pages) if page not in owned]] = (
            torch.nan
        )

    before_each_step(engine, poison)
    assert served(engine, prompts(), NUM_TOKENS) == expected


@pytest.mark.parametrize("is_ahead", [False, True])
def test_tokens_under_preemption_are_those_of_transformers(
    model: LoadedModel, expected: list[list[int]], is_ahead: bool
) -> None:
    longest = 32 + 2 * model.state_pages(8)  # pages of a request of max_model_len, with a snapshot
    engine = engine_on(model, 10 + longest, async_scheduling=is_ahead, max_num_batched_tokens=40)
    assert served_under_preemption(engine, prompts()) == expected
    assert is_ahead or engine.scheduler.table.num_preemptions > 0, "ahead, most requests are in flight all the time"


@pytest.mark.parametrize("is_ahead", rest_in_soak([False, True], True))
def test_tokens_after_a_cached_prefix_are_those_of_transformers(
    model: LoadedModel, expected: list[list[int]], is_ahead: bool
) -> None:
    engine = engine_on(model, 600, async_scheduling=is_ahead, max_num_batched_tokens=40)
    for _ in range(2):
        assert served(engine, prompts(), NUM_TOKENS) == expected
    assert served(engine, prompts()[-1:], NUM_TOKENS) == expected[-1:]
    engine.add(Submission("again", prompts()[-1], greedy(NUM_TOKENS)))
    engine.step()
    found = engine.scheduler.table.requests()[0].num_cached_tokens
    assert found >= 64, "the prefix was found in every group, with a snapshot"
    run(engine)


def test_replica_with_states_or_windows_is_calibrated(model: LoadedModel) -> None:
    engine = engine_on(model, 400)
    profile = warm_up(engine)
    assert profile.state_pages == engine.model.state_pages(8)
    assert profile.page_bytes * profile.num_pages == model.pool.tensor.nbytes  # type: ignore[union-attr]
    assert engine.pages.counts().owned == 0


def test_sampled_tokens_are_the_same_where_steps_begin_before_the_tokens_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host must draw some tokens: the parts of the next step that began without them are void."""
    monkeypatch.setattr(heads, "WIDTHS", (8, 16))
    plain_undo, undone = RecurrentStates.undo, []

    def undo(self: RecurrentStates, part: Scheduled) -> None:
        undone.append(part.request.id)
        plain_undo(self, part)

    monkeypatch.setattr(RecurrentStates, "undo", undo)
    model = wrap_module(build("lfm2 conv", SERVED["lfm2 conv"]))
    outputs = []
    for is_ahead in (False, True):
        engine = engine_on(model, 300, async_scheduling=is_ahead, enable_prefix_caching=False)
        for number, prompt in enumerate(prompts()):
            params = SamplingParams(max_tokens=NUM_TOKENS, temperature=4.0, top_p=0.97, seed=number, ignore_eos=True)
            engine.add(Submission(str(number), prompt, params))
        deltas = run(engine)
        outputs.append([tokens_of(deltas[str(number)]) for number in range(len(prompts()))])
    assert outputs[0] == outputs[1]
    assert undone


def test_pool_too_small_for_a_state_is_refused_with_numbers() -> None:
    model = wrap_module(build("granitemoehybrid", SERVED["granitemoehybrid"]))
    with pytest.raises(ValueError, match=r"kv_cache_memory .* max_model_len \(256\) needs"):
        engine_on(model, 32 + model.state_pages(8))


def test_pool_serves_a_context_that_it_could_not_hold_without_windows() -> None:
    module = build(
        "gemma3_text", SERVED["gemma3_text"] | {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
    )
    model, prompt = wrap_module(module), prompts()[-3]
    with pytest.raises(ValueError, match="max_model_len"):
        engine_on(model, 24, disable_hybrid_kv_cache_manager=True, max_num_batched_tokens=32)
    engine = engine_on(model, 24, max_num_batched_tokens=32)
    assert [group.window for group in engine.model.groups] == [None, WINDOW, WINDOW, WINDOW]
    expected = generated(
        build("gemma3_text", SERVED["gemma3_text"] | {"layer_types": module.config.layer_types}), [prompt], NUM_TOKENS
    )
    assert served(engine, [prompt], NUM_TOKENS) == expected
    with pytest.raises(ValueError, match=r"kv_cache_memory .* max_model_len \(256\) needs"):
        engine_on(model, 12, max_num_batched_tokens=32)


def test_layers_keep_their_pages_where_windows_cannot_pass_them(caplog: pytest.LogCaptureFixture) -> None:
    gemma = wrap_module(build("gemma3_text", SERVED["gemma3_text"]))
    qwen = wrap_module(build("qwen2", {**SERVED["qwen2 sliding"], **WIDE}))
    caplog.set_level("INFO")
    for model, config, reason in (
        (gemma, {"disable_hybrid_kv_cache_manager": True}, "disable_hybrid_kv_cache_manager"),
        (qwen, {}, "layers fused for a CPU"),
    ):
        engine = engine_on(model, 187, **config)
        assert not engine.model.groups
        assert not engine.pages.has_windows
        assert reason in caplog.text
