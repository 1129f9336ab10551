"""Whatever the chunks, the company and the interruptions of a request, its tokens are those of transformers."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ByteSize
from transformers import AutoModelForCausalLM, AutoTokenizer

from crossdock.kernels.options import CpuKernels
from crossdock.workers.model.load import load_model, wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.schedule.request.request import FinishReason, TokenDelta
from crossdock.workers.schedule.request.submission import Grammar, SamplingParams, Submission
from tests.workers.architectures import build
from tests.workers.replica.engines import (
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    engine_on,
    generated,
    greedy,
    run,
    served,
    tiny_model,
    tokens_of,
)

NUM_TOKENS = 12
TOPICS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Es war einmal ein König, der",
    "SELECT name FROM users WHERE",
    "日本の首都は",
    "🎉 Happy birthday to",
    "1, 1, 2, 3, 5, 8,",
    "Once upon a time there was a little girl who",
    "The quick brown fox",
    "\n\n",
]
CONFIGS: list[dict[str, Any]] = [
    {"max_num_batched_tokens": 100, "max_num_seqs": 32, "enable_prefix_caching": False},
    {"max_num_batched_tokens": 512, "long_prefill_token_threshold": 16},
    {"max_num_batched_tokens": 8192, "enable_chunked_prefill": False},
    {"max_num_batched_tokens": 300, "page_size": 32, "max_num_seqs": 50},
]


def prompts_from(topics: list[list[int]], count: int = 24) -> list[list[int]]:
    """Return `count` prompts of 1 to 400 tokens, some sharing their beginnings."""
    rng = random.Random(0)
    shared = [token for _ in range(20) for token in rng.choice(topics)]
    prompts = [*topics, [5]]
    while len(prompts) < count:
        body = [token for _ in range(rng.choice([1, 3, 10, 40])) for token in rng.choice(topics)]
        prompts.append((shared if rng.random() < 0.3 else []) + body[: rng.randint(1, 200)])
    return prompts


def reference() -> Any:
    """Return the module of `tiny_model`, untouched."""
    return build("llama", {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_MODEL_LEN})


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return prompts_from([[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (5, 8, 12, 2, 9, 7)])


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    return generated(reference(), prompts)


def assert_tokens(engine: Engine, prompts: list[list[int]], expected: list[list[int]]) -> dict[str, list[TokenDelta]]:
    for number, prompt in enumerate(prompts):
        engine.add(Submission(f"{number}", prompt, greedy(NUM_TOKENS)))
    deltas = run(engine)
    assert [tokens_of(deltas[f"{number}"]) for number in range(len(prompts))] == expected
    return deltas


@pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda config: ",".join(f"{key}={value}" for key, value in config.items())
)
def test_greedy_tokens_in_any_chunks_equal_generate(
    model: LoadedModel, prompts: list[list[int]], expected: list[list[int]], config: dict[str, Any]
) -> None:
    assert_tokens(engine_on(model, **config), prompts, expected)


@pytest.fixture(scope="module")
def smollm2(model_dir: Path) -> LoadedModel:
    return load_model(ModelSpec(str(model_dir), "float32"))


def test_greedy_tokens_on_real_weights_equal_generate(model_dir: Path, smollm2: LoadedModel) -> None:
    """SmolLM2, with prompts that share steps with decodes, and with chunks of a page.

    One forward pass of transformers over a prompt and its tokens shows what `generate` would have chosen at each place.
    """
    _assert_real_tokens(model_dir, smollm2, 6, CONFIGS[1])


@pytest.mark.soak
@pytest.mark.parametrize("kernel", ["onednn", "torch"])
def test_greedy_tokens_on_real_weights_equal_generate_by_every_kernel(model_dir: Path, kernel: CpuKernels) -> None:
    model = load_model(ModelSpec(str(model_dir), "float32", cpu_kernels=kernel))
    assert model.kernels == kernel
    _assert_real_tokens(model_dir, model, 5, CONFIGS[0])


def _assert_real_tokens(model_dir: Path, model: LoadedModel, num_prompts: int, config: dict[str, Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    prompts = prompts_from([tokenizer(text).input_ids for text in TOPICS[: num_prompts - 2]], num_prompts)
    engine = engine_on(model, num_pages=512, **config)
    found = served(engine, prompts, NUM_TOKENS)
    module = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for prompt, tokens in zip(prompts, found, strict=True):
        with torch.inference_mode():
            logits = module(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
            logits[:, list(model.eos_token_ids)] = -torch.inf  # min_tokens
        assert logits.argmax(-1).tolist() == tokens


def test_greedy_tokens_from_cached_prefixes_equal_generate(
    model: LoadedModel, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    engine = engine_on(model)
    for _ in range(2):
        deltas = assert_tokens(engine, prompts, expected)
    for number, prompt in enumerate(prompts):  # the second time all but the last page of every prompt was there
        assert deltas[f"{number}"][0].num_cached_tokens == (len(prompt) - 1) // 16 * 16


def test_greedy_tokens_under_preemption_equal_generate(prompts: list[list[int]], expected: list[list[int]]) -> None:
    """A pool for one long request: streams that start together on 15 tokens each outgrow it together."""
    engine = engine_on(tiny_model(256), num_pages=16, max_num_batched_tokens=512)
    chosen = [number for number, prompt in enumerate(prompts) if len(prompt) >= 15]
    starts = [(prompts[number] + expected[number])[:15] for number in chosen]
    wanted = generated(reference(), starts, 24)
    found = served(engine, starts, 24)
    assert engine.scheduler.table.num_preemptions > 0
    assert found == wanted


def test_sampled_tokens_depend_on_the_seed_alone(model: LoadedModel, prompts: list[list[int]]) -> None:
    """The same alone, in a batch, and after preemption; other tokens with another seed."""

    def sampled(seed: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=24, min_tokens=24, temperature=0.9, top_p=0.95, top_k=40, repetition_penalty=1.1, seed=seed
        )

    prompt = prompts[2]
    alone = engine_on(model)
    alone.add(Submission("chosen", prompt, sampled(1)))
    first = tokens_of(run(alone)["chosen"])

    crowd = engine_on(model)
    for number, other in enumerate(prompts[:20]):
        crowd.add(Submission(f"{number}", other, sampled(number + 10)))
    crowd.add(Submission("chosen", prompt, sampled(1)))
    crowd.add(Submission("other seed", prompt, sampled(2)))
    batched = run(crowd)
    assert tokens_of(batched["chosen"]) == first
    assert tokens_of(batched["other seed"]) != first

    tight = engine_on(tiny_model(256), num_pages=16)
    for number in range(7):  # eight equal ones are admitted, and the last is preempted when they outgrow the pool
        tight.add(Submission(f"{number}", [number + 5] * len(prompt), sampled(number + 10)))
    tight.add(Submission("chosen", prompt, sampled(1)))
    request = tight.scheduler.table.get("chosen")
    assert request is not None
    assert tokens_of(run(tight)["chosen"]) == first
    assert request.num_preemptions > 0


def test_prompt_logprobs_in_chunks_equal_one_forward_pass(model: LoadedModel) -> None:
    prompt = list(range(100, 180))
    with torch.inference_mode():
        logits = reference()(torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)
    engine = engine_on(model, max_num_batched_tokens=100, max_num_seqs=8, long_prefill_token_threshold=32)
    engine.add(Submission("warm the cache", prompt, greedy(1)))
    run(engine)
    engine.add(Submission("a", prompt, greedy(2, prompt_logprobs=2, logprobs=3)))
    engine.add(Submission("prompt only", prompt, SamplingParams(max_tokens=0, prompt_logprobs=0)))
    deltas = run(engine)
    found = deltas["a"][0].prompt_logprobs
    assert found is not None
    assert found[0] is None
    assert len(found) == len(prompt)
    for position in range(1, len(prompt)):
        entry = found[position]
        assert entry is not None
        assert entry.token_id == prompt[position]
        assert entry.logprob == pytest.approx(logits[position - 1, prompt[position]].item(), abs=2e-3)
        assert [token for token, _ in entry.top] == logits[position - 1].topk(2).indices.tolist()
    chosen = deltas["a"][0].logprobs
    assert chosen is not None
    assert chosen[0].logprob == pytest.approx(logits[-1].max().item(), abs=2e-3)
    assert len(chosen[0].top) == 3
    (last,) = deltas["prompt only"]
    assert last.finish_reason is FinishReason.LENGTH
    assert last.token_ids == []
    assert last.prompt_logprobs is not None


def test_sampled_tokens_under_a_schema_are_json_of_the_schema(model_dir: Path, smollm2: LoadedModel) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    engine = new_engine(smollm2, EngineConfig(kv_cache_memory=ByteSize(360 << 20)), model_dir)
    for seed in range(4):
        params = SamplingParams(
            max_tokens=80, temperature=1.0, seed=seed, grammar=Grammar("json_schema", json.dumps(schema))
        )
        engine.add(Submission(f"{seed}", list(range(50, 60)), params))
    with pytest.raises(ValueError, match=r"regex"):
        engine.add(Submission("bad", [1], SamplingParams(grammar=Grammar("regex", "("))))
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    for deltas in run(engine).values():
        assert deltas[-1].finish_reason is FinishReason.STOP
        answer = json.loads(tokenizer.decode(tokens_of(deltas), skip_special_tokens=True))
        assert set(answer) == {"name", "age"}


def test_pool_too_small_for_one_request_is_refused_with_numbers(model: LoadedModel) -> None:
    with pytest.raises(ValueError, match=r"kv_cache_memory .* max_model_len \(1024\) needs"):
        engine_on(model, num_pages=63)


@pytest.mark.parametrize(("num_pages", "longest"), [(64, 1024), (63, 1008), (2, 32), (1, 16)])
def test_context_that_fits_the_pages_is_served_up_to_its_last_token(
    model: LoadedModel, num_pages: int, longest: int
) -> None:
    memory = ByteSize(num_pages * model.layout(16).page_bytes)
    config = EngineConfig(kv_cache_memory=memory, max_num_batched_tokens=64, max_num_seqs=4, admission="queue")
    engine = new_engine(model, config, fits_memory=True)
    assert engine.executor.max_model_len == longest
    engine.add(Submission("a", [5] * (longest - 3), greedy(NUM_TOKENS)))
    assert len(tokens_of(run(engine)["a"])) == 3
    with pytest.raises(ValueError, match=f"max_model_len is {longest}"):
        engine.add(Submission("b", [5] * longest, greedy(1)))


def test_pool_without_one_page_is_refused_for_a_context_that_fits(model: LoadedModel) -> None:
    config = EngineConfig(kv_cache_memory=ByteSize(model.layout(16).page_bytes - 1))
    with pytest.raises(ValueError, match=r"holds 0 tokens .* max_model_len \(16\) needs"):
        new_engine(model, config, fits_memory=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pool_of_e4m3_pages_has_as_many_more(dtype: torch.dtype) -> None:
    """In the same memory; and the pools are advertised as incompatible."""
    models = [wrap_module(build("llama", {}).to(dtype), LoadOptions(kv_cache_dtype=kind)) for kind in ("auto", "fp8")]
    memory = ByteSize(100 * models[0].layout(16).page_bytes)
    plain, small = (new_engine(model, EngineConfig(kv_cache_memory=memory)) for model in models)
    assert plain.pages.num_pages == 100
    assert small.pages.num_pages == dtype.itemsize * plain.pages.num_pages
    assert small.pool_spec("m").nbytes == small.model.pool.tensor.nbytes == plain.pool_spec("m").nbytes  # type: ignore[union-attr]
    assert small.pool_spec("m").compatibility != plain.pool_spec("m").compatibility
    assert small.model.layout(16).page_bytes * dtype.itemsize == plain.model.layout(16).page_bytes


def test_token_id_outside_the_vocabulary_is_named(model: LoadedModel) -> None:
    engine = engine_on(model)
    with pytest.raises(ValueError, match=f"token id {VOCAB_SIZE}"):
        engine.add(Submission("a", [1, VOCAB_SIZE], greedy(NUM_TOKENS)))
    assert not engine.has_work


def test_step_that_samples_nothing_ends_when_all_is_computed(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages are shipped next, and its seconds are learnt from."""
    calls: list[str] = []
    forward = LoadedModel.forward
    monkeypatch.setattr(LoadedModel, "forward", lambda *args: calls.append("forward") or forward(*args))
    monkeypatch.setattr(LoadedModel, "wait", lambda _: calls.append("wait"))
    engine = engine_on(model, max_prefill_tokens=32)
    engine.add(Submission("a", list(range(100, 180)), greedy(2)))
    for number, num_tokens in enumerate([0, 0, 1, 1], 1):
        step = engine.step()
        assert sum(len(delta.token_ids) for delta in step.deltas) == num_tokens
        assert calls == ["forward", "wait"] * number
