"""Padding a decode batch changes no logits and no page, and what is recorded reads the same tensors in every step."""

import logging
from collections import defaultdict
from typing import Any

import pytest
import torch
from pydantic import ByteSize
from torch import Tensor
from transformers import PreTrainedModel

from crossdock.kernels.attention import AttentionBatch
from crossdock.kernels.backend import CPP, TORCH, Attention, choose_attention
from crossdock.workers.model import graphs
from crossdock.workers.model.graphs import DecodeGraphs, batch_sizes, decode_graphs, padded
from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.model.model import PagedModel, wrap_module
from crossdock.workers.model.runner import Runner
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine import Engine
from crossdock.workers.schedule.batch import Batch, Scheduled
from crossdock.workers.schedule.request import Request, SamplingParams, Submission
from tests.workers.architectures import SERVED, build

from .test_model import monolithic

PAGE_SIZE = 8
LENGTHS = [5, 23, 40, 8, 16]


class Decodes:
    """Sequences in pages of which the last token is still to be computed. All that is not theirs is NaN, page 0 too."""

    def __init__(self, module: PreTrainedModel, attention: Attention, lengths: list[int] = LENGTHS) -> None:
        generator = torch.Generator().manual_seed(len(lengths))
        self.prompts = [torch.randint(3, 120, (n,), generator=generator) for n in lengths]
        module.set_attn_implementation("eager")
        self.expected = torch.stack([monolithic(module, prompt)[-1] for prompt in self.prompts])
        self.model = wrap_module(module, attention=attention)
        self.model.allocate_pool(64, PAGE_SIZE)
        self.pool.fill_(float("nan"))
        spare = iter((torch.randperm(63, generator=generator) + 1).tolist())
        requests = [Request(f"{i}", prompt.tolist(), SamplingParams()) for i, prompt in enumerate(self.prompts)]
        pages = [[next(spare) for _ in range(-(-n // PAGE_SIZE))] for n in lengths]

        def step(parts: list[tuple[int, int]]) -> StepInputs:
            its = [Scheduled(r, at, n, p, True) for r, p, (at, n) in zip(requests, pages, parts, strict=True)]
            return StepInputs.of(Batch(its, 0), PAGE_SIZE)[0]

        step([(0, n - 1) for n in lengths]).run(self.model)
        self.inputs = step([(n - 1, 1) for n in lengths])

    @property
    def pool(self) -> Tensor:
        assert self.model.pool is not None
        return self.model.pool

    def token(self, layer: int, slot: int) -> tuple[Tensor, Tensor]:
        keys, values = self.model.pages[layer]
        return keys[slot // PAGE_SIZE, :, slot % PAGE_SIZE], values[slot // PAGE_SIZE, :, slot % PAGE_SIZE]

    def check(self, logits: Tensor, before: Tensor) -> None:
        """`logits` are transformers' own, and of `before`, the pool, no element but these tokens' has changed."""
        torch.testing.assert_close(logits, self.expected, atol=2e-3, rtol=2e-3)
        written = self.pool.clone()
        for layer in range(len(self.model.layers)):
            for slot in self.inputs.slots.tolist():
                for part in self.token(layer, slot):
                    assert part.isfinite().all()
                    part.fill_(float("nan"))
        assert torch.equal(self.pool.nan_to_num(nan=1e9), before.nan_to_num(nan=1e9))
        self.pool.copy_(written)


def attentions() -> list[Any]:
    triton = pytest.param("triton", marks=pytest.mark.skipif(not _interprets(), reason="no interpreter here"))
    return ["cpp", "torch", triton]


def _interprets() -> bool:
    from crossdock.kernels.backend import _interprets

    return _interprets()


def named(name: str) -> Attention:
    return {"cpp": CPP, "torch": TORCH}.get(name) or choose_attention("triton", torch.device("cpu"))


@pytest.mark.parametrize("attention", attentions())
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "qwen3_moe"])
def test_padding_changes_no_logits_and_no_page(name: str, attention: str) -> None:
    it = Decodes(build(name, SERVED[name]), named(attention))
    before = it.pool.clone()
    it.check(it.inputs.run(it.model), before)
    for num_rows in (5, 8, 16):
        it.pool.copy_(before)
        logits = padded(it.inputs, num_rows).run(it.model)
        assert logits.shape[0] == num_rows
        it.check(logits[: len(LENGTHS)], before)


def test_padding_is_seen_if_it_writes() -> None:
    """The mutation: a slot that is not -1."""
    it = Decodes(build("llama", {}), TORCH)
    before = it.pool.clone()
    step = padded(it.inputs, 8)
    step.slots[-1] = 3
    with pytest.raises(AssertionError):
        it.check(step.run(it.model)[: len(LENGTHS)], before)


def test_there_is_a_graph_for_every_batch() -> None:
    for most in (1, 2, 3, 7, 8, 64, 100, 256, 1000):
        sizes = batch_sizes(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
        for wanted in range(1, most + 1):
            size = next(size for size in sizes if size >= wanted)
            assert size < 2 * wanted
            assert size - wanted < max(8, wanted / 3)


def test_what_is_recorded_gives_the_same_and_stays_where_it_is() -> None:
    """As a capture would have it: a call of what was recorded sees no tensor but those it saw at first."""
    module = build("llama", {})
    seen: defaultdict[int, set[tuple[int, ...]]] = defaultdict(set)

    class Watched(PagedModel):
        def forward(self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch, rows: Tensor) -> Tensor:
            its = (token_ids, positions, batch.query_start, batch.kv_len, batch.page_table, batch.slots, rows)
            seen[len(token_ids)].add((*(x.data_ptr() for x in its), *batch.page_table.stride(), batch.max_kv_len))
            return super().forward(token_ids, positions, batch, rows)

    recorded = None
    for lengths in ([40, 5, 23], [9], [5, 23, 40, 8, 16, 7, 3], [200, 3, 4, 5], [9, 8]):
        it = Decodes(module, TORCH, lengths)
        model = it.model
        watched = Watched(model.module, model.config, model.layers, model.max_model_len, model.eos_token_ids)
        watched.attention, watched.pages, watched.pool = TORCH, model.pages, model.pool
        before = it.pool.clone()
        if recorded is None:
            recorded = DecodeGraphs(watched, PAGE_SIZE, 11, lambda run: run)
        recorded._model.pages = model.pages
        assert recorded.fit(it.inputs)
        it.check(recorded.run(it.inputs), before)
    assert {size: len(its) for size, its in seen.items()} == {1: 1, 2: 1, 4: 1, 8: 1, 11: 1}
    assert {its[-1] for addresses in seen.values() for its in addresses} == {256}


def test_chunks_and_rows_that_are_not_wanted_are_left_to_others() -> None:
    it = Decodes(build("llama", {}), TORCH)
    recorded = DecodeGraphs(it.model, PAGE_SIZE, 6, lambda run: run)
    request = Request("chunk", list(range(30)), SamplingParams())

    def step(*parts: Scheduled) -> StepInputs:
        return StepInputs.of(Batch(parts, 0), PAGE_SIZE)[0]

    decode = Scheduled(request, 29, 1, [1, 2, 3, 4], True)
    assert recorded.fit(step(decode))
    assert recorded.fit(step(*[decode] * 6))
    assert not recorded.fit(step(*[decode] * 7))
    assert not recorded.fit(step(decode, Scheduled(request, 0, 9, [1, 2], True)))
    assert not recorded.fit(step(decode, Scheduled(request, 0, 1, [1], False)))


def test_an_engine_gives_the_same_tokens_with_what_is_recorded() -> None:
    module = build("llama", {})
    config = EngineConfig(max_num_batched_tokens=80, max_num_seqs=9, kv_cache_memory=ByteSize(8 << 20))
    answers, num_replayed = [], 0

    class Counted(DecodeGraphs):
        def run(self, inputs: StepInputs, found: Tensor | None = None) -> Tensor:
            nonlocal num_replayed
            num_replayed += 1
            return super().run(inputs, found)

    for is_recorded, is_ahead in ((False, False), (True, False), (True, True)):
        it = Engine(wrap_module(module), config.model_copy(update={"async_scheduling": is_ahead}))
        assert it.pipeline.runner.graphs is None, "on a CPU"
        if is_recorded:
            it.pipeline.runner = Runner(it.model, 16, None, Counted(it.model, 16, config.max_num_seqs, lambda run: run))
        for number in range(14):
            prompt = [(13 * number + 7 * at) % 90 + 3 for at in range(1 + 31 * number % 151)]
            params = SamplingParams(max_tokens=4 + 3 * number, temperature=0.0, ignore_eos=True)
            it.add(Submission(f"{number}", prompt, params))
        tokens: dict[str, list[int]] = {}
        while it.has_work:
            for delta in it.step().deltas:
                tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
        answers.append(tokens)
    assert answers[0] == answers[1] == answers[2]
    assert num_replayed > 40


def test_a_model_that_cannot_be_recorded_runs_on_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    it = Decodes(build("llama", {}), TORCH)
    with caplog.at_level(logging.INFO, graphs.__name__):
        assert decode_graphs(it.model, PAGE_SIZE, 4) is None
        assert not caplog.messages, "a CPU has none, and misses none"
        monkeypatch.setattr(PagedModel, "device", property(lambda _: torch.device("cuda")))

        def refuse() -> None:
            raise RuntimeError("called a synchronizing CUDA operation")

        monkeypatch.setattr(graphs, "_recorder", refuse)
        assert decode_graphs(it.model, PAGE_SIZE, 4) is None
    assert caplog.messages == [
        "decode steps run without CUDA graphs: RuntimeError: called a synchronizing CUDA operation"
    ]
