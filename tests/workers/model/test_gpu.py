"""On a GPU: recorded steps equal eager steps, the host waits only where it must, and the measured pool fits."""

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from crossdock.workers.model.forward.row_adapters import AdapterWeights
from crossdock.workers.model.graphs.decode_graphs import DecodeGraphs, decode_graphs
from crossdock.workers.model.graphs.mixed_graphs import MixedGraphs, mixed_graphs
from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.model.load import load_model, wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.model.memory.kv_memory import GPU_RESERVE_BYTES
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.runner import Runner
from crossdock.workers.model.sampling.row import SampleRow
from crossdock.workers.model.sampling.sampler import sample
from crossdock.workers.model.weights.fingerprint import fingerprint
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.calibrate import warm_up
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.engine.sleep import Sleep
from crossdock.workers.schedule.request.batch import Batch, Scheduled
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.submission import Adapter, SamplingParams, Submission
from tests.workers.architectures import SERVED, build
from tests.workers.model.paged import assert_any_chunks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature"),
]
PAGE_SIZE = 16
SETTINGS: dict[str, Any] = {"max_num_batched_tokens": 128, "max_num_seqs": 12, "kv_cache_memory": 64 << 20}


def on_gpu(name: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    wide = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128}
    return wrap_module(build(name, SERVED[name] | wide | options).to("cuda", dtype))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.float32),
        ("qwen3", torch.float32),
        ("gemma2", torch.float32),
        ("qwen3_moe", torch.bfloat16),  # experts in float32 wait for the GPU
    ],
)
def test_recorded_decodes_equal_eager_decodes(name: str, dtype: torch.dtype) -> None:
    model = on_gpu(name, dtype)
    model.allocate_pool(64, PAGE_SIZE)
    recorded, _ = decode_graphs(model, PAGE_SIZE, 12)
    assert recorded is not None
    generator = torch.Generator().manual_seed(1)
    for lengths in ([40, 5, 23], [9], [5, 23, 40, 8, 16, 7, 3], [200, 3, 4, 5], [9] * 12, [33, 1]):
        requests = [
            Request(Submission(f"{i}", torch.randint(3, 120, (n,), generator=generator).tolist(), SamplingParams()))
            for i, n in enumerate(lengths)
        ]
        spare = iter((torch.randperm(63, generator=generator) + 1).tolist())
        pages = [[next(spare) for _ in range(-(-n // PAGE_SIZE))] for n in lengths]
        chunks = [Scheduled(r, 0, n, p, True) for r, n, p in zip(requests, lengths, pages, strict=True)]
        decodes = [Scheduled(r, n - 1, 1, p, True) for r, n, p in zip(requests, lengths, pages, strict=True)]
        StepInputs.of(Batch(chunks, 0), PAGE_SIZE)[0].run(model)
        step = StepInputs.of(Batch(decodes, len(decodes)), PAGE_SIZE)[0]
        before = model.pool.tensor.clone()
        got = recorded.run(step).clone()
        error = 1e-3 if dtype is torch.float32 else 5e-2
        # Only the decodes are written, again.
        torch.testing.assert_close(model.pool.tensor, before, atol=error, rtol=error)
        theirs = step.run(model)
        assert (got - theirs).norm() <= error * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "qwen3_moe", "mixtral"])
def test_layers_have_triton_steps(name: str, dtype: torch.dtype) -> None:
    """The probe compares their logits with transformers' own: in float32 to 0.2 %."""
    assert on_gpu(name, dtype).kernels == "triton steps"


@pytest.mark.parametrize("name", SERVED)
def test_logits_of_any_chunks_on_a_gpu_equal_transformers_on_the_cpu(name: str) -> None:
    assert_any_chunks(build(name, SERVED[name]), "cuda")


@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.float32), ("qwen3_moe", torch.bfloat16)])
def test_recorded_chunks_equal_eager_chunks(name: str, dtype: torch.dtype) -> None:
    model = on_gpu(name, dtype)
    model.allocate_pool(64, PAGE_SIZE)
    decodes_alone, _ = decode_graphs(model, PAGE_SIZE, 12)
    assert decodes_alone is not None
    recorded, _ = mixed_graphs(model, PAGE_SIZE, 12, 128, decodes_alone)
    assert recorded is not None
    assert recorded.most_tokens == 128
    generator = torch.Generator().manual_seed(1)
    most = [(5, 1)] * 12 + [(40, 30), (0, 3)]
    for parts in ([(40, 1), (5, 1), (0, 23)], [(0, 9)], [(16, 128)], most, [(8, 1), (200, 5)]):
        ids = [torch.randint(3, 120, (start + tokens,), generator=generator).tolist() for start, tokens in parts]
        requests = [Request(Submission(f"{i}", each, SamplingParams())) for i, each in enumerate(ids)]
        spare = iter((torch.randperm(63, generator=generator) + 1).tolist())
        pages = [[next(spare) for _ in range(-(-len(each) // PAGE_SIZE))] for each in ids]
        whole = [Scheduled(r, 0, len(r.token_ids), p, True) for r, p in zip(requests, pages, strict=True)]
        mixed = [Scheduled(r, *part, p, True) for r, part, p in zip(requests, parts, pages, strict=True)]
        StepInputs.of(Batch(whole, 0), PAGE_SIZE)[0].run(model)
        step = StepInputs.of(Batch(mixed, 0), PAGE_SIZE)[0]
        before = model.pool.tensor.clone()
        assert recorded.covers(step)
        got = recorded.run(step).clone()
        error = 1e-3 if dtype is torch.float32 else 5e-2
        torch.testing.assert_close(model.pool.tensor, before, atol=error, rtol=error)  # only the step is written, again
        theirs = step.run(model)
        assert (got - theirs).norm() <= error * theirs.norm()


def test_model_that_waits_for_the_gpu_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    model = on_gpu()
    model.module.model.layers[-1].register_forward_hook(
        lambda _module, _inputs, output: output + 0 * output.max().item()
    )
    engine = new_engine(model, EngineConfig(**SETTINGS))
    assert not engine.pipeline.runner.graphs
    assert "without CUDA graphs: RuntimeError: called a synchronizing CUDA operation" in caplog.text
    assert len(tokens(engine)) == 20


def tokens(engine: Engine) -> dict[str, list[int]]:
    for number in range(20):
        prompt = [(13 * number + 7 * at) % 90 + 3 for at in range(1 + 31 * number % 151)]
        temperature = 0.9 * (number % 3 == 2)
        params = SamplingParams(
            max_tokens=4 + 2 * number, temperature=temperature, top_p=0.9, seed=number, ignore_eos=True
        )
        engine.add(Submission(f"{number}", prompt, params))
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for delta in engine.step().deltas:
            found.setdefault(delta.request_id, []).extend(delta.token_ids)
    return found


def test_engine_with_and_without_graphs_gives_same_tokens() -> None:
    answers = []
    for enforce_eager, is_ahead in ((True, False), (False, False), (False, True), (True, True)):
        settings = SETTINGS | {"enforce_eager": enforce_eager, "async_scheduling": is_ahead}
        engine = new_engine(on_gpu(), EngineConfig(**settings))
        kinds = [type(graphs) for graphs in engine.pipeline.runner.graphs]
        assert kinds == ([] if enforce_eager else [DecodeGraphs, MixedGraphs])
        warm_up(engine)
        answers.append(tokens(engine))
    assert answers[0] == answers[1] == answers[2] == answers[3]


def test_engine_with_batch_invariant_gives_a_request_alone_the_bits_of_any_batch() -> None:
    """Graphs or none, few or many tokens in a step, and prompts whose beginning is cached."""
    shape = SERVED["qwen3"] | {"hidden_size": 1024, "head_dim": 64, "intermediate_size": 3000, "vocab_size": 5001}
    generator = torch.Generator().manual_seed(5)
    sizes = [3, 300, 64, 129, 700, 1, 65, 1000]
    prompts = [torch.randint(3, 5000, (size,), generator=generator).tolist() for size in sizes]
    model = wrap_module(
        build("qwen3", shape | {"max_position_embeddings": 2048}).to("cuda", torch.bfloat16),
        LoadOptions(batch_invariant=True),
    )
    assert model.kernels == "triton steps and products"

    def answers(together: bool, **changes: Any) -> dict[str, list[Any]]:
        engine = new_engine(model, EngineConfig(**SETTINGS | changes))
        found: dict[str, list[Any]] = {}
        for number, prompt in enumerate(prompts):
            params = {"temperature": 0.9 * (number % 2), "top_p": 0.9, "logprobs": 3, "prompt_logprobs": 1}
            engine.add(Submission(f"{number}", prompt, SamplingParams(**params, max_tokens=20, ignore_eos=True)))
            while engine.has_work and (number == len(prompts) - 1 or not together):
                for delta in engine.step().deltas:
                    got = found.setdefault(delta.request_id, [])
                    got += [*delta.token_ids, *(delta.logprobs or ()), *(delta.prompt_logprobs or ())]
        return found

    alone = answers(together=False)
    for changes in ({}, {"enforce_eager": True}, {"max_num_batched_tokens": 2048}, {"async_scheduling": False}):
        assert answers(together=True, **changes) == alone


@pytest.fixture
def waits() -> Iterator[Any]:
    """Return a function that calls another and counts how often the host waits for the GPU."""

    def count(run: Any) -> int:
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
        return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)

    torch.cuda.set_sync_debug_mode("warn")
    yield count
    torch.cuda.set_sync_debug_mode("default")


PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"top_p": 0.9, "top_k": 50},
    {"top_k": 20, "temperature": 0.7, "repetition_penalty": 1.2},
    {"temperature": 0.0, "frequency_penalty": 0.4, "min_tokens": 9},
]


@pytest.mark.parametrize("kinds", [[0], [1], [2], [3], [4], [0, 1, 2, 3, 4]])
def test_sampling_on_gpu_waits_once_and_equals_cpu(kinds: list[int], waits: Any) -> None:
    logits = torch.randn(20, 50_000, generator=torch.Generator().manual_seed(0)) * 6

    def rows() -> list[SampleRow]:
        return [
            SampleRow(SamplingParams(seed=i, **PARAMS[kinds[i % len(kinds)]]), list(range(5 + i)), 2, (7,))
            for i in range(len(logits))
        ]

    there = logits.cuda()
    sample(there, rows())  # the hashed token ids are kept
    assert waits(lambda: sample(there, rows())) == 1
    ours, theirs = ([token.token_id for token in sample(x, rows())] for x in (there, logits))
    assert sum(a != b for a, b in zip(ours, theirs, strict=True)) <= 1  # sums differ in their last bits


def test_inputs_are_copied_without_waiting(waits: Any) -> None:
    model = on_gpu()
    model.allocate_pool(64, PAGE_SIZE)
    request = Request(Submission("prompt", list(range(3, 90)), SamplingParams()))
    step = StepInputs.of(Batch([Scheduled(request, 0, 87, range(6), True)], 0), PAGE_SIZE)[0]
    logits: list[Tensor] = []
    step.run(model)
    assert waits(lambda: logits.append(step.run(model))) == 0
    assert torch.isfinite(logits[0]).all()


def with_adapters(*names: str) -> Any:
    """Return a model with random adapters in all its linears but one."""
    wide = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128}
    module = build("llama", SERVED["llama"] | wide).to("cuda", torch.float32)
    model = wrap_module(module, LoadOptions(max_lora_rank=16, max_loras=len(names)))
    assert model.adapters is not None
    for number, adapter in enumerate(names):
        rank, pairs = 5 + 11 * number, {}
        for name, site in [*model.adapters.sites.items()][1:]:
            a, b = (torch.randn(rank, size, device="cuda") / 8 for size in (site.in_features, site.out_features))
            pairs[name] = a, b.T
        model.adapters.loaded[adapter] = AdapterWeights(pairs, model.adapters._table(pairs))
    return model


def test_recorded_steps_with_adapters_and_drafts_equal_eager_ones_and_wait_for_nothing(waits: Any) -> None:
    """Decodes, streams that verify up to three drafts, and a chunk beside both; some sequences have an adapter."""
    model = with_adapters("one", "two")
    model.allocate_pool(64, PAGE_SIZE)
    runner = Runner.recorded(model, PAGE_SIZE, 12, 128, most_drafts=3)
    assert len(runner.graphs) == 3
    names, generator = ["one", "", "two", "one"], torch.Generator().manual_seed(1)
    decodes, drafts = [(40, 1), (5, 1), (23, 1)], [(40, 4), (5, 1), (23, 2), (70, 3)] * 2
    for parts in (decodes, drafts, [*decodes, (8, 50)], [(40, 1), (5, 4), (16, 30)], decodes[:1]):
        is_chunk = [tokens > 4 for _, tokens in parts]
        spare = iter((torch.randperm(63, generator=generator) + 1).tolist())
        whole, step = list[Scheduled](), list[Scheduled]()
        for number, (start, tokens) in enumerate(parts):
            ids = torch.randint(3, 120, (start + (tokens if is_chunk[number] else 1),), generator=generator).tolist()
            name = names[number % len(names)]
            adapter = Adapter(name, "", name) if name else None
            request = Request(Submission(f"{number}", ids, SamplingParams(), adapter=adapter))
            pages = [next(spare) for _ in range(-(-(start + tokens) // PAGE_SIZE))]
            whole.append(Scheduled(request, 0, start, pages, True))
            guesses = [] if is_chunk[number] else [7] * (tokens - 1)
            step.append(Scheduled(request, start, tokens, pages, True, drafts=guesses))
        StepInputs.of(Batch(whole, 0), PAGE_SIZE)[0].run(model)
        inputs = StepInputs.of(Batch(step, len(parts) - sum(is_chunk)), PAGE_SIZE)[0]
        assert runner._graphs_for(inputs) is not None
        theirs = inputs.run(model).clone()
        got = runner.compute(inputs).clone()
        assert (got - theirs).norm() <= 1e-3 * theirs.norm()
        assert waits(lambda inputs=inputs: runner.compute(inputs)) == 0
        assert waits(lambda inputs=inputs: inputs.run(model)) == 0


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_step_behind_another_begins_without_waiting(enforce_eager: bool, waits: Any) -> None:
    engine = new_engine(on_gpu(), EngineConfig(**SETTINGS, enforce_eager=enforce_eager))
    for number, params in enumerate(PARAMS[:3]):
        params = {"max_tokens": 50, "ignore_eos": True} | params
        engine.add(Submission(f"{number}", [5] * 20, SamplingParams(seed=number, **params)))
    for _ in range(5):
        engine.step()
    assert len(engine.pipeline.batches) == 1
    assert waits(lambda: engine.begin_step()) == 0
    assert len(engine.pipeline.batches) == 2
    while engine.has_work:
        engine.step()


def test_step_that_samples_nothing_has_ended_when_it_returns() -> None:
    engine = new_engine(on_gpu(max_position_embeddings=8192), EngineConfig(**SETTINGS, async_scheduling=False))
    engine.add(Submission("long", [5] * 250, SamplingParams(max_tokens=1)))
    step = engine.step()
    assert not step.deltas
    assert torch.cuda.current_stream().query()


def test_measured_pool_leaves_memory_for_the_largest_step() -> None:
    config = EngineConfig(max_num_batched_tokens=4096, max_num_seqs=64, gpu_memory_utilization=0.05)
    model = on_gpu(vocab_size=50_000, max_position_embeddings=8192)
    total = torch.cuda.get_device_properties(0).total_memory
    gc.collect()  # engines of earlier tests hold pools
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    engine = new_engine(model, config)
    warm_up(engine)
    engine.add(Submission("all", [5] * 4000, SamplingParams(max_tokens=2, prompt_logprobs=1)))
    while engine.has_work:
        engine.step()
    assert (
        0.01 * total
        < engine.pages.num_pages * model.layout(config.page_size).page_bytes
        < 0.05 * total - GPU_RESERVE_BYTES
    )
    assert torch.cuda.max_memory_reserved() <= 0.05 * total


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_the_gpu_its_memory_back_and_tokens_after_it_are_those_before(level: int, tmp_path: Path) -> None:
    """Weights and pages go, and the graphs of steps; the driver counts what is free."""
    wide = {"hidden_size": 1024, "head_dim": 64, "intermediate_size": 4096, "vocab_size": 32_000}
    build("llama", SERVED["llama"] | wide).to(torch.bfloat16).save_pretrained(tmp_path)
    config = EngineConfig(**SETTINGS | {"kv_cache_memory": 256 << 20})
    engine = new_engine(load_model(ModelSpec(str(tmp_path), dtype="bfloat16"), "cuda"), config)
    num_bytes = engine.model.pool.tensor.nbytes + sum(each.nbytes for each in engine.model.module.parameters())
    kinds = [type(graphs) for graphs in engine.pipeline.runner.graphs]
    before, sleep = tokens(engine), Sleep(engine, tmp_path, fingerprint(tmp_path))
    for _ in range(2):
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        sleep.sleep(level)
        assert torch.cuda.mem_get_info()[0] - free >= 0.9 * num_bytes
        assert not engine.pipeline.runner.graphs
        sleep.read([])
        sleep.wake([])
        assert [type(graphs) for graphs in engine.pipeline.runner.graphs] == kinds == [DecodeGraphs, MixedGraphs]
        assert tokens(engine) == before
