"""A sandbox: what its children may take, and what a caller sees when a child, the process or the caller ends."""

import io
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any, BinaryIO

import msgpack
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.workers.sandbox import sandbox as sandbox_module
from crossdock.workers.sandbox.interruption import Interruption
from crossdock.workers.sandbox.limited_child import Limits
from crossdock.workers.sandbox.messages import INTERRUPT, pack, read_message, unpack, write_message
from crossdock.workers.sandbox.sandbox import Sandbox, SandboxBusy, SandboxInterrupted
from tests.waiting import eventually

LIMITS = Limits(cpu_seconds=0.3, wall_seconds=100.0, memory_bytes=256 << 20)


def new_sandbox(limits: Limits = LIMITS, **settings: Any) -> Sandbox:
    module = "tests.workers.sandbox.echo_process"
    return Sandbox(module, settings, title="the process of echoes", limits=limits)


@pytest.fixture(scope="module")
def shared() -> Iterator[Sandbox]:
    sandbox = new_sandbox()
    yield sandbox
    sandbox.end()


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    sandbox = new_sandbox()
    yield sandbox
    sandbox.end()


def echo(sandbox: Sandbox, text: str = "a") -> dict[str, Any]:
    return sandbox.ask({"what": "echo", "text": text})


@pytest.mark.parametrize(
    ("what", "failed"),
    [
        ("run for ever", ["is_too_slow"]),
        ("fill the memory", ["is_too_large"]),
        ("overflow the stack", ["is_too_deep"]),
        ("raise", []),
    ],
)
def test_child_that_fails_ends_alone(what: str, failed: list[str], shared: Sandbox) -> None:
    shared.start()
    before = shared.pid
    assert shared.ask({"what": what}) == {"failed": failed}
    assert echo(shared)["echo"] == "a"
    assert shared.pid == before


def test_every_answer_comes_from_another_child(shared: Sandbox) -> None:
    first = shared.first_answer()
    assert first is not None
    assert len({first["pid"], shared.pid, echo(shared)["pid"], echo(shared)["pid"]}) == 3
    assert first["pid"] == shared.pid


def test_child_that_waits_too_long_without_computing_is_busy() -> None:
    sandbox = new_sandbox(Limits(cpu_seconds=5.0, wall_seconds=0.2, memory_bytes=256 << 20))
    with pytest.raises(SandboxBusy, match="not enough time"):
        sandbox.ask({"what": "wait for ever"})
    sandbox.end()


def test_text_of_any_kind_arrives_as_sent(shared: Sandbox) -> None:
    text = "\0 é \ud800 𝄞"  # JSON of a client may hold a lone surrogate
    assert echo(shared, text)["echo"] == text


_NUMBERS = st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
_VALUES = st.recursive(
    st.none() | _NUMBERS | st.text(st.characters(codec=None)) | st.binary(),
    lambda values: st.lists(values) | st.dictionaries(st.text(st.characters(codec=None)), values),
)


def others_read(body: bytes) -> Any:
    """Read a message by another library. Extensions: 1 is a text with lone surrogates, 2 a mapping as its pairs."""
    hooks = {1: lambda data: data.decode("utf-8", "surrogatepass"), 2: lambda data: dict(others_read(data))}
    return msgpack.unpackb(body, ext_hook=lambda kind, data: hooks[kind](data))


@given(_VALUES)
def test_message_unpacks_as_it_was_packed_and_is_msgpack_to_others(value: Any) -> None:
    packed = pack(value)
    assert unpack(packed) == value
    assert others_read(packed) == value


def test_lone_surrogate_may_be_the_key_of_a_mapping_in_a_mapping() -> None:
    message = {"tools": [{"\ud800": {"\udfff": "\ud834", "plain": 1}}], "rest": "é"}
    assert unpack(pack(message)) == message == others_read(pack(message))


@pytest.mark.parametrize("leaf", ["plain", "\ud800"])
def test_message_that_is_nested_too_deeply_is_a_value_error(leaf: str) -> None:
    message: Any = leaf
    for _ in range(100_000):
        message = [message]
    with pytest.raises(ValueError, match="too deeply"):
        pack(message)


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\xa1\xff", b"\xc7\x01\x03a", b"\xc7\x01\x01\xff", b"\x91" * 100_000 + b"\xc0"]
)
def test_bytes_that_are_no_message_are_a_value_error(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"truncated|invalid opcode|decode byte|extension 3|too deeply"):
        unpack(body)


def test_process_that_ends_between_questions_is_replaced(sandbox: Sandbox) -> None:
    first = echo(sandbox)
    assert sandbox.pid is not None
    os.kill(sandbox.pid, signal.SIGKILL)
    second = echo(sandbox)
    assert second["echo"] == first["echo"]


@pytest.mark.parametrize("what", ["end the process", "write no message"])
def test_question_that_ends_the_process_twice_is_busy_and_the_next_is_answered(what: str, sandbox: Sandbox) -> None:
    with pytest.raises(SandboxBusy, match="ended twice"):
        sandbox.ask({"what": what})
    assert echo(sandbox)["echo"] == "a"


def test_answer_that_is_not_read_to_its_end_is_no_answer_to_the_next_question(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox.first_answer()

    def lack_memory(_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(sandbox_module, "read_message", lack_memory)
        with pytest.raises(MemoryError):
            echo(sandbox, "a")
    assert echo(sandbox, "b")["echo"] == "b"


@pytest.mark.parametrize("what", ["run for ever", "wait for ever"])
def test_interrupted_question_ends_its_child_alone(what: str) -> None:
    sandbox = new_sandbox(Limits(cpu_seconds=600.0, wall_seconds=600.0, memory_bytes=256 << 20))
    first = sandbox.first_answer()
    assert first is not None
    process = psutil.Process(first["pid"])

    def interrupt() -> None:
        eventually(process.children)
        interruption.set()

    with closing(Interruption()) as interruption:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(SandboxInterrupted):
            sandbox.ask({"what": what}, interruption)
        thread.join()
    assert process.children() == []
    assert echo(sandbox)["echo"] == "a"
    assert sandbox.pid == first["pid"]
    sandbox.end()


def test_question_that_was_interrupted_before_is_not_asked(sandbox: Sandbox) -> None:
    with closing(Interruption()) as interruption:
        interruption.set()
        with pytest.raises(SandboxInterrupted):
            sandbox.ask({"what": "end the process"}, interruption)  # while the process starts
        first = sandbox.first_answer()
        assert first is not None
        with pytest.raises(SandboxInterrupted):
            sandbox.ask({"what": "end the process"}, interruption)
    assert sandbox.pid == first["pid"]
    assert echo(sandbox)["echo"] == "a"


def test_interrupts_at_any_time_reach_no_other_question(shared: Sandbox) -> None:
    """Some come before the question, some while it is computed, some after its answer."""
    draw, ends = random.Random(0), {"answer": 0, "interrupt": 0}
    shared.start()
    before = shared.pid
    began = time.monotonic()
    for _ in range(20):
        echo(shared)
    usual_s = (time.monotonic() - began) / 20
    for number in range(80):
        text = str(number) * draw.choice((1, 1 << 15))
        with closing(Interruption()) as interruption:
            timer = threading.Timer(draw.random() * 4 * usual_s, interruption.set)
            timer.start()
            try:
                answer = shared.ask({"what": "echo", "text": text}, interruption)
                assert answer["echo"] == text
                ends["answer"] += 1
            except SandboxInterrupted:
                ends["interrupt"] += 1
            finally:
                timer.join()
    assert min(ends.values()) > 0, ends
    assert shared.pid == before


def test_server_with_many_connections_interrupts_too(sandbox: Sandbox) -> None:
    """Its descriptors have numbers beyond 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with closing(Interruption()) as interruption:
            assert interruption.fileno() > 1023
            assert sandbox.ask({"what": "echo", "text": "a"}, interruption)["echo"] == "a"
            before = sandbox.pid
            interruption.set()
            with pytest.raises(SandboxInterrupted):
                sandbox.ask({"what": "wait for ever"}, interruption)
            assert sandbox.pid == before
    finally:
        for descriptor in others:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_interrupt_that_comes_right_behind_its_question_ends_it(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are in the pipe before the process reads: no buffer may hide the second one."""
    first = sandbox.first_answer()
    assert first is not None
    pid: int = first["pid"]
    with closing(Interruption()) as interruption:

        def write(stream: BinaryIO, message: Any) -> None:
            write_message(stream, message)
            if message == INTERRUPT:
                os.kill(pid, signal.SIGCONT)
            else:
                interruption.set()

        os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr(sandbox_module, "write_message", write)
        with pytest.raises(SandboxInterrupted):
            sandbox.ask({"what": "wait for ever"}, interruption)
    assert sandbox.pid == pid


def test_process_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "_MARGIN_S", 0.0)
    sandbox = new_sandbox(Limits(cpu_seconds=5.0, wall_seconds=0.5, memory_bytes=256 << 20))
    first = sandbox.first_answer()
    assert first is not None
    with pytest.raises(SandboxBusy, match="hung"):
        sandbox.ask({"what": "stop the process"})
    assert not psutil.pid_exists(first["pid"])
    sandbox.end()


def test_process_that_does_not_get_ready_is_ended() -> None:
    module = "tests.workers.sandbox.echo_process"
    sandbox = Sandbox(module, {"is_slow_to_start": True}, title="a process", limits=LIMITS, start_patience_s=0.1)
    with pytest.raises(SandboxBusy, match="hung"):
        echo(sandbox)
    assert sandbox.pid is None


def test_closed_sandbox_starts_again_and_an_ended_one_does_not(sandbox: Sandbox) -> None:
    first = echo(sandbox)
    sandbox.close()
    assert sandbox.pid is None
    assert not psutil.pid_exists(first["pid"])
    assert echo(sandbox)["echo"] == "a"
    sandbox.end()
    with pytest.raises(SandboxBusy, match="has ended"):
        echo(sandbox)


def test_dropped_sandbox_ends_its_process() -> None:
    sandbox = new_sandbox()
    first = sandbox.first_answer()
    assert first is not None
    del sandbox
    assert not psutil.pid_exists(first["pid"])


def test_process_and_child_end_with_a_killed_caller() -> None:
    program = (
        "import os, signal, threading, time; from tests.workers.sandbox.test_sandbox import new_sandbox, Limits;"
        "sandbox = new_sandbox(Limits(600.0, 600.0, 256 << 20)); pid = sandbox.first_answer()['pid'];"
        "threading.Thread(target=sandbox.ask, args=({'what': 'wait for ever'},), daemon=True).start();"
        "import psutil; process = psutil.Process(pid)\n"
        "while not process.children(): time.sleep(0.01)\n"
        "print(pid, process.children()[0].pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    ended = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, check=False, env={**os.environ, "PYTHONPATH": path}
    )
    assert ended.returncode == -signal.SIGKILL
    pids = [int(word) for word in ended.stdout.split()]
    assert len(pids) == 2
    eventually(lambda: not any(_runs(pid) for pid in pids), "a process outlives its caller")


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@settings(max_examples=30)
@given(st.recursive(st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.binary() | st.text(), st.lists))
def test_messages_are_whole_or_none(message: Any) -> None:
    stream = io.BytesIO()
    write_message(stream, [message])
    whole = stream.getvalue()
    assert read_message(io.BytesIO(whole)) == [message]
    for size in {0, 7, 8, len(whole) - 1}:
        assert read_message(io.BytesIO(whole[:size])) is None
