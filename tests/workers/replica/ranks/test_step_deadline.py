"""A step that does not end is reported by the host, while the thread that waits for it returns from no call."""

import queue
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import ByteSize

from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.ranks.step_deadline import StepDeadline
from crossdock.workers.replica.ranks.worker_group import WorkerGroup
from crossdock.workers.schedule.cost.cost import StepWork
from crossdock.workers.schedule.request.submission import SamplingParams, Submission
from tests.workers.architectures import build
from tests.workers.worker_groups import spec_of

SWEEP = [(StepWork.of([(0, tokens)]), 0.01) for tokens in (16, 32, 64)]


def engine(step_deadline: Callable[[], StepDeadline] | None = None) -> Engine:
    config = EngineConfig(max_num_batched_tokens=80, max_num_seqs=8, kv_cache_memory=ByteSize(8 << 20))
    return new_engine(wrap_module(build("llama", {})), config, step_deadline=step_deadline)


def test_time_counts_from_the_last_end_while_steps_are_in_flight() -> None:
    now = 100.0
    deadline = StepDeadline(60.0, lambda: None, lambda: now)
    assert deadline.left() is None
    deadline.begin()
    now += 40
    deadline.begin()
    assert deadline.left() == 20
    deadline.end()
    assert deadline.left() == 60
    now += 10
    assert deadline.left() == 50
    deadline.end()
    now += 1000
    assert deadline.left() is None
    deadline.begin()
    assert deadline.left() == 60


def test_worker_group_whose_step_does_not_end_is_lost_with_the_reason(tmp_path: Path) -> None:
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    worker_group = WorkerGroup(spec_of(tmp_path, 2, 1, rank_timeout_s=0.05), "127.0.0.1", lost.put)
    try:
        deadline = worker_group.step_deadline()
        deadline.begin()
        assert lost.get(timeout=240) == "a rank hangs: no step has ended for 0.05 s"
        worker_group.fail(RuntimeError("the driver's own part failed, too"))
        assert lost.empty(), "reported once"
    finally:
        worker_group.close()


def test_engine_reports_a_step_during_which_the_device_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, released, late = threading.Event(), threading.Event(), threading.Event()
    running = engine()

    def wait(_: LoadedModel) -> None:
        stuck.set()
        released.wait()

    monkeypatch.setattr(LoadedModel, "wait", wait)
    running.pipeline.deadline = StepDeadline(0.05, late.set)
    running.add(Submission("a", [5] * 9, SamplingParams(max_tokens=1)))
    thread = threading.Thread(target=running.step)
    thread.start()
    try:
        assert stuck.wait(240)
        assert late.wait(240)
    finally:
        released.set()
        thread.join()
    assert running.pipeline.deadline.left() is None


def test_only_replicas_on_gpus_have_a_deadline_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one rank too. On CPUs gloo's calls return with an error in time, which says more."""
    on_gpu = property(lambda _: torch.device("cuda"))
    alone = engine()
    watched = engine(lambda: StepDeadline(60.0, lambda: None))
    for running, device, has_deadline in ((alone, on_gpu, False), (watched, None, False), (watched, on_gpu, True)):
        with monkeypatch.context() as patch:
            if device is not None:
                patch.setattr(LoadedModel, "device", device)
            running.calibrate(SWEEP)
        assert (running.pipeline.deadline is not None) is has_deadline
    before = running.pipeline.deadline
    with monkeypatch.context() as patch:
        patch.setattr(LoadedModel, "device", on_gpu)
        running.calibrate(SWEEP)
    assert running.pipeline.deadline is before
