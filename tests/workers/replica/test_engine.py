"""Real weights: whatever the chunks, the company and the interruptions, the tokens are transformers' own."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ByteSize
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from crossdock.workers.model.load import load_model, wrap_module
from crossdock.workers.model.model import PagedModel
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine import Engine, warm_up
from crossdock.workers.replica.metrics import EngineMetrics
from crossdock.workers.report.timeline import Timelines
from crossdock.workers.schedule.cost import StepWork
from crossdock.workers.schedule.request import FinishReason, SamplingParams, Submission, TokenDelta
from tests.workers.architectures import build

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


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> list[list[int]]:
    """50 prompts of 1 to 400 tokens, some sharing their beginnings."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    rng = random.Random(0)
    topics: list[list[int]] = [tokenizer(text).input_ids for text in TOPICS]
    shared = [token for _ in range(20) for token in rng.choice(topics)]
    prompts = [*topics, [5]]
    while len(prompts) < 50:
        body = [token for _ in range(rng.choice([1, 3, 10, 40])) for token in rng.choice(topics)]
        prompts.append((shared if rng.random() < 0.3 else []) + body[: rng.randint(1, 200)])
    return prompts


@pytest.fixture(scope="module")
def expected(model_dir: Path, prompts: list[list[int]]) -> list[list[int]]:
    """transformers' greedy `generate`, one prompt at a time."""
    module = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    greedy = GenerationConfig(max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0)
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        tokens = module.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy)
        outputs.append(tokens[0, len(prompt) :].tolist())
    return outputs


@pytest.fixture(scope="module")
def model(model_dir: Path) -> PagedModel:
    return load_model(model_dir, torch.float32)


def engine(model: PagedModel, memory: str = "1GiB", path: Path | None = None, **config: Any) -> Engine:
    return Engine(model, EngineConfig(kv_cache_memory=ByteSize._validate(memory, None), **config), path)  # type: ignore[arg-type]


def run(engine: Engine) -> dict[str, list[TokenDelta]]:
    deltas: dict[str, list[TokenDelta]] = {}
    while engine.has_work:
        for delta in engine.step().deltas:
            deltas.setdefault(delta.request_id, []).append(delta)
    assert engine.pages.counts().owned == 0
    return deltas


def tokens_of(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def greedy(num_tokens: int = NUM_TOKENS, **params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, min_tokens=num_tokens, temperature=0.0, **params)


@pytest.mark.parametrize(
    "config",
    [
        {"max_num_batched_tokens": 4096},
        {"max_num_batched_tokens": 4096, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 512},
        {"max_num_batched_tokens": 100, "max_num_seqs": 32, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 512, "long_prefill_token_threshold": 16},
        {"max_num_batched_tokens": 8192, "enable_chunked_prefill": False},
        {"max_num_batched_tokens": 300, "page_size": 32, "max_num_seqs": 50},
    ],
    ids=lambda config: ",".join(f"{key}={value}" for key, value in config.items()),
)
def test_greedy_equals_generate(
    model: PagedModel, prompts: list[list[int]], expected: list[list[int]], config: dict[str, Any]
) -> None:
    it = engine(model, **config)
    for number, prompt in enumerate(prompts):
        it.add(Submission(f"{number}", prompt, greedy()))
    deltas = run(it)
    assert [tokens_of(deltas[f"{number}"]) for number in range(len(prompts))] == expected


def test_greedy_equals_generate_from_cached_prefixes(
    model: PagedModel, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    it = engine(model)
    for _ in range(2):
        for number, prompt in enumerate(prompts):
            it.add(Submission(f"{number}", prompt, greedy()))
        deltas = run(it)
        assert [tokens_of(deltas[f"{number}"]) for number in range(len(prompts))] == expected
    for number, prompt in enumerate(prompts):  # the second time all but the last page of every prompt was there
        assert deltas[f"{number}"][0].num_cached_tokens == (len(prompt) - 1) // 16 * 16


def test_greedy_equals_generate_under_preemption(
    model_dir: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """A pool for one long request: streams that start together on 15 tokens each outgrow it together."""
    model = load_model(model_dir, torch.float32, max_model_len=256)
    it = engine(model, memory=f"{256 * model.layout(16).token_bytes}B", max_num_batched_tokens=512)
    chosen = [number for number, prompt in enumerate(prompts) if len(prompt) >= 15]
    starts = [(prompts[number] + expected[number])[:15] for number in chosen]
    module = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    greedy_tokens = GenerationConfig(max_new_tokens=24, min_new_tokens=24, do_sample=False, pad_token_id=0)
    batch = torch.tensor(starts)
    wanted = module.generate(batch, attention_mask=torch.ones_like(batch), generation_config=greedy_tokens)
    for number, start in enumerate(starts):
        it.add(Submission(f"{number}", start, greedy(24)))
    deltas = run(it)
    assert it.scheduler.num_preemptions > 3
    assert [tokens_of(deltas[f"{number}"]) for number in range(len(starts))] == wanted[:, 15:].tolist()


def test_sampled_output_depends_on_seed_alone(model_dir: Path, prompts: list[list[int]]) -> None:
    """The same alone, in a batch, and after preemption; another with another seed."""
    model = load_model(model_dir, torch.float32)

    def sampled(seed: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=24, min_tokens=24, temperature=0.9, top_p=0.95, top_k=40, repetition_penalty=1.1, seed=seed
        )

    prompt = prompts[7]
    alone = engine(model)
    alone.add(Submission("it", prompt, sampled(1)))
    first = tokens_of(run(alone)["it"])

    crowd = engine(model)
    for number, other in enumerate(prompts[:20]):
        crowd.add(Submission(f"{number}", other, sampled(number + 10)))
    crowd.add(Submission("it", prompt, sampled(1)))
    crowd.add(Submission("other seed", prompt, sampled(2)))
    batched = run(crowd)
    assert tokens_of(batched["it"]) == first
    assert tokens_of(batched["other seed"]) != first

    small = load_model(model_dir, torch.float32, max_model_len=256)
    tight = engine(small, memory=f"{256 * small.layout(16).token_bytes}B")
    for number in range(7):  # eight are admitted, and the last one goes when they outgrow the pool
        tight.add(Submission(f"{number}", [number + 5] * 15, sampled(number + 10)))
    tight.add(Submission("it", prompt, sampled(1)))
    it = tight.scheduler.get("it")
    assert it is not None
    assert tokens_of(run(tight)["it"]) == first
    assert it.num_preemptions > 0


def test_prompt_logprobs_are_those_of_one_forward_pass(model: PagedModel, model_dir: Path) -> None:
    prompt = list(range(100, 180))
    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)
    it = engine(model, max_num_batched_tokens=100, max_num_seqs=8, long_prefill_token_threshold=32)
    it.add(Submission("warm the cache", prompt, greedy(1)))
    run(it)
    it.add(Submission("a", prompt, greedy(2, prompt_logprobs=2, logprobs=3)))
    it.add(Submission("prompt only", prompt, SamplingParams(max_tokens=0, prompt_logprobs=0)))
    deltas = run(it)
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


def test_json_schema_holds_under_sampling(model: PagedModel, model_dir: Path) -> None:
    import json

    from crossdock.workers.schedule.request import Grammar

    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    it = engine(model, path=model_dir)
    for seed in range(4):
        params = SamplingParams(
            max_tokens=80, temperature=1.0, seed=seed, grammar=Grammar("json_schema", json.dumps(schema))
        )
        it.add(Submission(f"{seed}", list(range(50, 60)), params))
    with pytest.raises(ValueError, match=r"regex"):
        it.add(Submission("bad", [1], SamplingParams(grammar=Grammar("regex", "("))))
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    for deltas in run(it).values():
        assert deltas[-1].finish_reason is FinishReason.STOP
        answer = json.loads(tokenizer.decode(tokens_of(deltas), skip_special_tokens=True))
        assert set(answer) == {"name", "age"}


@pytest.mark.parametrize(
    ("max_model_len", "config"), [(12, {}), (300, {"max_num_batched_tokens": 40, "max_num_seqs": 5})]
)
def test_warm_up_measures_whatever_fits_and_leaves_no_trace(
    model_dir: Path, max_model_len: int, config: dict[str, int]
) -> None:
    small = load_model(model_dir, torch.float32, max_model_len=max_model_len)
    num_pages = -(-max_model_len // 16)
    it = engine(small, memory=f"{num_pages * small.layout(16).page_bytes}B", **config)
    before = it.pages.counts()
    profile = warm_up(it)
    assert it.pages.counts() == before
    assert not it.has_work
    assert it.scheduler.cost == profile.cost
    assert profile.cost.seconds(StepWork.of([(0, 8)], [8])) > 0
    it.add(Submission("a", [1, 2, 3], greedy(2)))
    assert it.step().predicted > 0


def test_cancelled_after_seven_chunks_every_byte_comes_back_and_is_counted(model: PagedModel) -> None:
    it = engine(model, long_prefill_token_threshold=32)
    metrics, timelines = EngineMetrics(it), Timelines(it.config.slo_classes, 0.0)
    before = it.pages.counts()
    work = Submission("long", list(range(1000, 1400)), greedy())
    it.add(work)
    timelines.add(work, it.scheduler.requests()[0], it.clock(), 0.0)
    for _ in range(7):
        step = it.step()
        metrics.stepped(step)
        metrics.progressed(timelines.stepped(step.batch, step.deltas, step.started, step.seconds, step.predicted))
    available = it.pages.num_available
    cancelled = it.abort("long")
    assert cancelled is not None
    assert cancelled.num_computed_tokens == 7 * 32
    freed = (it.pages.num_available - available) * model.layout(16).page_bytes
    assert freed == 25 * model.layout(16).page_bytes, "the whole prompt had its pages, computed or not"
    metrics.aborted(timelines.aborted("long", it.clock(), freed))

    layout = model.layout(16)
    assert metrics.registry.get_sample_value("crossdock_cancelled_kv_bytes_total") == 14 * layout.page_bytes
    assert metrics.registry.get_sample_value("crossdock_pages", {"state": "owned"}) == 0
    it.pages.clear_cache()  # full pages of the cancelled prompt stay shareable until then
    assert it.pages.counts() == before
    assert not it.has_work


def test_a_pool_too_small_for_one_request_is_refused_with_numbers(model: PagedModel) -> None:
    with pytest.raises(ValueError, match=r"kv_cache_memory .* max_model_len \(8192\) needs"):
        engine(model, memory="10MiB")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_e4m3_pages_are_so_many_more(dtype: torch.dtype) -> None:
    """Of the same memory, and what is advertised says so."""
    models = [wrap_module(build("llama", {}).to(dtype), kv_cache_dtype=kind) for kind in ("auto", "fp8")]
    plain, small = (engine(model, f"{100 * models[0].layout(16).page_bytes}B") for model in models)
    assert plain.pages.num_pages == 100
    assert small.pages.num_pages == dtype.itemsize * plain.pages.num_pages
    assert small.pool_spec("m").nbytes == small.model.pool.nbytes == plain.pool_spec("m").nbytes  # type: ignore[union-attr]
    assert small.pool_spec("m").compatibility != plain.pool_spec("m").compatibility
    profile = warm_up(small)
    assert (profile.num_pages, profile.page_bytes) == (small.pages.num_pages, small.model.layout(16).page_bytes)
    assert profile.page_bytes * dtype.itemsize == plain.model.layout(16).page_bytes


def test_bad_token_ids_are_named(model: PagedModel) -> None:
    it = engine(model)
    with pytest.raises(ValueError, match="token id 49152"):
        it.add(Submission("a", [1, 49152], greedy()))
    assert not it.has_work


def test_a_step_is_over_when_all_of_it_has_been_computed(model: PagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that samples nothing: its pages are shipped next, and its seconds are learnt from."""
    said: list[str] = []
    forward = PagedModel.forward
    monkeypatch.setattr(PagedModel, "forward", lambda *args: said.append("forward") or forward(*args))
    monkeypatch.setattr(PagedModel, "wait", lambda _: said.append("wait"))
    it = engine(model, long_prefill_token_threshold=32)
    it.add(Submission("a", list(range(100, 180)), greedy(2)))
    for number, num_tokens in enumerate([0, 0, 1, 1], 1):
        step = it.step()
        assert sum(len(delta.token_ids) for delta in step.deltas) == num_tokens
        assert said == ["forward", "wait"] * number
