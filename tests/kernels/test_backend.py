"""Which attention is chosen for which device, and which reason is logged."""

import importlib.util
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from crossdock.kernels import backend, packages
from crossdock.kernels.backend import TORCH, choose_attention
from crossdock.kernels.options import AttentionBackend

from .test_attention import MIXED, Case, check

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


def longhand(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: list[int], pages: Tensor, options: dict[str, Any]
) -> Tensor:
    """Check arguments as both packages do, and return the attention that either computes."""
    assert q.shape[2] == v.shape[3]
    assert q.shape[2] % 8 == 0
    assert k.stride(3) == v.stride(3) == q.stride(2) == 1
    assert starts.dtype == pages.dtype == torch.int32
    assert options["causal"]
    left, right = options["window_size"]
    assert right == (0 if left >= 0 else -1)
    out = q.new_empty(q.shape)
    for s, table in enumerate(pages.long()):
        length = lengths[s]
        keys, values = (x[table].flatten(0, 1)[:length].transpose(0, 1) for x in (k, v))  # [Hkv, L, D]
        rows = q[starts[s] : starts[s + 1]].transpose(0, 1)
        distance = torch.arange(length - rows.shape[1], length)[:, None] - torch.arange(length)
        visible = (distance >= 0) & (distance <= (left if left >= 0 else length))
        group = q.shape[1] // k.shape[2]
        scores = rows @ keys.repeat_interleave(group, 0).transpose(1, 2) * options["softmax_scale"]
        if options["softcap"]:
            scores = options["softcap"] * torch.tanh(scores / options["softcap"])
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        out[starts[s] : starts[s + 1]] = (weights @ values.repeat_interleave(group, 0)).transpose(0, 1)
    return out


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Replace both packages by ones that check their arguments, as csrc/flash_attn/flash_api.cpp of 2.8 and
    hopper/flash_api.cpp of 3 do, and compute attention.

    Gives the options of every call.
    """
    calls: list[dict[str, Any]] = []

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: Tensor,
        kv_starts: Tensor,
        longest: int,
        longest_kv: int,
        *,
        block_table: Tensor,
        **options: Any,
    ) -> Tensor:
        assert k.shape[1] % 256 == 0
        assert kv_starts.dtype == torch.int32
        lengths = kv_starts.diff().tolist()
        assert (longest, longest_kv) == (int(starts.diff().max()), max(lengths))
        calls.append({**options, "kv_starts": kv_starts})
        return longhand(q, k, v, starts, lengths, block_table, options)

    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        cache_seqlens: Tensor,
        page_table: Tensor,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int,
        **options: Any,
    ) -> Tensor:
        assert cache_seqlens.dtype == torch.int32
        assert cache_seqlens.is_contiguous()
        assert cu_seqlens_q.is_contiguous()
        assert page_table.stride(1) == 1
        assert page_table.shape[0] == len(cache_seqlens) == len(cu_seqlens_q) - 1
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
        assert set(options) <= {"softmax_scale", "causal", "window_size", "softcap"}
        calls.append(options)
        return longhand(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens.tolist(), page_table, options)

    def of_version_4(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        seqused_k: Tensor,
        max_seqlen_q: int,
        page_table: Tensor,
        **options: Any,
    ) -> tuple[Tensor, None]:
        assert seqused_k.dtype == torch.int32
        assert cu_seqlens_q.is_contiguous()
        assert seqused_k.is_contiguous()
        assert page_table.stride(1) == 1
        assert page_table.shape[0] == len(seqused_k) == len(cu_seqlens_q) - 1
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
        assert set(options) <= {"softmax_scale", "causal", "window_size", "softcap"}
        assert all(stride * x.itemsize % 16 == 0 for x in (k, v) for stride in x.stride()[:-1]), (
            "else it copies the pool"
        )
        calls.append(options)
        return longhand(q, k, v, cu_seqlens_q, seqused_k.tolist(), page_table, options), None

    module: Any = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute := ModuleType("flash_attn.cute"))
    cute.__dict__["flash_attn_varlen_func"] = of_version_4
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    module = ModuleType("flash_attn_interface")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    has_package = packages.has_package
    names = ("flash_attn", "flash_attn_interface", "flash_attn.cute")
    monkeypatch.setattr(packages, "has_package", lambda package: package in names or has_package(package))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    yield calls
    for name in ("flash_attention", "flash_attention_3", "flash_attention_4"):
        sys.modules.pop(f"crossdock.kernels.gpu.{name}", None)


class Planned:
    """In place of FlashInfer's two wrappers over pages: checks the arguments that 0.6 takes, and computes attention."""

    plans: list[dict[str, Any]]

    def __init__(self, workspace: Tensor, kv_layout: str, use_tensor_cores: bool = False) -> None:
        assert (workspace.dtype, kv_layout) == (torch.uint8, "HND")
        self._is_decode = use_tensor_cores

    def plan(self, *given: Any, **options: Any) -> None:
        starts, indptr, indices, last, num_heads, num_kv_heads, dim, page_size = (
            (torch.arange(len(given[0]), dtype=torch.int32), *given) if self._is_decode else given
        )
        assert self._is_decode or options.pop("causal")
        assert all(each.dtype == torch.int32 and not each.is_cuda for each in (starts, indptr, indices, last))
        assert len(indptr) == len(starts) == len(last) + 1
        assert indptr[-1] == len(indices)
        assert ((last >= 1) & (last <= page_size)).all()
        assert options["q_data_type"] == options["kv_data_type"] == torch.float32
        self.plans.append(options)
        self._shape, self._starts, self._options = (num_heads, num_kv_heads, dim, page_size), starts, options
        counts = indptr.diff().tolist()
        self._tables = torch.nn.utils.rnn.pad_sequence(list(indices.split(counts)), batch_first=True)
        self._lengths = ((indptr.diff() - 1) * page_size + last).tolist()

    def run(self, q: Tensor, pages: tuple[Tensor, Tensor], *, out: Tensor) -> None:
        k, v = (each.transpose(1, 2) for each in pages)
        assert (q.shape[1], k.shape[2], q.shape[2], k.shape[1]) == self._shape
        left, asked = self._options["window_left"], self._options
        options = {"causal": True, "window_size": (left, 0 if left >= 0 else -1), "softmax_scale": asked["sm_scale"]}
        options["softcap"] = asked["logits_soft_cap"]
        out.copy_(longhand(q, k, v, self._starts, self._lengths, self._tables, options))


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Replace the package by `Planned`. Gives the options of every plan."""
    if not importlib.util.find_spec("triton"):
        pytest.skip("needs Triton: pip install triton")
    module: Any = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = module.BatchDecodeWithPagedKVCacheWrapper = Planned
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(Planned, "plans", plans := list[dict[str, Any]](), raising=False)
    has_package = packages.has_package
    monkeypatch.setattr(packages, "has_package", lambda package: package == "flashinfer" or has_package(package))
    yield plans
    sys.modules.pop("crossdock.kernels.gpu.flashinfer_attention", None)


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(packages, "has_package", lambda package: package not in names)


def test_auto_on_cpu_is_cpp_kernel_and_logs_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, backend.__name__):
        assert choose_attention("auto", CPU).name == "cpp"
    assert caplog.messages == ["attention runs in cpp: the device is a CPU"]
    assert choose_attention("torch", CPU) is TORCH


def test_auto_on_gpu_is_triton(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("triton", reason="needs Triton: pip install triton")
    with caplog.at_level(logging.INFO, backend.__name__):
        assert choose_attention("auto", CUDA).name == "triton"
    assert caplog.messages == ["attention runs in triton: the device is cuda:0"]


def test_auto_on_gpu_without_triton_is_torch_with_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without(monkeypatch, "triton", "flash_attn")
    assert choose_attention("auto", CUDA) is TORCH
    assert caplog.messages == ["attention runs in plain torch, many times slower: triton is not installed"]


def test_backend_that_cannot_run_is_refused_with_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "triton", "flash_attn")
    with pytest.raises(ValueError, match="attention_backend triton: the package triton is not installed"):
        choose_attention("triton", CUDA)
    with pytest.raises(ValueError, match="attention_backend flash_attn: the package flash_attn is not installed"):
        choose_attention("flash_attn", CUDA)
    without(monkeypatch)
    monkeypatch.setattr(packages, "triton_is_interpreted", lambda: False)
    with pytest.raises(ValueError, match="attention_backend triton needs a GPU, and the model is on a CPU"):
        choose_attention("triton", CPU)


FLASH: list[AttentionBackend] = ["flash_attn", "flash_attn_3"]


@pytest.mark.parametrize("shape", [{}, {"window": 24}, {"softcap": 3.0}, {"q_heads": 9, "kv_heads": 3}], ids=str)
@pytest.mark.parametrize("name", FLASH)
def test_flash_attn_gets_valid_arguments_and_matches_longhand(
    flash_attn: list[dict[str, Any]], name: AttentionBackend, shape: dict[str, Any], seed: int
) -> None:
    chosen = choose_attention(name, CUDA)
    case = Case(MIXED, page_size={"flash_attn": 256, "flash_attn_3": 16}[name], seed=seed, **shape)
    assert case.page_size % chosen.page_multiple == 0
    case.pool.zero_()  # the replacement multiplies masked elements too
    check(case, chosen.paged_attention)
    assert len(flash_attn) == 1


@pytest.mark.parametrize("shape", [{}, {"window": 24}, {"softcap": 3.0}, {"q_heads": 9, "kv_heads": 3}], ids=str)
def test_flash_attn_4_gets_valid_arguments_and_matches_longhand(
    flash_attn: list[dict[str, Any]], shape: dict[str, Any], seed: int
) -> None:
    pytest.importorskip("triton", reason="needs Triton: pip install triton")
    from crossdock.kernels.gpu import long_chunks

    (package,) = (each for each in long_chunks.installed((9, 0)) if each.name == "flash_attn_4")
    case = Case([(3, 20), (40, 90), (17, 17)], seed=seed, **shape)
    case.pool.zero_()  # the replacement multiplies masked elements too
    check(case, package.paged_attention)
    assert len(flash_attn) == 1
    assert [each.name for each in long_chunks.installed((9, 0))] == ["flash_attn_3", "flash_attn_4"]
    assert [each.name for each in long_chunks.installed((10, 0))] == ["flash_attn_4"]
    assert not long_chunks.installed((8, 9)), "its kernels read no pages before Hopper"


def test_folder_that_holds_packages_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn-4 leaves a folder `flash_attn` without a file of its own."""
    (tmp_path / "holds_packages" / "cute").mkdir(parents=True)
    (tmp_path / "holds_packages" / "cute" / "__init__.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not packages.has_package("holds_packages")
    assert packages.has_package("holds_packages.cute")
    assert not packages.has_package("holds_packages.other")
    assert not packages.has_package("no_such_package.cute")
    assert packages.has_package("torch")


@pytest.mark.parametrize("shape", [{}, {"window": 24}, {"softcap": 3.0}, {"q_heads": 9, "kv_heads": 3}], ids=str)
def test_flashinfer_is_planned_once_for_layers_that_are_alike_and_matches_longhand(
    flashinfer: list[dict[str, Any]], shape: dict[str, Any], seed: int
) -> None:
    chosen = choose_attention("flashinfer", CUDA)
    case = Case(MIXED, page_size=16, seed=seed, k_dim=64, v_dim=64, **shape)
    case.pool.zero_()  # the replacement multiplies masked elements too
    case.batch.on_host = case.batch.query_start, case.batch.kv_len
    for _ in range(3):
        check(case, chosen.paged_attention)
    assert len(flashinfer) == 2, "of decodes, and of chunks"


def test_steps_of_graphs_beside_flashinfer_run_in_triton(flashinfer: list[dict[str, Any]], seed: int) -> None:
    chosen = choose_attention("flashinfer", CUDA)
    case = Case([(1, 9), (3, 20)], page_size=16, seed=seed, k_dim=64, v_dim=64)
    check(case, chosen.paged_attention)
    assert not flashinfer


@pytest.mark.parametrize(
    ("shape", "reason"),
    [({"sinks": True}, "takes no attention sinks"), ({"k_dim": 96, "v_dim": 96}, "head sizes 64, 128 and 256, not 96")],
    ids=str,
)
def test_flashinfer_with_unsupported_heads_is_refused(
    flashinfer: list[dict[str, Any]], shape: dict[str, Any], reason: str
) -> None:
    case = Case([(1, 9)], **shape)
    chosen = choose_attention("flashinfer", CUDA)
    with pytest.raises(ValueError, match=f"attention_backend flashinfer .*{reason}"):
        chosen.paged_attention(case.q, case.k_pages, case.v_pages, case.batch, **case.arguments())
    with pytest.raises(ValueError, match="kv_cache_dtype fp8: attention_backend flashinfer takes no such pages"):
        choose_attention("flashinfer", CUDA, "fp8")
    assert not flashinfer


def test_flash_attn_sums_the_contexts_once_for_all_layers(flash_attn: list[dict[str, Any]]) -> None:
    case = Case(MIXED, page_size=256)
    chosen = choose_attention("flash_attn", CUDA)
    for _ in range(3):
        chosen.paged_attention(case.q, case.k_pages, case.v_pages, case.batch, **case.arguments())
    assert len({id(call["kv_starts"]) for call in flash_attn}) == 1


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"sinks": True}, "takes no attention sinks"),
        ({"k_dim": 48}, "keys and values of one size up to 256, not 48 and 32"),
        ({"k_dim": 512, "v_dim": 512}, "not 512 and 512"),
        ({"k_dim": 100, "v_dim": 100}, "takes head sizes that are multiples of 8, not 100"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", FLASH)
def test_flash_attn_with_unsupported_heads_is_refused(
    flash_attn: list[dict[str, Any]], name: AttentionBackend, shape: dict[str, Any], reason: str
) -> None:
    case = Case([(1, 9)], page_size=256, **shape)
    chosen = choose_attention(name, CUDA)
    with pytest.raises(ValueError, match=f"attention_backend {name} .*{reason}"):
        chosen.paged_attention(case.q, case.k_pages, case.v_pages, case.batch, **case.arguments())
    assert not flash_attn


def test_flash_attn_3_without_package_or_hopper_is_refused(
    flash_attn: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(ValueError, match="attention_backend flash_attn_3 needs a Hopper GPU"):
        choose_attention("flash_attn_3", CUDA)
    without(monkeypatch, "flash_attn_interface")
    with pytest.raises(ValueError, match="flash_attn_3: the package flash_attn_interface is not installed"):
        choose_attention("flash_attn_3", CUDA)
    assert not flash_attn


def test_fp8_pages_are_read_only_by_torch_and_triton(
    flash_attn: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, backend.__name__):
        assert choose_attention("auto", CPU, "fp8") is TORCH
    assert caplog.messages == ["attention runs in plain torch, several times slower: our C++ takes no fp8 pages"]
    for name in FLASH:
        with pytest.raises(ValueError, match=f"kv_cache_dtype fp8: attention_backend {name} takes no such pages"):
            choose_attention(name, CUDA, "fp8")
    assert not flash_attn
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton: pip install triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert choose_attention("auto", CUDA, "fp8").name == "triton"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(ValueError, match=r"kv_cache_dtype fp8: Triton has e4m3 on GPUs of compute capability 8\.9"):
        choose_attention("auto", CUDA, "fp8")
    assert choose_attention("torch", CUDA, "fp8") is TORCH
