"""Children whose decoder or compiler runs foreign code, in every kind of sandbox: what they reach, what stays."""

import platform
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from crossdock.cluster.api.media.processes import LIMITS
from crossdock.workers.model.grammar.compiler import LIMITS as GRAMMAR_LIMITS
from crossdock.workers.sandbox.sandbox import Sandbox
from crossdock.workers.sandbox.system_calls import can_filter
from tests.cluster.api.media.picture_models import encoded, picture, process_settings
from tests.waiting import eventually
from tests.workers.sandbox.taken_over import ATTACKS, MARK

MODULE = "tests.workers.sandbox.taken_over"
KINDS = ("image", "video", "grammar")
HARMLESS = {"environment", "descriptors", "thread"}
REFUSED = sorted(ATTACKS.keys() - HARMLESS - {"fork and hold the pipe"})

pytestmark = pytest.mark.skipif(not can_filter(), reason="needs a kernel that filters system calls")
on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86_64, whose numbers of calls it names")


def new_sandbox(kind: str, folder: Path, wall_seconds: float = 20.0, **environment: str) -> Sandbox:
    given = process_settings("qwen2_vl", folder) | {"kind": kind, "sampling": {}}
    if kind == "grammar":
        given = {"tokenizer": (folder / "tokenizer.json").read_text(), "eos_token_ids": [0]}
    limits = replace(GRAMMAR_LIMITS if kind == "grammar" else LIMITS[kind], wall_seconds=wall_seconds)
    named = {"KIND": kind, "FOLDER": str(folder), "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", **environment}
    return Sandbox(MODULE, given, title=kind, limits=limits, environment=named)


@pytest.fixture(scope="module", params=KINDS)
def sandbox(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HF_TOKEN", "secret")
        sandbox = new_sandbox(request.param, tmp_path_factory.mktemp(request.param))
        sandbox.start()
    yield sandbox
    sandbox.end()


def question(text: str) -> Mapping[str, Any]:
    """Return a question that all kinds understand."""
    return {"data": text.encode(), "detail": "auto", "kind": "regex", "source": text}


def tried(sandbox: Sandbox, name: str) -> str:
    return str(sandbox.ask(question(MARK + name))["error"])


@on_x86
def test_child_that_asks_the_kernel_for_more_than_to_compute_is_refused(sandbox: Sandbox) -> None:
    found = {name: tried(sandbox, name) for name in REFUSED}
    assert found == {
        **dict.fromkeys(REFUSED, "EPERM"),
        "higher limits": "not allowed to raise maximum limit",
        "process by struct": "ENOSYS",
    }


def test_child_has_no_secret_no_descriptor_but_its_pipe_and_may_have_threads(sandbox: Sandbox) -> None:
    environment = tried(sandbox, "environment")
    assert "PYTHONPATH" in environment
    assert "HF_TOKEN" not in environment
    assert tried(sandbox, "descriptors") == str(["null", "null", "null", "pipe"])
    assert tried(sandbox, "thread") == "done"


@pytest.mark.parametrize("sandbox", ["image", "grammar"], indirect=True)
def test_memory_of_a_sandbox_has_nothing_of_an_earlier_question_or_answer(sandbox: Sandbox) -> None:
    """Every child is a copy of this memory."""
    text = "of another tenant: " + secrets.token_hex(50_000)
    assert tried(sandbox, text) == text
    assert tried(sandbox, "next") == "next"
    parts = [text[start : start + 32].encode() for start in range(0, len(text) - 32, 3001)]
    assert sandbox.pid is not None
    memory = b"".join(readable_memory(sandbox.pid))
    assert MARK.encode() in memory
    assert [part for part in parts if part in memory] == []


def readable_memory(pid: int) -> Iterator[bytes]:
    """Yield a process's own memory, without files."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            start, end = (int(at, 16) for at in line.split()[0].split("-"))
            if line.split()[1].startswith("rw"):
                memory.seek(start)
                with suppress(OSError):  # a file's, beyond its end
                    yield memory.read(end - start)


@pytest.mark.parametrize("is_filtered", [True, False])
def test_process_that_a_child_left_behind_with_its_pipe_ends_and_delays_no_answer(
    is_filtered: bool, tmp_path: Path
) -> None:
    others = {} if is_filtered else {"UNFILTERED": "1"}
    sandbox = new_sandbox("grammar", tmp_path, 1.0, **others)
    sandbox.first_answer()
    before = sandbox.pid
    asked = sandbox.ask(question(MARK + "fork and hold the pipe"))
    assert asked == (
        {"error": "EPERM"} if is_filtered else {"reason": "it cannot be compiled within this server's limits"}
    )
    eventually(lambda: left_behind(sandbox, tmp_path) == [], "a process outlives its question")
    assert tried(sandbox, "next") == "next"
    assert sandbox.pid == before
    if not is_filtered:
        assert (tried(sandbox, "file"), tried(sandbox, "socket")) == ("EMFILE", "EMFILE")
    sandbox.end()


def left_behind(sandbox: Sandbox, folder: Path) -> list[int]:
    """Return the processes that have the environment of a sandbox and are not its own."""
    found = {each.pid for each in psutil.process_iter(["environ"]) if _folder(each) == str(folder)}
    assert sandbox.pid in found
    return sorted(found - {sandbox.pid})


def _folder(process: psutil.Process) -> str | None:
    environment: dict[str, str] = process.info["environ"] or {}
    return environment.get("FOLDER")


@pytest.mark.parametrize("sandbox", ["image"], indirect=True)
def test_picture_of_every_accepted_format_is_prepared_without_files(sandbox: Sandbox) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    files = {
        f"PNG {mode}": encoded(Image.new(mode, (60, 40)), "PNG") for mode in ("RGB", "RGBA", "P", "L", "1", "I;16")
    }
    files |= {f"JPEG {mode}": encoded(picture(60, 40, mode=mode), "JPEG") for mode in ("RGB", "L", "CMYK")}
    files |= {f"turned {kind}": encoded(picture(60, 40), kind, exif=turned) for kind in ("PNG", "JPEG", "WEBP")}
    frames = {"save_all": True, "append_images": [picture(60, 40, 1)]}
    files |= {f"moving {kind}": encoded(picture(60, 40), kind, **frames) for kind in ("GIF", "WEBP")}
    found = {name: sandbox.ask({"data": data, "detail": "low"}).get("error", "") for name, data in files.items()}
    assert found == dict.fromkeys(files, "")
