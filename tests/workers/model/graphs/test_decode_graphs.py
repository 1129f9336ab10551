"""Padding a decode batch changes no logits and no page; recorded steps read the same tensors every time."""

import dataclasses
import logging
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from crossdock.kernels.attention import AttentionBatch
from crossdock.kernels.backend import CPP, TORCH, Attention, choose_attention
from crossdock.kernels.packages import triton_is_interpreted
from crossdock.workers.model.graphs import decode_graphs as graphs
from crossdock.workers.model.graphs.decode_graphs import DecodeGraphs, batch_sizes, decode_graphs, padded
from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.schedule.request.batch import Batch, Scheduled
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.submission import SamplingParams, Submission
from tests.sweeps import rest_in_soak
from tests.workers.architectures import SERVED, build
from tests.workers.model.graphs.steps import PAGE_SIZE, PagedStep

LENGTHS = [5, 23, 40, 8, 16]


def decodes_of(module: PreTrainedModel, lengths: list[int] = LENGTHS) -> PagedStep:
    """Return a step of decodes, over pages that plain torch has filled: Triton's interpreter takes seconds for that."""
    return PagedStep(module, TORCH, [(length - 1, 1) for length in lengths])


def attentions() -> list[Any]:
    triton = pytest.param("triton", marks=pytest.mark.skipif(not triton_is_interpreted(), reason="no interpreter here"))
    return ["cpp", "torch", triton]


def named(name: str) -> Attention:
    return {"cpp": CPP, "torch": TORCH}.get(name) or choose_attention("triton", torch.device("cpu"))


@pytest.mark.parametrize("attention", attentions())
@pytest.mark.parametrize("name", rest_in_soak(["llama", "gemma2", "gpt_oss", "qwen3_moe"], "gpt_oss"))
def test_padding_rows_change_no_logits_and_no_page(name: str, attention: str) -> None:
    decodes = decodes_of(build(name, SERVED[name]))
    model = dataclasses.replace(decodes.model, attention=named(attention))
    for num_rows in (5, 8):
        step = padded(decodes.inputs, num_rows)
        assert len(step.token_ids) == num_rows
        decodes.check(lambda step=step: step.run(model))  # type: ignore[misc]


VERIFIED = [[(22, 3), (4, 1), (39, 2)], [(8, 4)], [(15, 4), (30, 1), (2, 4), (7, 3)], [(20, 2)] * 8]
"""(tokens before, rows) of each stream of steps that verify up to three drafts."""


def verifying_of(module: PreTrainedModel, parts: list[tuple[int, int]]) -> PagedStep:
    """Return a step whose rows all have logits: the newest token of each stream, and its drafts."""
    step = PagedStep(module, TORCH, parts)
    return step.with_all_logits()


@pytest.mark.parametrize("attention", attentions())
@pytest.mark.parametrize("name", rest_in_soak(["llama", "gemma2", "gpt_oss", "deepseek_v3"], "gpt_oss", "gemma2"))
def test_padding_of_streams_with_drafts_changes_no_logits_and_no_page(name: str, attention: str) -> None:
    """Padding rows are sequences of their own, and the last sequences have no row."""
    for parts in VERIFIED[:1] if attention == "triton" else VERIFIED[:3]:
        step = verifying_of(build(name, SERVED[name]), parts)
        model = dataclasses.replace(step.model, attention=named(attention))
        for num_rows in (len(step.inputs.token_ids), 16):
            padded_step = padded(step.inputs, num_rows)
            assert len(padded_step.token_ids) == len(padded_step.kv_len) == num_rows
            assert padded_step.query_start[-1] == num_rows
            step.check(lambda padded_step=padded_step, model=model: padded_step.run(model))  # type: ignore[misc]


def test_recorded_steps_with_drafts_give_same_logits_from_fixed_addresses() -> None:
    """Decodes come between streams with drafts: any number of rows up to three drafts each, in any order."""
    module, seen = build("llama", {}), defaultdict[int, set[tuple[int, ...]]](set)

    class Watched(LoadedModel):
        def forward(
            self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch, rows: Tensor, *more: Any
        ) -> Tensor:
            tensors = (token_ids, positions, batch.query_start, batch.kv_len, batch.page_table, batch.slots, rows)
            sizes = batch.num_decodes, batch.max_query_len, batch.max_kv_len, len(batch.kv_len)
            seen[len(token_ids)].add((*(x.data_ptr() for x in tensors), *batch.page_table.stride(), *sizes))
            assert int(batch.query_start[-1]) == len(token_ids), "no row belongs to no sequence"
            return super().forward(token_ids, positions, batch, rows, *more)

    recorded, watched = None, None
    for parts in (*VERIFIED, [(9, 1)], *VERIFIED[::-1]):
        step = verifying_of(module, parts)
        if recorded is None or watched is None:
            watched = Watched(**vars(step.model))
            recorded = DecodeGraphs(watched, PAGE_SIZE, 6, lambda run: run, most_drafts=3)
            assert recorded.most_rows == 24
        watched.pool.pages = step.model.pool.pages
        assert recorded.covers(step.inputs)
        step.check(lambda recorded=recorded, step=step: recorded.run(step.inputs))  # type: ignore[misc]
    assert {rows: len(addresses) for rows, addresses in seen.items()} == {8: 1, 16: 1, 24: 1}
    assert not recorded.covers(verifying_of(module, [(9, 5)]).inputs), "more than three drafts"
    assert not recorded.covers(verifying_of(module, [(9, 4)] * 7).inputs), "28 rows"
    assert not recorded.covers(PagedStep(module, TORCH, [(9, 2)]).inputs), "a chunk, which has one row of logits"


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
        decodes = decodes_of(module, lengths)
        model = decodes.model
        watched = Watched(**vars(model))
        if recorded is None or recorded_model is None:
            recorded, recorded_model = DecodeGraphs(watched, PAGE_SIZE, 11, lambda run: run), watched
        recorded_model.pool.pages = model.pool.pages
        assert recorded.covers(decodes.inputs)
        decodes.check(lambda recorded=recorded, decodes=decodes: recorded.run(decodes.inputs))  # type: ignore[misc]
    assert {size: len(addresses) for size, addresses in seen.items()} == {1: 1, 2: 1, 4: 1, 8: 1, 11: 1}
    assert {tensors[-1] for addresses in seen.values() for tensors in addresses} == {256}


def test_steps_with_chunks_or_unwanted_rows_are_not_covered() -> None:
    decodes = decodes_of(build("llama", {}))
    recorded = DecodeGraphs(decodes.model, PAGE_SIZE, 6, lambda run: run)
    request = Request(Submission("chunk", list(range(30)), SamplingParams()))

    def step(*parts: Scheduled) -> StepInputs:
        return StepInputs.of(Batch(parts, 0), PAGE_SIZE)[0]

    decode = Scheduled(request, 29, 1, [1, 2, 3, 4], True)
    assert recorded.covers(step(decode))
    assert recorded.covers(step(*[decode] * 6))
    assert not recorded.covers(step(*[decode] * 7))
    assert not recorded.covers(step(decode, Scheduled(request, 0, 9, [1, 2], True)))
    assert not recorded.covers(step(decode, Scheduled(request, 0, 1, [1], False)))


def test_model_that_cannot_be_recorded_runs_eagerly_and_logs_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    decodes = decodes_of(build("llama", {}))
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
