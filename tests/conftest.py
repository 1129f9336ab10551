"""One environment, one home directory, one converted model and one Ray for all tests."""

import contextlib
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
from hypothesis import settings

from tests import file_seconds, less_work, limits, slowness, soak
from tests.own_folders import make_own_folders, share_kernels, written_home

# The same examples in every run: a change is refused for what it does. `--hypothesis-profile=random` looks for others.
settings.register_profile("crossdock", deadline=None, derandomize=True)  # a loaded machine is slow: no deadline
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile("crossdock")

HOME = make_own_folders()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Name the event loop of tests that are coroutines."""
    return "asyncio"


def pytest_configure(config: pytest.Config) -> None:
    for plugin in (limits, file_seconds, less_work, soak, slowness):
        config.pluginmanager.register(plugin)


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None]:
    yield
    if "CROSSDOCK_TESTS_PURE" in os.environ and (loaded := {"torch", "transformers", "ray"} & sys.modules.keys()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\nFAILED: a test of pure rooms imported {', '.join(loaded)}")  # noqa: T201, for who runs tests
    share_kernels()
    if written := written_home(HOME):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\nFAILED: tests wrote into the home directory: {', '.join(written)}")  # noqa: T201, for who runs tests


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None]:
    """List at the very end what was not tested because something is not installed: reasons that open with "needs"."""
    yield
    reasons = [report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped")]
    for reason, count in Counter(reason for reason in reasons if reason.startswith("needs")).items():
        terminalreporter.write_line(f"hole: {count} skipped: {reason}", yellow=True)


@pytest.fixture
def dots_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter multiply as tensor cores do: a row's bits do not follow from its place in a tile.

    NumPy's BLAS computes rows by vectors, and those at some places by other instructions.
    """
    import numpy as np  # not before the environment is set
    from triton.runtime import interpreter  # Triton is not on every machine

    def dot(_: Any, a: Any, b: Any, sums: Any, *_others: Any) -> Any:
        product = np.einsum("mk,kn->mn", a.data.astype(np.float32), b.data.astype(np.float32))  # loops, no BLAS
        return interpreter.TensorHandle(product + sums.data, sums.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The embedded model, converted on first use."""
    from crossdock.workers.model.weights.checkpoint import default_model_dir

    return default_model_dir()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A light Ray, with Serve's own start left to the tests. Asserts at the end that nothing outlives it."""
    import ray
    from ray.serve._private import client

    from crossdock.cluster.serve.own_ray.ray_processes import without_unused_processes
    from tests.forked_workers import forked_workers

    temp_dir = tempfile.mkdtemp(prefix="cd-ray-", dir="/tmp")  # short: unix socket paths end at 107 bytes
    limits.FOLDERS.append(temp_dir)
    shared_memory = _shared_memory()
    looks_often = patch.object(client, "CLIENT_POLLING_INTERVAL_S", 0.1)  # `serve.run` looks once a second
    with forked_workers(Path(temp_dir)) as forking, looks_often:
        with without_unused_processes():
            ray.init(
                address="local",
                num_cpus=64,  # tests ask for more than the machine has; nothing is pinned
                include_dashboard=False,
                object_store_memory=75 << 20,
                log_to_driver=False,
                _temp_dir=temp_dir,
            )
        limits.take_signals()  # Ray's own handler of SIGTERM raises SystemExit, which fails one test alone
        yield
        from ray import serve

        serve.shutdown()
        workers = psutil.Process(forking).children()
        processes = _processes(temp_dir) + psutil.Process(forking).children(recursive=True)
        ray.shutdown()
        for worker in workers:  # a raylet kills the workers that it has started itself
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()
        _, alive = psutil.wait_procs(processes, timeout=240)
    assert not alive, f"these outlived Ray: {alive}"
    assert _shared_memory() <= shared_memory, "segments outlived Ray in /dev/shm"
    shutil.rmtree(temp_dir)


def _processes(temp_dir: str) -> list[psutil.Process]:
    """Ray's daemons, known by the session directory on their command lines, and all their children."""
    processes = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # ended since it was listed, or a zombie
            if any(temp_dir in part for part in child.cmdline()):
                processes += [child, *child.children(recursive=True)]
    return processes


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("crossdock")}
