"""Greedy rows, shapes of the input, types of the answer, and how often the host waits for a device."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from crossdock.workers.model.sampling.sampler import sample
from crossdock.workers.schedule.request.request import TokenLogprobs

from .rows import draw, make_row, random_logits


def test_greedy_token_is_argmax() -> None:
    logits = random_logits(32)
    assert draw(logits, [make_row(temperature=0.0)] * 32) == logits.argmax(-1).tolist()
    assert draw(logits.bfloat16(), [make_row(temperature=0.0)] * 32) == logits.bfloat16().argmax(-1).tolist()


@pytest.mark.parametrize(
    "params", [{"temperature": 9e-6}, {"top_k": 1}, {"temperature": 0.0, "top_p": 0.1, "top_k": 5}]
)
def test_row_with_tiny_temperature_or_top_k_1_is_greedy(params: dict[str, Any]) -> None:
    logits = random_logits(8)
    assert draw(logits, [make_row(**params)] * 8) == logits.argmax(-1).tolist()


def test_low_temperature_does_not_overflow() -> None:
    logits = random_logits(8, spread=30.0)
    for params in ({}, {"top_p": 0.9}, {"top_k": 9}):
        assert draw(logits, [make_row(temperature=2e-5, **params)] * 8) == logits.argmax(-1).tolist()


class HostWaits(TorchDispatchMode):
    """Lists the operations for which a GPU's host would have to wait: those whose values decide what comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masked = func is torch.ops.aten.index.Tensor and any(
            index is not None and index.dtype is torch.bool for index in args[1]
        )
        if masked or func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


def test_host_waits_only_for_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, however rows are mixed; twice where a kept set is wider than the first head."""
    num_lists, tolist = 0, Tensor.tolist

    def counted(self: Tensor) -> Any:
        nonlocal num_lists
        num_lists += 1
        return tolist(self)

    monkeypatch.setattr(Tensor, "tolist", counted)
    ordinary = [{"temperature": 0.0}, {}, {"top_p": 0.9, "top_k": 50}, {"min_p": 0.1}, {"repetition_penalty": 1.2}]
    for kinds, expected in (([*ordinary], 1), (ordinary[2:3], 1), (ordinary[1:2], 1), ([{}, {"top_k": 1000}], 2)):
        rows = [make_row(seed=i, **kinds[i % len(kinds)]) for i in range(10)]
        num_lists = 0
        with HostWaits() as waits:
            sample(random_logits(10), rows)
        assert (num_lists, waits.operations) == (expected, [])


def test_vocabulary_of_one_token_gives_that_token() -> None:
    assert draw(torch.zeros(1, 1), [make_row()]) == [0]
    assert draw(torch.zeros(1, 1), [make_row(top_p=0.5, top_k=5)]) == [0]


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.zeros(0, 10), []) == []


def test_strided_logits_give_same_tokens() -> None:
    logits = random_logits(8, 2000)
    wide = torch.zeros(8, 2100)
    wide[:, :2000] = logits
    rows = [make_row(seed=i, logprobs=2, **({"top_p": 0.9} if i % 2 else {})) for i in range(8)]
    assert sample(wide[:, :2000], rows) == sample(logits, rows)


def test_answers_are_plain_python_types() -> None:
    (token,) = sample(random_logits(1, 100), [make_row(logprobs=1)])
    assert type(token.token_id) is int
    assert isinstance(token.logprobs, TokenLogprobs)
    assert [type(value) for value in dataclasses.astuple(token.logprobs)] == [int, float, int, tuple]
    assert [type(value) for value in token.logprobs.top[0]] == [int, float]
