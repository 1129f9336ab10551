"""Small sums through memory that all GPUs read: every rank uses them or none does, and the sums are right."""

import logging
from unittest.mock import create_autospec

import pytest
import torch
import torch.distributed as dist

from crossdock.workers.model.cut import symmetric_sums as module
from crossdock.workers.model.cut.collectives import Collectives
from crossdock.workers.model.cut.position import RankPosition
from tests.workers.ranks import UNHURRIED_S, Ranks


def use(rank: int, size: int, device: str, refusals: dict[int, str] | None = None) -> tuple[list[float], list[str]]:
    """On one rank: connect, and return a sum and what was logged. `refusals`: of ranks, in place of their own."""
    logs: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logs.append(record.getMessage())  # type: ignore[method-assign]
    module.logger.addHandler(handler)
    module.logger.setLevel(logging.INFO)
    own = module._why_not
    if refusals is not None:
        module._why_not = lambda *_: refusals.get(rank, "")
    try:
        links = Collectives(RankPosition(rank, size, 1), UNHURRIED_S)
        links.use_symmetric_memory(torch.device(device))
        return links.all_reduce(torch.arange(8.0, device=device) + rank).tolist(), logs
    finally:
        module._why_not = own
        module.logger.removeHandler(handler)


EXPECTED = [2.0 * i + 1 for i in range(8)]


def test_ranks_on_cpus_say_why_they_do_not_share_memory(ranks: Ranks) -> None:
    for total, logs in ranks.run(2, use, 2, "cpu"):
        assert total == EXPECTED
        assert logs == ["all-reduces are NCCL's or gloo's, whatever their size: ranks compute on cpu"]


def test_one_rank_that_cannot_share_memory_is_the_reason_for_all(ranks: Ranks) -> None:
    for total, logs in ranks.run(2, use, 2, "cpu", {1: "no driver"}):
        assert total == EXPECTED
        assert logs == ["all-reduces are NCCL's or gloo's, whatever their size: no driver"]


def test_memory_that_cannot_be_shared_after_all_leaves_sums_as_they_were(ranks: Ranks) -> None:
    for total, logs in ranks.run(2, use, 2, "cpu", {}):  # CPUs cannot, and are not asked
        assert total == EXPECTED
        assert len(logs) == 1, logs


@pytest.mark.parametrize(
    ("x", "is_taken"),
    [
        (torch.zeros(64, 4096, dtype=torch.bfloat16), True),  # 512 KiB: 64 decodes of an 8B model
        (torch.zeros(1024, 4096, dtype=torch.bfloat16), True),  # 8 MiB
        (torch.zeros(1025, 4096, dtype=torch.bfloat16), False),
        (torch.zeros(3, dtype=torch.bfloat16), False),
        (torch.zeros(8, dtype=torch.bfloat16), True),  # each of four ranks reads 16 bytes of every rank
        (
            torch.zeros((1 << 18) + 8, dtype=torch.bfloat16),
            False,
        ),  # four ranks cannot share these in pieces of 16 bytes
        (torch.zeros((1 << 18) + 32, dtype=torch.bfloat16), True),
        (torch.zeros(8, dtype=torch.float16), False),
        (torch.zeros(0), False),
    ],
)
def test_only_aligned_tensors_of_two_types_are_summed_in_shared_memory(x: torch.Tensor, is_taken: bool) -> None:
    sums = object.__new__(module.SymmetricSums)
    sums._size, sums.one_shot_bytes, sums.most_bytes = 4, module.ONE_SHOT_BYTES[4], module.TWO_SHOT_BYTES
    assert sums.takes(x) is is_taken


class Simulated:
    """In place of torch's operations: the sums of four ranks whose tensors are one, two and three more than ours."""

    def __init__(self, wrong_from: int = 1 << 40) -> None:
        self.calls: list[tuple[str, int]] = []
        self.wrong_from = wrong_from  # bytes

    def total(self, name: str, x: torch.Tensor) -> torch.Tensor:
        self.calls.append((name, x.nbytes))
        step = 3 if (x.double() % 3 == 0).all() and len(self.calls) % 2 == 0 else 1  # of the second check, times three
        return (x.double() * 4 + 6 * step + (x.nbytes >= self.wrong_from)).to(x.dtype)

    def one_shot_all_reduce_copy(self, buffer: torch.Tensor, x: torch.Tensor, *_: str) -> torch.Tensor:
        return self.total("one", x)

    def two_shot_all_reduce_out(self, x: torch.Tensor, _: str, __: str, out: torch.Tensor) -> None:
        out.copy_(self.total("two", x))


@pytest.mark.parametrize(
    ("wrong_from", "most"), [(1 << 40, 8 << 20), (1 << 20, 512 << 10), (8 << 20, 512 << 10), (1, None)]
)
def test_only_sums_that_were_proven_at_start_are_used(
    wrong_from: int, most: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    simulated, group = Simulated(wrong_from), create_autospec(dist.ProcessGroup, instance=True)
    group.size.return_value, group.rank.return_value, group.group_name = 4, 0, "ranks"
    monkeypatch.setattr(module, "_why_not", lambda *_: "")
    monkeypatch.setattr(module.torch.ops, "symm_mem", simulated)
    monkeypatch.setattr(module.symmetric_memory, "empty", torch.empty)
    monkeypatch.setattr(module.symmetric_memory, "rendezvous", lambda *_: None)
    monkeypatch.delenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", raising=False)
    with caplog.at_level(logging.INFO, module.logger.name):
        sums = module.symmetric_sums(group, torch.device("cpu"), True, lambda text: [text] * 4)
    assert (None if sums is None else sums.most_bytes) == most
    assert ("is wrong" in caplog.text) == (wrong_from < 1 << 40)
    if most == 8 << 20:
        assert [call for call in simulated.calls if call[0] == "one"] == [("one", 128)] * 4
        assert {num_bytes for name, num_bytes in simulated.calls if name == "two"} == {1 << 20, 8 << 20}


def shared(rank: int, size: int) -> list[list[float]]:
    """On one rank: sums of one GPU's two processes, eager and in a CUDA graph, each with other numbers."""
    device = torch.device("cuda:0")
    group = dist.new_group(backend="gloo")
    sums = module.symmetric_sums(group, device, True, lambda text: gathered(text, size))
    assert sums is not None
    x = torch.zeros(8, device=device)
    totals = []
    graph = torch.cuda.CUDAGraph()
    sums.sum(x)
    with torch.cuda.graph(graph):
        recorded = sums.sum(x)
    for number in range(3):
        x.copy_(torch.arange(8.0, device=device) * number + rank)
        graph.replay()
        totals += [sums.sum(x).tolist(), recorded.tolist()]
    return totals


def gathered(text: str, size: int) -> list[str]:
    texts: list[str] = [""] * size
    dist.all_gather_object(texts, text)
    return texts


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_sums_in_shared_memory_of_one_gpu_are_right_eager_and_recorded(ranks: Ranks) -> None:
    for totals in ranks.run(2, shared, 2):
        for number in range(3):
            expected = [2.0 * i * number + 1 for i in range(8)]
            assert totals[2 * number] == totals[2 * number + 1] == expected
