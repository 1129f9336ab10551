"""Padding a decode batch changes no logits and no page; recorded steps read the same tensors every time."""

import dataclasses
import logging
from collections import defaultdict
from typing import Any

import pytest
import torch
from pydantic import ByteSize
from torch import Tensor
from transformers import PreTrainedModel

from crossdock.kernels.attention import AttentionBatch
from crossdock.kernels.backend import CPP, TORCH, Attention, choose_attention, triton_is_interpreted
from crossdock.workers.model.graphs import decode_graphs as graphs
from crossdock.workers.model.graphs.decode_graphs import DecodeGraphs, batch_sizes, decode_graphs, padded
from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.runner import Runner
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.schedule.batch import Batch, Scheduled
from crossdock.workers.schedule.request import Request, SamplingParams, Submission
from tests.workers.architectures import SERVED, build
from tests.workers.model.paged import monolithic
from tests.workers.sweeps import rest_in_soak

PAGE_SIZE = 8
LENGTHS = [5, 23, 40, 8, 16]


class Decodes:
    """Sequences in pages whose last token is not computed yet. All other slots are NaN, page 0 too.

    Plain torch fills the pages, and only the decodes run through `attention`: Triton's interpreter takes seconds for
    a chunk.
    """

    def __init__(self, module: PreTrainedModel, attention: Attention, lengths: list[int] = LENGTHS) -> None:
        generator = torch.Generator().manual_seed(len(lengths))
        self.prompts = [torch.randint(3, 120, (n,), generator=generator) for n in lengths]
        module.set_attn_implementation("eager")
        self.expected = torch.stack([monolithic(module, prompt)[-1] for prompt in self.prompts])
        self.model = wrap_module(module, LoadOptions(attention=TORCH))
        self.model.allocate_pool(64, PAGE_SIZE)
        self.pool.fill_(float("nan"))
        spare = iter((torch.randperm(63, generator=generator) + 1).tolist())
        requests = [Request(f"{i}", prompt.tolist(), SamplingParams()) for i, prompt in enumerate(self.prompts)]
        pages = [[next(spare) for _ in range(-(-n // PAGE_SIZE))] for n in lengths]

        def step(parts: list[tuple[int, int]]) -> StepInputs:
            scheduled = [Scheduled(r, at, n, p, True) for r, p, (at, n) in zip(requests, pages, parts, strict=True)]
            return StepInputs.of(Batch(scheduled, 0), PAGE_SIZE)[0]

        step([(0, n - 1) for n in lengths]).run(self.model)
        self.model = dataclasses.replace(self.model, attention=attention)
        self.inputs = step([(n - 1, 1) for n in lengths])

    @property
    def pool(self) -> Tensor:
        return self.model.pool.tensor

    def token(self, layer: int, slot: int) -> tuple[Tensor, Tensor]:
        keys, values = self.model.pool.pages[layer]
        return keys[slot // PAGE_SIZE, :, slot % PAGE_SIZE], values[slot // PAGE_SIZE, :, slot % PAGE_SIZE]

    def check(self, logits: Tensor, before: Tensor) -> None:
        """Check that `logits` are transformers' own, and that the pool differs from `before` only in these tokens."""
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
    triton = pytest.param("triton", marks=pytest.mark.skipif(not triton_is_interpreted(), reason="no interpreter here"))
    return ["cpp", "torch", triton]


def named(name: str) -> Attention:
    return {"cpp": CPP, "torch": TORCH}.get(name) or choose_attention("triton", torch.device("cpu"))


@pytest.mark.parametrize("attention", attentions())
@pytest.mark.parametrize("name", rest_in_soak(["llama", "gemma2", "gpt_oss", "qwen3_moe"], "gpt_oss"))
def test_padding_rows_change_no_logits_and_no_page(name: str, attention: str) -> None:
    decodes = Decodes(build(name, SERVED[name]), named(attention))
    before = decodes.pool.clone()
    decodes.check(decodes.inputs.run(decodes.model), before)
    for num_rows in (5, 8, 16):
        decodes.pool.copy_(before)
        logits = padded(decodes.inputs, num_rows).run(decodes.model)
        assert logits.shape[0] == num_rows
        decodes.check(logits[: len(LENGTHS)], before)


def test_padding_row_that_writes_is_detected() -> None:
    """A slot that is not -1 is a mutation that the check must detect."""
    decodes = Decodes(build("llama", {}), TORCH)
    before = decodes.pool.clone()
    step = padded(decodes.inputs, 8)
    step.slots[-1] = 3
    with pytest.raises(AssertionError):
        decodes.check(step.run(decodes.model)[: len(LENGTHS)], before)


def test_batch_sizes_pad_every_batch_by_little() -> None:
    for most in (1, 2, 3, 7, 8, 64, 100, 256, 1000):
        sizes = batch_sizes(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
        for wanted in range(1, most + 1):
            size = next(size for size in sizes if size >= wanted)
            assert size < 2 * wanted
            assert size - wanted < max(8, wanted / 3)


def test_recorded_steps_give_same_logits_from_fixed_addresses() -> None:
    """As a capture requires: a replayed step sees only the tensors of the recorded one."""
    module = build("llama", {})
    seen: defaultdict[int, set[tuple[int, ...]]] = defaultdict(set)

    class Watched(LoadedModel):
        def forward(
            self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch, rows: Tensor, *more: Any
        ) -> Tensor:
            tensors = (token_ids, positions, batch.query_start, batch.kv_len, batch.page_table, batch.slots, rows)
            seen[len(token_ids)].add((*(x.data_ptr() for x in tensors), *batch.page_table.stride(), batch.max_kv_len))
            return super().forward(token_ids, positions, batch, rows, *more)

    recorded, recorded_model = None, None
    for lengths in ([40, 5, 23], [9], [5, 23, 40, 8, 16, 7, 3], [200, 3, 4, 5], [9, 8]):
        decodes = Decodes(module, TORCH, lengths)
        model = decodes.model
        watched = Watched(**vars(model))
        before = decodes.pool.clone()
        if recorded is None or recorded_model is None:
            recorded, recorded_model = DecodeGraphs(watched, PAGE_SIZE, 11, lambda run: run), watched
        recorded_model.pool.pages = model.pool.pages
        assert recorded.covers(decodes.inputs)
        decodes.check(recorded.run(decodes.inputs), before)
    assert {size: len(addresses) for size, addresses in seen.items()} == {1: 1, 2: 1, 4: 1, 8: 1, 11: 1}
    assert {tensors[-1] for addresses in seen.values() for tensors in addresses} == {256}


def test_steps_with_chunks_or_unwanted_rows_are_not_covered() -> None:
    decodes = Decodes(build("llama", {}), TORCH)
    recorded = DecodeGraphs(decodes.model, PAGE_SIZE, 6, lambda run: run)
    request = Request("chunk", list(range(30)), SamplingParams())

    def step(*parts: Scheduled) -> StepInputs:
        return StepInputs.of(Batch(parts, 0), PAGE_SIZE)[0]

    decode = Scheduled(request, 29, 1, [1, 2, 3, 4], True)
    assert recorded.covers(step(decode))
    assert recorded.covers(step(*[decode] * 6))
    assert not recorded.covers(step(*[decode] * 7))
    assert not recorded.covers(step(decode, Scheduled(request, 0, 9, [1, 2], True)))
    assert not recorded.covers(step(decode, Scheduled(request, 0, 1, [1], False)))


def test_engine_with_recorded_steps_gives_same_tokens() -> None:
    module = build("llama", {})
    config = EngineConfig(max_num_batched_tokens=80, max_num_seqs=9, kv_cache_memory=ByteSize(8 << 20))
    answers, num_replayed = [], 0

    class Counted(DecodeGraphs):
        def run(self, inputs: StepInputs, previous_tokens: Tensor | None = None) -> Tensor:
            nonlocal num_replayed
            num_replayed += 1
            return super().run(inputs, previous_tokens)

    for is_recorded, is_ahead in ((False, False), (True, False), (True, True)):
        engine = Engine(wrap_module(module), config.model_copy(update={"async_scheduling": is_ahead}))
        assert not engine.pipeline.runner.graphs, "on a CPU"
        if is_recorded:
            engine.pipeline.runner = Runner(
                engine.model, 16, None, [Counted(engine.model, 16, config.max_num_seqs, lambda run: run)]
            )
        for number in range(14):
            prompt = [(13 * number + 7 * at) % 90 + 3 for at in range(1 + 31 * number % 151)]
            params = SamplingParams(max_tokens=4 + 3 * number, temperature=0.0, ignore_eos=True)
            engine.add(Submission(f"{number}", prompt, params))
        tokens: dict[str, list[int]] = {}
        while engine.has_work:
            for delta in engine.step().deltas:
                tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
        answers.append(tokens)
    assert answers[0] == answers[1] == answers[2]
    assert num_replayed > 40


def test_model_that_cannot_be_recorded_runs_eagerly_and_logs_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    decodes = Decodes(build("llama", {}), TORCH)
    with caplog.at_level(logging.INFO, graphs.__name__):
        assert decode_graphs(decodes.model, PAGE_SIZE, 4) == (None, "")
        assert not caplog.messages, "a CPU needs no graphs"
        monkeypatch.setattr(LoadedModel, "device", property(lambda _: torch.device("cuda")))

        def refuse(model: LoadedModel) -> None:
            raise RuntimeError("called a synchronizing CUDA operation")

        monkeypatch.setattr(graphs, "recorder_for", refuse)
        reason = "RuntimeError: called a synchronizing CUDA operation"
        assert decode_graphs(decodes.model, PAGE_SIZE, 4) == (None, f"none: {reason}")
    assert caplog.messages == [f"decode steps run without CUDA graphs: {reason}"]
