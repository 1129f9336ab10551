"""Watch the process that measures: end it when a case hangs, note why a case has no figures, and start it again."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gpu.rows import Rows

_POLL_S = 0.2
_END_S = 30.0  # for killed processes to end
_MARK = "CROSSDOCK_GPU_PROCESS"  # a variable that all processes of one measurement have


def supervise(
    command: Sequence[str],
    environment: Mapping[str, str],
    rows: Rows,
    deadline: float,
    is_ended: Callable[[], bool] = lambda: False,
) -> None:
    """Run `command` until it ends well, no case is left that it could try, or `deadline` (of `time.time`) has passed.

    A process that crashes or hangs in a case is started again, and skips that case.

    Raises:
        SystemExit: `is_ended` has become true; the process has been killed.
    """
    while time.time() < deadline:
        started = time.monotonic()
        reason = _run(command, environment, rows, deadline, is_ended)
        if reason is None:
            return
        case = rows.open_case()
        if case is not None:
            rows.end(case["section"], case["case"], time.time() - case["began"], error=reason)
            print(f"  {case['case']}: {reason}", flush=True)
        elif reason != DEVICE_LOST_REASON:  # it ended outside of every case: another start would end likewise
            rows.end("process", "start", time.monotonic() - started, error=reason)
            return


DEVICE_LOST = 75
"""The exit code of a process whose device reports errors, after it has written the row of the case."""
DEVICE_LOST_REASON = f"the process ended with exit code {DEVICE_LOST}"


def _run(
    command: Sequence[str],
    environment: Mapping[str, str],
    rows: Rows,
    deadline: float,
    is_ended: Callable[[], bool],
) -> str | None:
    """Return why the process ended; None: it has finished."""
    mark = f"{_MARK}={os.getpid()}-{time.time_ns()}"
    process = subprocess.Popen(command, env=dict([*environment.items(), mark.split("=")]), start_new_session=True)
    try:
        while process.poll() is None:
            time.sleep(_POLL_S)
            if is_ended():
                raise SystemExit(128 + signal.SIGTERM)
            if time.time() > deadline:
                return "the time of the call was over"
            case = rows.open_case()
            if case is not None and time.time() > case["began"] + case["limit_s"]:
                return f"took longer than {case['limit_s']:.0f} s"
    finally:
        _end(process, mark)
    code = process.returncode
    if code == 0:
        return None
    return f"the process ended with signal {-code}" if code < 0 else f"the process ended with exit code {code}"


def _end(process: "subprocess.Popen[bytes]", mark: str) -> None:
    """Kill the process and all that it started. Ray's daemons have sessions of their own, and outlive what started
    them: they are known by a variable of their environment."""
    process.kill()
    process.wait()
    deadline = time.monotonic() + _END_S
    while (found := [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _has(pid, mark)]) and (
        time.monotonic() < deadline
    ):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def _has(pid: str, mark: str) -> bool:
    try:
        return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return False
