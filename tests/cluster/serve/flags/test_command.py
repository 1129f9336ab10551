"""`crossdock serve`: what it checks before Ray starts, and a real one that answers and stops on a signal."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from ray import serve
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from crossdock.cluster.config import ClusterConfig
from crossdock.cluster.config_file import load
from crossdock.cluster.serve import lifetime
from crossdock.cluster.serve.address import Address
from crossdock.cluster.serve.application import Application
from crossdock.cluster.serve.ingress import Ingress
from tests.cluster.ports import free_port
from tests.cluster.serve.served_command import serving
from tests.cluster.watch.terminal import COMMAND, background_job, run
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(900)  # a first start measures steps, which a busy machine makes long

FORKING = "own_ray.forked_replicas"  # on the command line of the process that replicas are forked from


@dataclass
class Served:
    """The configuration that `serve` would have started Ray with."""

    config: ClusterConfig | None = None


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> Served:
    record = Served()

    def serve_forever(config: ClusterConfig, starting: Any, started: Callable[..., None], *_: Any) -> None:
        record.config = config
        started([], Address.of(config))

    monkeypatch.setattr(lifetime, "serve_forever", serve_forever)
    monkeypatch.setattr(lifetime, "quieten", lambda: None)
    return record


def test_serve_once_started_prints_its_address(served: Served) -> None:
    result = run("serve", "--port", str(free_port()))
    assert result.exit_code == 0, result.output
    assert served.config is not None
    url = f"http://127.0.0.1:{served.config.http.port}"
    assert f"Crossdock serves SmolLM2-135M-Instruct at {url}/v1" in result.stdout
    assert f"crossdock chat --url {url}" in result.stdout
    assert f"crossdock top --url {url}" in result.stdout
    assert f"curl {url}/v1/chat/completions" in result.stdout


@pytest.mark.parametrize(
    ("flags", "warns"),
    [
        (["--host", "0.0.0.0"], True),  # as the image does
        (["--host", "0.0.0.0", "--api-key", "hunter2"], False),
        ([], False),
    ],
)
def test_serve_without_key_on_every_address_warns(served: Served, flags: list[str], warns: bool) -> None:
    """And serves, as users of vLLM's image expect."""
    port = free_port()
    result = run("serve", "--port", str(port), *flags)
    assert result.exit_code == 0, result.output
    warning = f"warning: No API key is set: every client that reaches 0.0.0.0 port {port} can use this server."
    assert (warning in result.stderr) == warns
    assert "hunter2" not in result.output


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["org/absent"], "'org/absent' is neither a directory nor in the hub's cache"),
        (["--pools", "encode=1,mixed=1"], "there are no encode pools: the replica that computes a prompt encodes"),
        (["--generation-config", "absent"], "'absent' must be auto (the model's own), vllm (none), or a directory"),
    ],
)
def test_serve_with_a_model_that_cannot_be_used_fails_before_ray_starts(
    served: Served, small_model_dir: Path, args: list[str], reason: str
) -> None:
    model = [] if args[0].startswith("org/") else [str(small_model_dir)]
    result = run("serve", *model, *args, "--port", str(free_port()))
    assert result.exit_code == 2
    assert reason in result.stderr
    assert served.config is None


def test_serve_with_taken_port_fails_before_ray_starts(served: Served) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = run("serve", "--port", str(taken.getsockname()[1]))
    assert result.exit_code == 2
    assert "Address already in use; see --host and --port" in result.stderr
    assert served.config is None


def test_serve_whose_ray_does_not_start_prints_rays_reason(small_model_dir: Path, tmp_path: Path) -> None:
    """Ray's sockets are in its folder, and the path of a socket has at most 107 bytes."""
    folder = tmp_path / ("x" * 107)
    folder.mkdir()
    command = [COMMAND, "serve", str(small_model_dir), "--device", "emulated:l4-8b", "--port", str(free_port())]
    environment = {**os.environ, "RAY_TMPDIR": str(folder)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 1
    assert "Ray does not start: " in ended.stderr
    assert "107 bytes" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_serve_that_does_not_start_ends_with_the_reason_alone(
    served: Served, small_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """test_start_failure.py has the reason of a real Ray."""

    def fail(*_: Any) -> None:
        raise lifetime.StartFailed("kv_cache_memory (1.0KiB) holds 0 tokens")

    monkeypatch.setattr(lifetime, "serve_forever", fail)
    result = run("serve", str(small_model_dir), "--port", str(free_port()))
    assert result.exit_code == 1
    assert result.stderr == "error: kv_cache_memory (1.0KiB) holds 0 tokens\n"


@dataclass
class Ingresses:
    """The application's handle, whose ingresses answer whether they are connected."""

    answers: list[bool] | Exception

    def broadcast(self, method: str) -> "Ingresses":
        assert callable(getattr(Ingress, method))
        return self

    def results(self, timeout_s: float) -> list[bool]:
        if isinstance(self.answers, Exception):
            raise self.answers
        return self.answers


@pytest.mark.parametrize(
    ("answers", "connected"),
    [
        ([True, True], True),
        ([True, False], False),
        ([True], False),
        (TimeoutError(), False),
        (DeploymentUnavailableError(DeploymentID("ingress", "crossdock")), False),
    ],
)
def test_server_is_up_once_each_ingress_has_its_replicas(
    monkeypatch: pytest.MonkeyPatch, answers: list[bool] | Exception, connected: bool
) -> None:
    """Serve says that replicas run before an ingress hears of them: requests would be answered by 503."""
    monkeypatch.setattr(serve, "get_app_handle", lambda name: Ingresses(answers))
    assert Application(load(None, {"http.replicas": 2})).is_connected() == connected


def chat(url: str, **fields: Any) -> str:
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 12, **fields}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=240).raise_for_status().json()
    text: str = answer["choices"][0]["message"]["content"]
    return text


def users_of(library: str, server: subprocess.Popen[str]) -> list[str]:
    """Return the command lines of a server's processes that have loaded a library."""
    found = []
    parent = psutil.Process(server.pid)
    for process in (parent, *parent.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(library in mapped.path for mapped in process.memory_maps()):
                found.append(" ".join(process.cmdline()))
    return found


def test_serve_answers_chat_and_after_sigterm_lets_streams_end_until_sigint(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its processes listen on loopback alone, and Ray's ask for a token.

    What `make serve` starts for the first time, with fewer pages: it measures kernels and steps.
    """
    monkeypatch.delenv("RAY_AUTH_MODE")
    (tmp_path / "token").write_text(secrets.token_hex(32))
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    with serving(tmp_path / "log", "--kv-cache-memory", "400MiB") as (server, url):
        log = (tmp_path / "log").read_text()
        for line in ("Machine: ", "Memory: ", "KV pages: ", "Speed: a prompt of 1,000 tokens takes", "Ask: curl "):
            assert f"\n{line}" in log
        assert "8,192 tokens" in log
        assert not {word for word in ("INFO", "WARNING", "Warning", "ray", "RAY_") if word in log.replace("array", "")}
        assert {chat(url, seed=seed) for seed in range(3)} == {"The capital of France is Paris."}
        assert len({chat(url, seed=seed, temperature=1) for seed in range(4)}) > 1
        answer = subprocess.run(
            [COMMAND, "chat", "What is the capital of France?", "--url", url],
            capture_output=True,
            text=True,
            check=True,
        )
        assert "Paris" in answer.stdout
        forked = sorted(user.split(".")[0].strip() for user in users_of("libtorch", server) if FORKING not in user)
        assert forked == ["ray::ServeReplica:crossdock:ingress", "ray::ServeReplica:crossdock:mixed"]
        unused = ("dashboard.py", "log_monitor.py", "autoscaler/_private/monitor.py")
        assert not [name for name in unused if has_process(name)(psutil.Process(server.pid))]
        assert_listens_on_loopback_alone(server, url)
        compiles_grammars = has_process("grammar.vetting")
        eventually(lambda: compiles_grammars(psutil.Process(server.pid)), "the process that compiles grammars starts")
        with ExitStack() as streams:
            short, long = (streams.enter_context(streamed(url, count)) for count in (50, 8000))
            first, endless = events(short), events(long)
            next(first), next(endless)
            server.send_signal(signal.SIGTERM)
            *_, last, done = first
            server.send_signal(signal.SIGINT)
            *_, cut, _ = endless
        assert server.wait(timeout=240) == 0  # 5 s on two quiet cores
    assert '"finish_reason":"length"' in last, "the running stream ended whole"
    assert done == "data: [DONE]"
    assert '"code":"service_unavailable"' in cut
    assert (tmp_path / "log").read_text().removeprefix(log) == "Stopping …\n"


def streamed(url: str, max_tokens: int) -> AbstractContextManager[httpx.Response]:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True, "stream": True}
    return httpx.stream("POST", f"{url}/v1/chat/completions", json={**body, "max_tokens": max_tokens}, timeout=240)


def events(answer: httpx.Response) -> Iterator[str]:
    return (line for line in answer.iter_lines() if line.startswith("data: "))


def assert_listens_on_loopback_alone(server: subprocess.Popen[str], url: str) -> None:
    """And check that all of Ray's processes ask for a token."""
    found = listening(server)
    names = {name.partition(":")[0] for names in found.values() for name in names}
    assert {"gcs_server", "raylet"} <= names, "the processes were looked at"
    port = url.rpartition(":")[2]
    assert any(name.endswith(f":{port}") for name in found["127.0.0.1"]), "the API"
    assert found.keys() <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, found
    of_ray = [child for child in psutil.Process(server.pid).children() if FORKING not in " ".join(child.cmdline())]
    assert {process.environ().get("RAY_AUTH_MODE") for process in of_ray} == {"token"}


def has_process(name: str) -> Callable[[psutil.Process], bool]:
    """Return a condition: the server has a process with `name` on its command line."""

    def holds(server: psutil.Process) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return any(name in " ".join(child.cmdline()) for child in server.children(recursive=True))
        return False

    return holds


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        pytest.param(lambda server: "_raylet" in str(server.memory_maps()), signal.SIGINT, id="imports"),
        pytest.param(has_process("gcs_server"), signal.SIGTERM, id="Ray starts", marks=pytest.mark.soak),
        pytest.param(has_process("raylet"), signal.SIGINT, id="Ray connects", marks=pytest.mark.soak),
        pytest.param(has_process("ServeController"), signal.SIGTERM, id="Serve starts", marks=pytest.mark.soak),
        pytest.param(has_process("ray::ServeReplica:crossdock:mixed"), signal.SIGINT, id="model loads"),
    ],
)
def test_signal_at_any_moment_of_the_start_ends_everything_without_a_traceback(
    small_model_dir: Path, tmp_path: Path, moment: Callable[[psutil.Process], bool], number: signal.Signals
) -> None:
    log, port = tmp_path / "log", free_port()
    flags = [str(small_model_dir), "--max-num-batched-tokens", "128", "--kv-cache-memory", "64MiB", "--port", str(port)]
    with log.open("w") as output:
        server = background_job("serve", *flags, stdout=output, stderr=subprocess.STDOUT)
    process = psutil.Process(server.pid)
    try:
        eventually(lambda: server.poll() is not None or moment(process), log.read_text, 240)
        assert server.poll() is None, log.read_text()
        family = set(process.children(recursive=True))
        server.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(0.1)
        if server.poll() is None:
            family |= {*process.children(recursive=True)}
            server.send_signal(number)  # an impatient user
        assert server.wait(timeout=240) == 0, log.read_text()
    finally:
        server.kill()
        server.wait()
    _, alive = psutil.wait_procs(family, timeout=240)
    assert not alive, f"these outlived the server: {alive}"
    assert not {word for word in ("Traceback", "Error", "INFO", "Abort") if word in log.read_text()}, log.read_text()


def listening(server: subprocess.Popen[str]) -> dict[str, set[str]]:
    """Return the addresses at which a server's processes listen, with the names of the processes."""
    found: dict[str, set[str]] = {}
    parent = psutil.Process(server.pid)
    for process in (parent, *parent.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in process.net_connections("inet"):
                if each.status == psutil.CONN_LISTEN:
                    found.setdefault(each.laddr.ip, set()).add(f"{process.name()}:{each.laddr.port}")
    return found


@pytest.mark.soak  # the test of a chat looks at a server of one rank, test_rank_network at the ranks of a worker group
def test_serve_of_two_ranks_as_background_job_stops_at_once_on_sigint(small_model_dir: Path, tmp_path: Path) -> None:
    """A script's background job starts with SIGINT ignored, and so does this one. It does not wait for a stream."""
    flags = ["--max-num-batched-tokens", "128", "--kv-cache-memory", "64MiB", "--max-num-seqs", "4"]
    flags += ["--tensor-parallel-size", "2"]
    with serving(tmp_path / "log", str(small_model_dir), *flags) as (server, url):
        with streamed(url, 3500) as answer:
            lines = events(answer)
            next(lines)
            server.send_signal(signal.SIGINT)
            *_, last, _ = lines
        assert server.wait(timeout=240) == 0
    assert '"code":"service_unavailable"' in last
