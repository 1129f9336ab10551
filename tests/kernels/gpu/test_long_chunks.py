"""Long chunks go to a package that is faster and right, and all else to Triton."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from crossdock.kernels import packages
from crossdock.kernels.attention import AttentionBatch, reference_paged_attention
from crossdock.kernels.backend import choose_attention, with_long_chunks
from tests.kernels.test_attention import Case, check

pytest.importorskip("triton", reason="needs Triton: pip install triton")

from crossdock.kernels.gpu import long_chunks, triton_attention
from crossdock.kernels.gpu.long_chunks import Package

CUDA = torch.device("cuda:0")


class Counted:
    """The reference in the place of a package: counts its calls, and checks that it gets chunks alone."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: AttentionBatch, **options: Any) -> Tensor:
        self.num_calls += 1
        assert batch.num_decodes == 0
        assert batch.on_host is not None
        assert all(map(torch.equal, batch.on_host, (batch.query_start, batch.kv_len)))
        assert int(batch.query_start[-1]) == len(q)
        assert batch.max_query_len == int(batch.query_start.diff().max())
        return reference_paged_attention(q, k_pages, v_pages, batch, **options)


def of(attend: Callable[..., Tensor], name: str = "some") -> Package:
    return Package(name, attend, (32,))


LENGTHS = [(1, 40), (1, 9), (30, 70), (6, 6)]


def long_case(lengths: list[tuple[int, int]], **shape: Any) -> Case:
    case = Case(lengths, dtype=torch.float16, **shape)
    case.batch.on_host = case.batch.query_start, case.batch.kv_len
    return case


@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[2:]], ids=["beside decodes", "alone"])
@pytest.mark.parametrize("shape", [{}, {"window": 24}, {"softcap": 3.0}], ids=str)
def test_long_chunks_run_in_the_package_and_decodes_in_triton(
    monkeypatch: pytest.MonkeyPatch, lengths: list[tuple[int, int]], shape: dict[str, Any]
) -> None:
    monkeypatch.setattr(long_chunks, "LONG", 35)
    case, package = long_case(lengths, **shape), Counted()
    for _ in range(2):  # layers
        check(case, partial(long_chunks.paged_attention, of(package)))
    assert package.num_calls == 2
    assert case.batch.chunks().derived is case.batch.chunks().derived, "what a package plans serves all layers"


@pytest.mark.parametrize(
    ("lengths", "shape"),
    [
        ([(1, 9), (35, 70)], {}),
        (LENGTHS, {"sinks": True}),
        (LENGTHS, {"attention_chunk": 16}),
        (LENGTHS, {"k_dim": 48, "v_dim": 48}),
        (LENGTHS, {"k_dim": 32, "v_dim": 16}),
        (LENGTHS, {"blocks": {2: [(45, 60)]}}),
    ],
    ids=["short", "sinks", "attention chunks", "head size", "unlike sizes", "pictures"],
)
def test_all_that_a_package_does_not_take_runs_in_triton(
    monkeypatch: pytest.MonkeyPatch, lengths: list[tuple[int, int]], shape: dict[str, Any]
) -> None:
    monkeypatch.setattr(long_chunks, "LONG", 35)
    package = Counted()
    check(long_case(lengths, **shape), partial(long_chunks.paged_attention, of(package)))
    assert not package.num_calls


def test_recorded_steps_and_a_fixed_order_run_in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_chunks, "LONG", 35)
    package = Counted()
    check(Case(LENGTHS, dtype=torch.float16), partial(long_chunks.paged_attention, of(package)))
    check(long_case(LENGTHS), partial(long_chunks.paged_attention, of(package), in_fixed_order=True))
    assert not package.num_calls


def test_fastest_package_is_taken_if_it_is_right_and_much_faster(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Measure a small prompt, by seconds that the test gives."""
    monkeypatch.setattr(long_chunks, "_TOKENS", 64)
    monkeypatch.setattr(triton_attention, "paged_attention", reference_paged_attention)

    def broken(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("no kernel for sm_90")

    def wrong(*given: Any, **options: Any) -> Tensor:
        return reference_paged_attention(*given, **options) * 1.05

    seconds = {reference_paged_attention: 1.3, broken: 0.0, wrong: 0.1}
    fast, faster, slow = (Counted() for _ in range(3))
    seconds |= {fast: 0.9, faster: 0.8, slow: 1.01}

    def seconds_of(run: Any) -> float:
        run()
        return seconds[run.func]

    def chosen(*attends: Callable[..., Tensor]) -> Callable[..., Tensor] | None:
        names = {broken: "broken", wrong: "wrong", slow: "slow", faster: "faster"}
        found = [of(attend, names.get(attend, "fast")) for attend in attends]
        times = long_chunks.times_of(found, torch.device("cpu"), seconds_of)
        package = long_chunks.chosen(found, [times])
        return None if package is None else package.paged_attention

    with caplog.at_level(logging.INFO, long_chunks.__name__):
        assert chosen(broken, fast, wrong, faster, slow) is faster
    start = "attention of long chunks: "
    assert caplog.messages == [
        f"{start}broken fails: RuntimeError: no kernel for sm_90",
        f"{start}fast is 1.44 times as fast as triton",
        f"{start}wrong differs from triton by 5.0 %",
        f"{start}faster is 1.62 times as fast as triton",
        f"{start}slow is 1.29 times as fast as triton",
        "attention of steps with more than 512 tokens of chunks runs in faster",
    ]
    assert chosen(slow, broken) is None
    assert chosen() is None


def test_auto_alone_measures_packages_and_only_for_pages_of_the_models_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    package = of(Counted())
    monkeypatch.setattr(long_chunks, "installed", lambda _: [package])
    monkeypatch.setattr(long_chunks, "times_of", lambda *_: {"some": 1.5})
    triton = choose_attention("auto", CUDA)
    chosen = with_long_chunks(triton, "auto", CUDA)
    assert (chosen.name, chosen.takes_fp8) == ("triton", True)
    assert isinstance(chosen.paged_attention, partial)
    assert chosen.paged_attention.args == (package,)
    assert with_long_chunks(triton, "triton", CUDA) is triton
    assert with_long_chunks(triton, "auto", CUDA, "fp8") is triton
    on_cpu = choose_attention("auto", torch.device("cpu"))
    assert with_long_chunks(on_cpu, "auto", torch.device("cpu")) is on_cpu
    monkeypatch.setattr(long_chunks, "times_of", lambda *_: {"some": 1.2})
    assert with_long_chunks(triton, "auto", CUDA) is triton


def test_ranks_take_the_choice_of_the_first_one_whatever_they_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, each in a thread of its own, exchange their times as the ranks of a worker group do."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    one, other = (of(Counted(), name) for name in ("one", "other"))
    rank, both = threading.local(), threading.Barrier(2, timeout=240)
    monkeypatch.setattr(long_chunks, "installed", lambda _: rank.installed)
    monkeypatch.setattr(long_chunks, "times_of", lambda *_: rank.times)
    texts = ["", ""]

    def attention_of(number: int, installed: list[Package], times: dict[str, float]) -> Any:
        def gather(text: str) -> list[str]:
            texts[number] = text
            both.wait()
            return texts

        rank.installed, rank.times = installed, times
        return with_long_chunks(choose_attention("auto", CUDA), "auto", CUDA, gather=gather).paged_attention

    def chosen(*ranks: tuple[list[Package], dict[str, float]]) -> list[Package | None]:
        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(lambda each: attention_of(*each), [(n, *given) for n, given in enumerate(ranks)]))
        return [each.args[0] if isinstance(each, partial) else None for each in found]

    all_of, none = [one, other], list[Package]()
    assert chosen((all_of, {"one": 1.5, "other": 1.4}), (all_of, {"one": 1.1, "other": 1.6})) == [one, one]
    assert chosen((all_of, {"one": 1.5, "other": 1.4}), (all_of, {"other": 1.6})) == [other, other], "one fails there"
    assert chosen((all_of, {"one": 1.2}), (all_of, {"one": 1.6})) == [None, None]
    assert chosen((none, {}), (all_of, {"one": 1.6})) == chosen((all_of, {"one": 1.6}), (none, {})) == [None, None]


def test_flashinfer_is_timed_only_with_its_compiled_modules(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a start would compile for minutes."""
    present = {"flashinfer", "triton"}
    attend = Counted()
    monkeypatch.setattr(packages, "has_package", lambda name: name in present)
    monkeypatch.setattr(long_chunks, "import_module", lambda _: SimpleNamespace(paged_attention=attend))
    with caplog.at_level(logging.INFO, long_chunks.__name__):
        assert long_chunks.installed((9, 0)) == []
    assert "flashinfer is not timed: without flashinfer-jit-cache" in caplog.text
    present.add("flashinfer_jit_cache")
    [found] = long_chunks.installed((9, 0))
    assert (found.name, found.takes_softcap) == ("flashinfer", False)


def test_package_without_capped_scores_leaves_them_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_chunks, "LONG", 35)
    package = Counted()
    check(long_case(LENGTHS, softcap=3.0), partial(long_chunks.paged_attention, Package("some", package, (32,), False)))
    assert not package.num_calls
