"""A replica that sleeps gives its memory back, and its tokens after waking are those before."""

import ctypes
import gc
import mmap
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from pydantic import ByteSize
from torch import Tensor, nn

from crossdock.kernels.gpu import storage_memory
from crossdock.kernels.packed import PackedMatrix
from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.new_weights import NewWeights
from crossdock.workers.model.weights.fingerprint import fingerprint
from crossdock.workers.model.weights.packed_layers import put_linear
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.engine.sleep import Sleep, level_of
from crossdock.workers.replica.serving.metrics import EngineMetrics
from crossdock.workers.schedule.request.submission import Submission
from crossdock.workers.schedule.request.weight_version import WeightVersion
from tests.workers.model.layers.test_fusion import needs_native, needs_onednn, needs_rounding
from tests.workers.model.test_new_weights import saved
from tests.workers.replica.engines import engine_on, greedy, served, tiny_model
from tests.workers.replica.moving_memory import MovingMemory

PROMPTS = [[7, 3, 9, 11, 5], [20 + i for i in range(60)]]
SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2}
POOL = 4 << 20  # bytes
_LIBC = ctypes.CDLL(None)


def tokens(engine: Engine) -> list[list[int]]:
    return served(engine, PROMPTS, 8, weights=engine.scheduler.weights.id)


def state(engine: Engine) -> list[str]:
    """Return the states of sleep that vLLM's metric shows for an engine."""
    shown = EngineMetrics(engine).text("m")
    return re.findall(r'^vllm:engine_sleep_state\{.*sleep_state="(\w+)"\} 1.0', shown, re.MULTILINE)


def resident() -> int:
    """Return the bytes of all tensors of this process that are in memory, each memory once."""
    found, seen = 0, set[int]()
    for each in gc.get_objects():
        if type(each) not in (Tensor, nn.Parameter) or each.device.type != "cpu":
            continue
        if each.is_mkldnn:
            found += each.numel() * each.itemsize
        elif each.layout is torch.strided and (storage := each.untyped_storage()).data_ptr() not in seen:
            seen.add(storage.data_ptr())
            found += _in_memory(storage.data_ptr(), storage.nbytes())
    return found


def _in_memory(address: int, size: int) -> int:
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    num_pages = -(-(address + size - start) // mmap.PAGESIZE)
    states = (ctypes.c_ubyte * num_pages)()
    if not size or _LIBC.mincore(ctypes.c_void_p(start), ctypes.c_size_t(num_pages * mmap.PAGESIZE), states):
        return 0
    return sum(state & 1 for state in states) * mmap.PAGESIZE


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32", "cpu_kernels": "torch"},
        pytest.param({"dtype": "float32", "cpu_kernels": "onednn"}, marks=needs_onednn),
        pytest.param({"dtype": "bfloat16", "cpu_kernels": "native"}, marks=needs_native),
        pytest.param({"dtype": "bfloat16", "quantization": "int8"}, marks=needs_rounding),
    ],
    ids=["torch", "onednn", "native", "int8"],
)
def test_memory_falls_while_asleep_and_tokens_after_it_are_those_of_the_last_weights(
    options: dict[str, Any], tmp_path: Path
) -> None:
    path, other = (saved(tmp_path / f"{seed}", seed, head_dim=64, **SIZES) for seed in (1, 2))
    config = EngineConfig(kv_cache_memory=ByteSize(POOL))
    engine, fresh = (new_engine(load_model(ModelSpec(str(each), **options)), config) for each in (path, other))
    least = 2 * (2 * 256 * 256 + 3 * 256 * 768)  # bytes, of int8: each layer's matrices, of two
    before, sleep = tokens(engine), Sleep(engine, path, fingerprint(path))
    engine.model.pool.wait_for_memory()
    awake = resident()
    assert state(engine) == ["awake"]
    sleep.sleep(1)
    assert (sleep.lacks, state(engine)) == (["kv_cache"], ["weights_offloaded"])
    assert awake - resident() > 0.9 * POOL
    sleep.sleep(2)
    assert (sleep.lacks, state(engine)) == (["weights", "kv_cache"], ["discard_all"])
    assert awake - resident() > 0.9 * POOL + 0.9 * least
    for tags in (["weights"], ["weights", "kv_cache"]):
        sleep.read(tags)
        sleep.wake(tags)
        assert sleep.lacks == ["kv_cache"] * (len(tags) == 1)
    assert state(engine) == ["awake"]
    assert engine.pages.counts().cached == 0
    assert tokens(engine) == before
    sleep.sleep(2)
    update = engine.executor.new_weights
    assert update is not None
    update.call("read", {"folder": str(other)})
    update.put()
    engine.scheduler.change_weights(WeightVersion(1, fingerprint(other), "", str(other)))
    assert sleep.lacks == ["kv_cache"], "an update puts weights in place"
    sleep.sleep(2)
    sleep.read([])
    sleep.wake([])
    assert tokens(engine) == tokens(fresh) != before


def in_float32(path: Path) -> Engine:
    spec = ModelSpec(str(path), dtype="float32", attention_backend="torch")
    return new_engine(load_model(spec), EngineConfig(kv_cache_memory=ByteSize(POOL), max_num_seqs=8))


@pytest.mark.parametrize("level", [1, 2])
def test_gpu_gives_up_pages_and_weights_and_records_its_steps_again(
    level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "model", 1, head_dim=64, **SIZES)
    device = MovingMemory(monkeypatch)
    engine = in_float32(path)
    num_bytes = sum(each.nbytes for each in engine.model.module.parameters())
    num_recorded = device.num_recorded
    before, sleep = tokens(engine), Sleep(engine, path, fingerprint(path))
    assert device.num_replayed, "steps are recorded"
    awake = resident()
    sleep.sleep(level)
    assert (sleep.lacks, level_of(engine)) == (["weights", "kv_cache"], level)
    assert awake - resident() > 0.99 * (POOL + num_bytes)
    for tags in (["kv_cache"], ["weights"]):
        assert device.num_recorded == num_recorded
        sleep.read(tags)
        sleep.wake(tags)
    assert (sleep.lacks, device.num_recorded) == ([], 2 * num_recorded)
    device.num_replayed = 0
    assert tokens(engine) == before
    assert device.num_replayed
    sleep.wake([])
    assert device.num_recorded == 2 * num_recorded, "it was awake"


def test_gpu_whose_host_keeps_weights_can_lose_them_or_get_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = (saved(tmp_path / f"{seed}", seed) for seed in (1, 2))
    expected = tokens(in_float32(other))
    device = MovingMemory(monkeypatch)
    engine = in_float32(path)
    before, sleep, update = tokens(engine), Sleep(engine, path, fingerprint(path)), engine.executor.new_weights
    assert update is not None
    sleep.sleep(1)
    sleep.sleep(2)
    assert level_of(engine) == 2
    sleep.sleep(1)
    assert level_of(engine) == 2, "nothing has the weights"
    sleep.read([])
    sleep.wake([])
    assert tokens(engine) == before
    sleep.sleep(1)
    sleep.wake(["kv_cache"])
    update.call("read", {"folder": str(other)})
    update.put()
    sleep.record_steps()
    assert sleep.lacks == []
    device.num_replayed = 0
    assert tokens(engine) == expected != before
    assert device.num_replayed


def test_gpu_without_enough_memory_sleeps_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "model", 1)
    MovingMemory(monkeypatch)
    engine = in_float32(path)
    before, sleep = tokens(engine), Sleep(engine, path, fingerprint(path))
    allocate = storage_memory._allocate
    for level in (1, 2):
        sleep.sleep(level)
        for most, lacking in ((1, ["weights", "kv_cache"]), (engine.model.pool.tensor.nbytes - 1, ["kv_cache"])):

            def refuse(storage: torch.UntypedStorage, size: int, most: int = most) -> None:
                if size > most:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
                allocate(storage, size)

            monkeypatch.setattr(storage_memory, "_allocate", refuse)
            sleep.read([])
            with pytest.raises(ValueError, match=r"wake it again\. CUDA out of memory"):
                sleep.wake([])
            assert sleep.lacks == lacking
        monkeypatch.setattr(storage_memory, "_allocate", allocate)
        sleep.read([])
        sleep.wake([])
        assert tokens(engine) == before


def test_gpu_keeps_packed_weights_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Level 2 is refused for weights that an update could not replace."""
    MovingMemory(monkeypatch)
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8))
    codes = torch.randint(0, 256, (8, 4), dtype=torch.uint8)
    put_linear(module[1], PackedMatrix("int4", codes, torch.rand(8, 1), None, 8))
    tensors = [*module.state_dict().values(), *module[1].packed.tensors]
    contents = [tensor.clone() for tensor in tensors]
    weights = NewWeights(cast(Any, SimpleNamespace(module=module, device=codes.device)))
    weights.give_up(keeps=True)
    assert {tensor.untyped_storage().nbytes() for tensor in tensors} == {0}
    assert (weights.are_given_up, weights.are_kept) == (True, True)
    weights.take()
    assert (weights.are_given_up, weights.are_kept) == (False, False)
    for tensor, content in zip(tensors, contents, strict=True):
        assert torch.equal(tensor, content)


def test_sleep_that_is_impossible_is_refused_by_name() -> None:
    engine = engine_on(tiny_model(64), num_pages=16)
    sleep = Sleep(engine, None, "")
    for level, mode, reason in (
        (3, "wait", "level is 3; it must be 1"),
        (2, "wait", "level must be 1: the weights cannot be read again: they are in no file"),
        (1, "keep", "mode must be abort or wait"),
    ):
        with pytest.raises(ValueError, match=reason):
            sleep.check(level, mode)
    with pytest.raises(ValueError, match="tags has 'weight'; it may have weights, kv_cache"):
        sleep.read(["weight"])
    engine.add(Submission("kept", PROMPTS[0], greedy(8)))
    with pytest.raises(ValueError, match="mode must be abort or wait"):
        sleep.sleep(1)
    assert sleep.lacks == []


def test_weights_that_are_in_no_file_as_they_were_stay_given_up(tmp_path: Path) -> None:
    path = saved(tmp_path / "model", 1)
    engine = new_engine(load_model(ModelSpec(str(path), dtype="float32")), EngineConfig(kv_cache_memory=ByteSize(POOL)))
    sleep = Sleep(engine, path, fingerprint(path))
    sleep.sleep(2)
    saved(path, 2)
    with pytest.raises(ValueError, match="has other weights than before"):
        sleep.read([])
    assert sleep.lacks == ["weights", "kv_cache"]
    sleep.read(["kv_cache"])
    sleep.wake(["kv_cache"])
    assert sleep.lacks == ["weights"], "pages alone were asked for; the weights that were read are others"
    engine.scheduler.change_weights(WeightVersion(1, "pushed", "1", ""))
    with pytest.raises(ValueError, match="a trainer has pushed them"):
        sleep.check(2)
