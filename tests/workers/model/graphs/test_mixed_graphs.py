"""Recorded steps with chunks: padding changes no logits and no page; a replay reads the tensors of the recording."""

import dataclasses
import logging
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec import structs
from pydantic import ByteSize
from torch import Tensor

from crossdock.kernels.attention import AttentionBatch
from crossdock.kernels.backend import CPP, TORCH, Attention, choose_attention
from crossdock.kernels.packages import triton_is_interpreted
from crossdock.workers.model.graphs import mixed_graphs as mixed
from crossdock.workers.model.graphs.decode_graphs import DecodeGraphs
from crossdock.workers.model.graphs.mixed_graphs import MixedGraphs, mixed_graphs, padded_with_chunks
from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.runner import Runner
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.schedule.cost.cost import StepWork
from crossdock.workers.schedule.cost.cost_fit import StepCostFit
from crossdock.workers.schedule.request.batch import Batch, Scheduled
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.submission import SamplingParams, Submission
from tests.sweeps import rest_in_soak
from tests.workers.architectures import SERVED, build
from tests.workers.model.graphs.steps import PAGE_SIZE, PagedStep, answers_of, tokens_of
from tests.workers.model.layers.test_triton_layers import attention
from tests.workers.replica.speculating import engine_of, fixed

STEPS = [
    [(4, 1), (22, 1), (0, 9)],
    [(30, 11)],
    [(12, 1), (0, 5), (16, 3), (8, 8)],
    [(5, 1), (3, 1), (9, 1), (0, 32)],  # no padding token is left for its chunk
]


@pytest.mark.parametrize("attention", [CPP, TORCH], ids=["cpp", "torch"])
@pytest.mark.parametrize("name", rest_in_soak(["llama", "gemma2", "gpt_oss", "qwen3_moe"], "gpt_oss"))
def test_padding_changes_no_logits_and_no_page(name: str, attention: Attention) -> None:
    module = build(name, SERVED[name])
    for parts in STEPS:
        step = PagedStep(module, attention, parts)
        for decodes, tokens in ((3, 32), (8, 32), (8, 48)):
            padded = padded_with_chunks(step.inputs, decodes, tokens, PAGE_SIZE)
            assert len(padded.token_ids) == decodes + tokens
            step.check(lambda padded=padded, step=step: padded.run(step.model))  # type: ignore[misc]


@pytest.mark.skipif(not triton_is_interpreted(), reason="no interpreter here")
def test_padding_changes_no_logits_and_no_page_in_triton() -> None:
    """Its kernels, too, take chunks without a token, of which a recorded step has some."""
    step = PagedStep(build("llama", {}), TORCH, [(4, 1), (3, 6)])
    padded = padded_with_chunks(step.inputs, 2, 8, PAGE_SIZE)

    def run() -> Tensor:
        return padded.run(dataclasses.replace(step.model, attention=choose_attention("triton", torch.device("cpu"))))

    step.check(run)


@pytest.mark.skipif(not triton_is_interpreted(), reason="no interpreter here")
def test_fused_layers_and_padding_take_a_page_table_for_each_group() -> None:
    """As of Qwen2 with a window in some layers; the step's own rows are computed by fused layers as well."""
    step = PagedStep(build("qwen2 sliding", SERVED["qwen2 sliding"]), attention(), [(20, 1), (3, 6)], is_grouped=True)
    assert step.model.kernels == "triton steps"
    assert len(step.model.groups) > 1
    step.check(lambda: padded_with_chunks(step.inputs, 2, 8, PAGE_SIZE).run(step.model))


def test_padding_that_writes_is_detected() -> None:
    step = PagedStep(build("llama", {}), TORCH, STEPS[0])
    padded = padded_with_chunks(step.inputs, 8, 32, PAGE_SIZE)
    padded.slots[-1] = 3
    with pytest.raises(AssertionError):
        step.check(lambda: padded.run(step.model))


def test_recorded_steps_give_same_logits_from_fixed_addresses() -> None:
    """As a capture requires. Steps of one graph follow each other, so that each finds the values of the last one."""
    module = build("llama", {})
    seen: defaultdict[int, set[tuple[int, ...]]] = defaultdict(set)

    class Watched(LoadedModel):
        def forward(
            self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch, rows: Tensor, *more: Any
        ) -> Tensor:
            tensors = (token_ids, positions, batch.query_start, batch.kv_len, batch.page_table, batch.slots, rows)
            sizes = batch.max_query_len, batch.max_kv_len
            shapes = *(len(x) for x in tensors), *batch.page_table.stride()
            seen[len(token_ids)].add((*(x.data_ptr() for x in tensors), *shapes, *sizes))
            return super().forward(token_ids, positions, batch, rows, *more)

    recorded, watched = None, None
    for parts in (*STEPS, [(100, 20)], *STEPS, [(3, 1)] * 9 + [(2, 40)]):
        step = PagedStep(module, TORCH, parts)
        model = step.model
        if recorded is None or watched is None:
            watched = Watched(**vars(model))
            recorded = MixedGraphs(watched, PAGE_SIZE, 20, 64, lambda run: run)
        watched.pool.pages = model.pool.pages
        assert recorded.covers(step.inputs)
        step.check(lambda recorded=recorded, step=step: recorded.run(step.inputs))  # type: ignore[misc]
    assert {rows: len(addresses) for rows, addresses in seen.items()} == {8 + 64: 1, 20 + 64: 1}


def test_steps_run_to_be_recorded_are_whole() -> None:
    """Their sequences have as many rows as there are tokens: a kernel writes past the end of its output otherwise."""
    model, seen = PagedStep(build("llama", {}), TORCH, STEPS[0]).model, []

    class Watched(LoadedModel):
        def forward(
            self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch, rows: Tensor, *more: Any
        ) -> Tensor:
            seen.append((len(token_ids), int(batch.query_start[-1])))
            assert len(rows) == len(batch.kv_len)
            return super().forward(token_ids, positions, batch, rows, *more)

    def record(run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run

    MixedGraphs(Watched(**vars(model)), PAGE_SIZE, 20, 80, record)
    assert seen == [(100, 100)] + [(n, n) for n in (100, 88, 84, 72)]


@pytest.mark.parametrize("chunk", [64, 128, 256, 512])
def test_padding_of_decodes_adds_few_rows_where_a_row_takes_time(chunk: int) -> None:
    """Below 206 rows an H200 waits for the weights, whatever the padding. Beyond, products take as long as rows say."""
    for decodes in range(1, mixed.DECODES[-1] + 1):
        padded = next(size for size in mixed.DECODES if size >= decodes)
        assert max(padded + chunk, 206) <= 1.26 * max(decodes + chunk, 206)


@pytest.mark.parametrize("drafts", [1, 3, 9, 20])
def test_streams_with_as_many_drafts_as_the_policy_allows_are_recorded_beside_a_chunk(drafts: int) -> None:
    step = PagedStep(build("llama", {}), TORCH, STEPS[0])
    recorded = MixedGraphs(step.model, PAGE_SIZE, 8, 512, lambda run: run, most_drafts=drafts)
    most_streams, rows = recorded.verified
    lengths = []
    while len(lengths) < most_streams and rows > 1:
        lengths.append(min(drafts, rows - 1))
        rows -= 1 + lengths[-1]
    request = Request(Submission("a", list(range(300)), SamplingParams()))
    stream = Request(Submission("b", list(range(21)), SamplingParams()))
    parts = [Scheduled(stream, 20, 1 + n, list(range(40)), True, drafts=[5] * n) for n in lengths]
    chunk = Scheduled(request, 8, 64, list(range(40)), True)
    for more in ([], [chunk]):
        batch = Batch([Scheduled(request, 3, 1, list(range(40)), True), *parts, *more], 1 + len(parts))
        assert recorded.covers(StepInputs.of(batch, PAGE_SIZE)[0])


def test_step_that_no_graph_has_room_for_is_not_covered() -> None:
    step = PagedStep(build("llama", {}), TORCH, STEPS[0])
    recorded = MixedGraphs(step.model, PAGE_SIZE, 6, 40, lambda run: run)
    assert recorded.most_tokens == 40
    request = Request(Submission("a", list(range(60)), SamplingParams()))
    scored = Request(Submission("a", list(range(60)), SamplingParams(prompt_logprobs=0)))

    def covers(*parts: tuple[int, int], request: Request = request) -> bool:
        scheduled = [Scheduled(request, start, tokens, list(range(8)), True) for start, tokens in parts]
        return recorded.covers(StepInputs.of(Batch(scheduled, 0), PAGE_SIZE)[0])

    assert covers((0, 40))
    assert not covers((0, 41))
    assert covers(*[(9, 1)] * 6, *[(0, 2)] * 7)
    assert not covers(*[(9, 1)] * 7, (0, 2))
    assert not covers(*[(0, 2)] * 8)
    assert not covers((0, 30), request=scored), "all its rows' logits are wanted"


def test_step_that_verifies_drafts_is_recorded_where_there_is_speculation() -> None:
    """Two streams verify four drafts each beside a decode and a chunk: 12 rows of logits."""
    step = PagedStep(build("llama", {}), TORCH, [(4, 1), (17, 1), (10, 1), (0, 9)])
    decode, *streams, chunk = step.batch.scheduled
    verifying = [structs.replace(part, num_tokens=5, drafts=[7, 8, 9, 10]) for part in streams]
    inputs, _ = StepInputs.of(Batch([decode, *verifying, chunk], 0), PAGE_SIZE)
    assert len(inputs.wanted) == 12
    expected = inputs.run(step.model).clone()

    def recorded(most_drafts: int) -> MixedGraphs:
        return MixedGraphs(step.model, PAGE_SIZE, 6, 40, lambda run: run, most_drafts=most_drafts)

    assert not recorded(0).covers(inputs)
    for most_drafts in (4, 64):
        graphs = recorded(most_drafts)
        assert graphs.covers(inputs)
        torch.testing.assert_close(graphs.run(inputs), expected, atol=1e-4, rtol=1e-4)


def test_engine_with_recorded_drafts_gives_same_tokens_as_without_speculation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve streams: more than a step with a chunk has room for verify drafts together where none arrives."""
    most_rows, kinds = 0, Counter[str]()

    class Verifying(DecodeGraphs):
        def run(self, inputs: StepInputs, previous_tokens: Tensor | None = None) -> Tensor:
            nonlocal most_rows
            most_rows = max(most_rows, len(inputs.wanted))
            return super().run(inputs, previous_tokens)

    run = StepInputs.run

    def eager(self: StepInputs, *given: Any) -> Tensor:
        kinds["eager"] += 1
        return run(self, *given)

    answers = []
    for speculative in (None, fixed(4)):
        engine = engine_of(max_num_batched_tokens=80, max_num_seqs=12, speculative_config=speculative)
        if speculative is not None:
            drafts = {"most_drafts": engine.config.most_drafts}
            decodes = DecodeGraphs(engine.model, 16, 12, lambda run: run)
            verifying = Verifying(engine.model, 16, 12, lambda run: run, **drafts)
            mixed_ones = MixedGraphs(engine.model, 16, 12, 80, lambda run: run, **drafts)
            engine.pipeline.runner = runner = Runner(engine.model, 16, None, [decodes, verifying, mixed_ones])
            assert runner.draft_room == (60, 6, 39)  # 12 streams of 5 rows; 8 of 5 with a chunk
            assert Runner(engine.model, 16, None, [decodes, mixed_ones]).draft_room == (0, 6, 39)
            assert engine.speculation is not None
            engine.speculation.policy.stop_at(runner.draft_room)
            monkeypatch.setattr(StepInputs, "run", eager)
        for number in range(12):
            params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
            engine.add(Submission(f"{number}", [5 + number, 9, 30] * 10, params))
        answers.append(answers_of(engine))
    assert answers[0] == answers[1]
    assert most_rows >= 30, "more than six streams with four drafts each"
    assert not kinds, "no step is launched kernel by kernel"


@pytest.mark.parametrize(("name", "is_ahead"), [("llama", False), ("gemma3_text", True)])
def test_engine_with_recorded_chunks_gives_same_tokens(name: str, is_ahead: bool) -> None:
    """Recorded, layers with unlike windows are groups that free their pages; kernel by kernel they keep all pages."""
    config = EngineConfig(
        max_num_batched_tokens=80, max_num_seqs=9, kv_cache_memory=ByteSize(8 << 20), async_scheduling=is_ahead
    )
    num_replayed = 0

    class Counted(MixedGraphs):
        def run(self, inputs: StepInputs, previous_tokens: Tensor | None = None) -> Tensor:
            nonlocal num_replayed
            num_replayed += 1
            return super().run(inputs, previous_tokens)

    answers = []
    for is_recorded in (False, True):
        own = config.model_copy(update={"disable_hybrid_kv_cache_manager": not is_recorded})
        engine = new_engine(wrap_module(build(name, SERVED[name])), own)
        assert (len(engine.model.groups) > 1) == (is_recorded and name != "llama")
        assert not engine.pipeline.runner.graphs, "on a CPU"
        if is_recorded:
            graphs = DecodeGraphs(engine.model, 16, 9, lambda run: run)
            engine.pipeline.runner = Runner(
                engine.model, 16, None, [graphs, Counted(engine.model, 16, 9, 80, lambda run: run)]
            )
        answers.append(tokens_of(engine, temperature=0.8))
    assert answers[0] == answers[1]
    assert num_replayed > 10


def test_cost_is_not_learnt_from_steps_that_graphs_lack_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are launched kernel by kernel, and take several times as long as steps of their size that are recorded."""
    config = EngineConfig(max_num_batched_tokens=80, max_num_seqs=20, kv_cache_memory=ByteSize(8 << 20))
    engine = new_engine(wrap_module(build("llama", {})), config)
    graphs = DecodeGraphs(engine.model, 16, 20, lambda run: run)
    engine.pipeline.runner = Runner(
        engine.model, 16, None, [graphs, MixedGraphs(engine.model, 16, 20, 64, lambda run: run)]
    )
    engine.calibrate([(StepWork.of([(0, tokens)]), 0.01 + tokens * 1e-4) for tokens in (16, 32, 64)])
    learnt: list[StepWork] = []
    monkeypatch.setattr(StepCostFit, "observe", lambda _, work, seconds: learnt.append(work))
    for count, num_tokens in ((3, 10), (12, 5), (1, 70), (3, 10)):
        for number in range(count):
            engine.add(Submission(f"{number}", [5] * num_tokens, SamplingParams(max_tokens=1)))
        while engine.has_work:
            engine.step()
    assert [work.prefill_tokens for work in learnt] == [30, 70, 30], "and not from 12 chunks of 5 tokens"


def test_model_whose_chunks_cannot_be_recorded_says_why_and_keeps_its_decodes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = PagedStep(build("llama", {}), TORCH, STEPS[0]).model
    decodes = DecodeGraphs(model, PAGE_SIZE, 4, lambda run: run)

    def refuse(*_: Any) -> None:
        raise RuntimeError("called a synchronizing CUDA operation")

    with caplog.at_level(logging.WARNING, mixed.__name__), monkeypatch.context() as patch:
        patch.setattr(MixedGraphs, "_forward", refuse)
        refused = mixed_graphs(model, PAGE_SIZE, 4, 64, decodes)
    why = "RuntimeError: called a synchronizing CUDA operation"
    assert caplog.messages == [f"steps with chunks run without CUDA graphs: {why}"]
    assert refused == (None, f"; steps with chunks are not: {why}")
    graphs, text = mixed_graphs(model, PAGE_SIZE, 4, 64, decodes)
    assert isinstance(graphs, MixedGraphs)
    assert text == ", steps with chunks of up to 64 tokens"
