"""The parts that benchmarks share: a server's start, its processes and its end; tables of medians."""

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from tests.benchmarks.scripts import script
from tests.cluster.ports import free_port

STAND_IN = """
import http.server, json, signal, subprocess, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background job inherits that it is ignored

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"data": [{"id": "m"}]})
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({})
    def answer(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

# Leaves the session, as Ray's daemons do, and ends with its standard input.
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


servers = script("servers")
tables = script("tables")


@pytest.fixture
def args(tmp_path: Path) -> argparse.Namespace:
    return argparse.Namespace(port=free_port(), start_timeout=20.0, output=tmp_path / "out" / "results")


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text()


def test_server_after_its_end_leaves_no_process(servers: ModuleType, args: argparse.Namespace) -> None:
    log = servers.log_of(args, "stand-in")
    command = [sys.executable, "-c", STAND_IN, str(args.port)]
    with servers.serving("stand-in", command, args, log) as server:
        assert len(server.processes) == 2
        assert all(is_alive(pid) for pid in server.processes)
        assert servers.memory_mib(server.processes) > 0
        others = servers.OtherLoad(server.processes)
        time.sleep(0.05)
        assert 0 <= others.share() <= (os.cpu_count() or 1) + 1
        with pytest.raises(RuntimeError, match="another server listens"), servers.serving("b", command, args, log):
            pass
    assert not any(is_alive(pid) for pid in server.processes)


def test_server_ends_when_its_benchmark_is_terminated(servers: ModuleType, args: argparse.Namespace) -> None:
    before = signal.getsignal(signal.SIGTERM)
    command = [sys.executable, "-c", STAND_IN, str(args.port)]
    with pytest.raises(SystemExit), servers.serving("a", command, args, servers.log_of(args, "a")) as server:
        signal.raise_signal(signal.SIGTERM)
    assert not any(is_alive(pid) for pid in server.processes)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_signal_while_a_server_ends_waits_for_its_end(
    servers: ModuleType,
    args: argparse.Namespace,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    raised: type[BaseException],
) -> None:
    of_tests = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
        command = [sys.executable, "-c", STAND_IN, str(args.port)]
        end = servers.end
        monkeypatch.setattr(servers, "end", lambda process, mark: (signal.raise_signal(number), end(process, mark)))
        with pytest.raises(raised), servers.serving("a", command, args, servers.log_of(args, "a")) as server:
            pass
        assert not any(is_alive(pid) for pid in server.processes)
        assert {each: signal.getsignal(each) for each in before} == before
    finally:
        signal.signal(signal.SIGINT, of_tests)


def test_server_that_ends_at_once_is_reported_with_its_log(servers: ModuleType, args: argparse.Namespace) -> None:
    log = servers.log_of(args, "broken")
    command = [sys.executable, "-c", "print('no model'); raise SystemExit(3)"]
    with (
        pytest.raises(RuntimeError, match=f"broken ended with 3 before it was ready; see {log}"),
        servers.serving("broken", command, args, log),
    ):
        pass
    assert "no model" in log.read_text()


def test_table_of_unlike_rows_has_medians_and_dashes(tables: ModuleType) -> None:
    rows = [{"tok/s": 1.0, "gap": 1234.5}, {"tok/s": 2.0}, {"tok/s": 30.0}]
    results = {"a": tables.medians(rows), "b": {"failed": 0, "gap": float("nan")}}
    assert tables.table(results, "server") == (
        "| server | tok/s | gap | failed |\n|---|---|---|---|\n| a | 2 | 1,234 | - |\n| b | - | nan | 0 |\n"
    )
