"""Compile kernels: killed, concurrent, for older CPUs, and without a compiler."""

import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from crossdock.kernels import attention
from crossdock.kernels.backend import CPP
from crossdock.kernels.cache import cache_dir
from crossdock.kernels.cpu import build
from tests.kernels.test_attention import MIXED, Case, check
from tests.sweeps import rest_in_soak

BUILD = """
from crossdock.kernels.cpu import build
build.FLAGS = ("-O0", *build.FLAGS[1:])
print(build.cpu_library("layer_steps").crossdock_add_and_norm != 0)
"""


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache directory, for this process and its children."""
    monkeypatch.setenv("CROSSDOCK_CACHE", str(tmp_path))
    _forget()
    yield cache_dir() / "kernels"
    _forget()


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile without optimising, which takes a third of the time."""
    monkeypatch.setattr(build, "FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in build.FLAGS))


@pytest.fixture
def small_library(empty_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The name of a library that compiles at once. It has the function `planned`."""
    (tmp_path / "small.cpp").write_text('extern "C" int planned() { return 1; }')
    monkeypatch.setattr(build, "__file__", str(tmp_path / "build.py"))  # beside which the sources are
    return "small"


def _forget() -> None:
    attention.cpp_library.cache_clear()
    attention.why_no_library.cache_clear()
    build.cpu_library.cache_clear()


def _start_build() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", BUILD], stdout=subprocess.PIPE, text=True, start_new_session=True)


needs_compiler = pytest.mark.skipif(not build.shutil.which("g++"), reason="needs a compiler: apt-get install g++")


@needs_compiler
@pytest.mark.usefixtures("quick_compiler")
def test_killed_build_does_not_break_next_build(empty_cache: Path) -> None:
    process = _start_build()
    deadline = time.monotonic() + 240
    while not list(empty_cache.glob("build-*/*")):  # until the compiler has begun to write
        assert process.poll() is None, "the build ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not list(empty_cache.glob("*.so"))
    assert list(empty_cache.glob("build-*"))
    assert build.cpu_library("layer_steps") is not None
    assert not list(empty_cache.glob("build-*"))


@needs_compiler
def test_build_removes_the_folders_that_old_builds_of_other_kernels_left(empty_cache: Path, small_library: str) -> None:
    """Those of other builds that run stay."""
    for name, age in (("old", 2 * build._LONGEST_BUILD_S), ("new", 0.0)):
        (folder := empty_cache / f"build-{name}-x").mkdir(parents=True)
        (folder / "kernel.o").write_bytes(b"half")
        os.utime(folder, (time.time() - age,) * 2)
    build.cpu_library(small_library)
    assert [folder.name for folder in empty_cache.glob("build-*")] == ["build-new-x"]


@needs_compiler
def test_concurrent_builds_all_succeed(empty_cache: Path) -> None:
    processes = [_start_build() for _ in range(2)]
    for process in processes:
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0
        assert output == "True\n"
    assert len(list(empty_cache.glob("*.so"))) == 1
    assert not list(empty_cache.glob("build-*"))


@needs_compiler
def test_library_that_another_user_may_have_written_is_compiled_again(
    empty_cache: Path, small_library: str, tmp_path: Path
) -> None:
    build.cpu_library(small_library)
    (library,) = empty_cache.glob("*.so")
    evil = tmp_path / "evil.so"
    subprocess.run(["g++", "-shared", "-x", "c++", "-", "-o", str(evil)], input=b"int planted;", check=True)
    for doubt in ("group", "others", "link", *(["owner"] if os.geteuid() == 0 else [])):
        library.unlink()
        if doubt == "link":
            library.symlink_to(evil)
        else:
            shutil.copy(evil, library)
            library.chmod({"group": 0o775, "others": 0o757}.get(doubt, 0o755))
        if doubt == "owner":
            os.chown(library, 12345, -1)
        _forget()
        assert build.cpu_library(small_library).planned, doubt
        assert not library.is_symlink()
        assert (library.stat().st_uid, library.stat().st_mode & 0o022) == (os.geteuid(), 0), doubt


@needs_compiler
def test_folder_of_libraries_is_closed_to_others_or_refused(empty_cache: Path, small_library: str) -> None:
    empty_cache.mkdir(parents=True, mode=0o777)
    empty_cache.chmod(0o777)
    build.cpu_library(small_library)
    assert empty_cache.stat().st_mode & 0o022 == 0
    if os.geteuid():
        pytest.skip("needs root, to give a folder to another user")
    os.chown(empty_cache, 12345, -1)
    _forget()
    with pytest.raises(OSError, match=r"user 12345 owns it.* name an own folder in CROSSDOCK_CACHE"):
        build.cpu_library(small_library)


@pytest.mark.parametrize(
    ("lacks", "reason"),
    [
        ("compiler", "no C++ compiler"),
        pytest.param("flags that it takes", "could not build attention.cpp", marks=needs_compiler),
        ("AVX2", "no AVX2"),
    ],
)
def test_machine_that_cannot_run_our_attention_runs_torch_and_logs_why_once(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lacks: str, reason: str
) -> None:
    if lacks == "compiler":
        monkeypatch.setenv("PATH", str(empty_cache))
        monkeypatch.delenv("CXX", raising=False)
    elif lacks == "AVX2":
        monkeypatch.setattr(attention, "cpu_flags", lambda: frozenset({"sse2"}))
    else:
        monkeypatch.setattr(build, "FLAGS", ("-march=no-such-cpu",))
    with caplog.at_level(logging.WARNING):
        check(Case(MIXED, dtype=torch.bfloat16), CPP.paged_attention)
        check(Case(MIXED), CPP.paged_attention)
    (record,) = caplog.records
    assert "plain torch" in record.getMessage()
    assert reason in record.getMessage()


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86 CPUs")
@pytest.mark.parametrize("level", rest_in_soak(["-O1", "-O3"], "-O1"))  # which compiles in a third of the time
@pytest.mark.parametrize("cpu", ["x86-64-v3", "x86-64"])  # AVX2; and vectors of 16 bytes, as on ARM
def test_portable_code_matches_longhand(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, cpu: str, level: str
) -> None:
    other = {"-march=native": f"-march={cpu}", "-O3": level}
    monkeypatch.setattr(build, "FLAGS", tuple(other.get(flag, flag) for flag in build.FLAGS))
    for dtype in (torch.float32, torch.bfloat16):
        for lengths in (MIXED, [(1, 1100), (3, 600)]):
            check(Case(lengths, q_heads=6, k_dim=40, v_dim=24, dtype=dtype), CPP.paged_attention)
            check(Case(lengths, dtype=dtype, window=30, softcap=4.0, sinks=True), CPP.paged_attention)
    library = attention.cpp_library()
    assert library is not None
    assert not library.crossdock_has_amx()
    assert len(list(empty_cache.glob("*.so"))) == 1
