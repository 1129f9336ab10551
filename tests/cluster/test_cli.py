"""The command line, as a person or a script meets it. The server behind `chat` is a scripted one."""

import json
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from crossdock.cluster import cli
from crossdock.cluster.config import ClusterConfig
from crossdock.cluster.serve import app as application
from crossdock.cluster.watch.chat import ChatError, Conversation, connect, first_model
from tests.cluster.watch.terminal import COMMAND, Pty


def run(*args: str, **environment: str) -> Any:
    return CliRunner().invoke(cli.app, list(args), env={"COLUMNS": "160", **environment})


# --- flags and configuration


def printed_config(*args: str, **environment: str) -> ClusterConfig:
    result = run("config", *args, **environment)
    assert result.exit_code == 0, result.output
    return ClusterConfig.model_validate(yaml.safe_load(result.stdout))


def test_every_flag_reaches_its_setting() -> None:
    flags = """
        org/model --served-model-name mine --served-model-name also --dtype float32 --max-model-len 4096
        --max-num-batched-tokens 1024 --max-num-seqs 8 --long-prefill-token-threshold 256
        --chunk-policy fixed --min-chunk-tokens 64 --max-prefill-tokens 512 --no-mixed-chunks
        --max-num-partial-prefills 4 --max-long-partial-prefills 1 --prefill-order fcfs --admission queue
        --no-enable-chunked-prefill --no-enable-prefix-caching --kv-cache-memory 1GiB --page-size 32
        --kv-cache-dtype fp8
        --gpu-memory-utilization 0.7 --enforce-eager --no-async-scheduling
        --host 0.0.0.0 --port 9000 --pools big=2,small
        --set pools.small.num_cpus=3 --set http.request_timeout_s=1.5
    """
    config = printed_config(*flags.split())
    model, engine, http = config.model, config.engine, config.http
    assert (model.path, model.served_name, model.dtype, model.max_model_len) == ("org/model", "mine", "float32", 4096)
    assert (engine.max_num_batched_tokens, engine.max_num_seqs) == (1024, 8)
    assert engine.long_prefill_token_threshold == 256
    assert (engine.chunk_policy, engine.min_chunk_tokens, engine.max_prefill_tokens) == ("fixed", 64, 512)
    assert (engine.max_num_partial_prefills, engine.max_long_partial_prefills) == (4, 1)
    assert (engine.prefill_order, engine.admission) == ("fcfs", "queue")
    assert not engine.mixed_chunks
    assert not engine.enable_chunked_prefill
    assert not engine.enable_prefix_caching
    assert (engine.kv_cache_memory, engine.page_size, engine.kv_cache_dtype) == (1 << 30, 32, "fp8")
    assert (engine.gpu_memory_utilization, engine.enforce_eager, engine.async_scheduling) == (0.7, True, False)
    assert (http.host, http.port, http.model_aliases, http.request_timeout_s) == ("0.0.0.0", 9000, ("also",), 1.5)
    assert [(pool.name, pool.replicas, pool.num_cpus) for pool in config.pools] == [
        ("big", 2, 0),
        ("small", 1, 3),
    ]


def test_no_flags_are_the_defaults() -> None:
    assert printed_config() == ClusterConfig()


@pytest.mark.parametrize(
    ("args", "budget", "chunked"),
    [
        (["--chunked-prefill-size", "1024"], 1024, True),
        (["--chunked-prefill-size", "1024", "--max-num-batched-tokens", "1024"], 1024, True),
        (["--chunked-prefill-size", "-1"], 2048, False),
        (["--chunked-prefill-size", "-1", "--max-num-batched-tokens", "8192"], 8192, False),
        (["--chunked-prefill-size=-1", "--no-enable-chunked-prefill"], 2048, False),
    ],
)
def test_sglangs_chunk_size_is_the_budget_or_no_chunks(args: list[str], budget: int, chunked: bool) -> None:
    engine = printed_config(*args).engine
    assert (engine.max_num_batched_tokens, engine.enable_chunked_prefill) == (budget, chunked)


def test_ranks_of_pools(tmp_path: Path) -> None:
    def ranks(*args: str) -> list[tuple[str, int, int, int]]:
        pools = printed_config(*args).pools
        return [(it.name, it.replicas, it.tensor_parallel_size, it.pipeline_parallel_size) for it in pools]

    assert ranks("--tp", "2", "--pp", "3") == [("mixed", 1, 2, 3)]
    assert ranks("--pools", "prefill=2xtp1,decode=1xtp2") == [("prefill", 2, 1, 1), ("decode", 1, 2, 1)]
    assert ranks("--pools", "a=1xpp2xtp4,b") == [("a", 1, 4, 2), ("b", 1, 1, 1)]
    file = tmp_path / "cluster.yaml"
    file.write_text("pools: [{name: a, tensor_parallel_size: 4}, {name: b, pipeline_parallel_size: 2}]\n")
    assert ranks("-c", str(file)) == [("a", 1, 4, 1), ("b", 1, 1, 2)]
    assert ranks("-c", str(file), "--tensor-parallel-size", "2") == [("a", 1, 2, 1), ("b", 1, 2, 2)]


def test_flags_win_over_the_file_and_set_over_flags(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("engine: {max_num_seqs: 4, page_size: 32}\nhttp: {port: 1}\n")
    config = printed_config("-c", str(file), "--port", "2", "--max-num-seqs", "5", "--set", "engine.max_num_seqs=6")
    assert (config.engine.page_size, config.http.port, config.engine.max_num_seqs) == (32, 2, 6)


def test_api_keys_come_from_the_environment_and_are_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = run("config", CROSSDOCK_API_KEY="hunter2").stdout
    assert "hunter2" not in shown
    assert yaml.safe_load(shown)["http"]["api_keys"] == ["<hidden>"]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--page-size", "0"], "engine.page_size: must be greater than or equal to 1, not 0"),
        (["--dtype", "int3"], "model.dtype: must be 'auto', 'bfloat16', 'float16' or 'float32', not 'int3'"),
        (["--chunk-policy", "clever"], "engine.chunk_policy: must be 'adaptive' or 'fixed', not 'clever'"),
        (["--admission", "maybe"], "engine.admission: must be 'reject' or 'queue', not 'maybe'"),
        (["--chunked-prefill-size", "0"], "--chunked-prefill-size 0: must be a number of tokens, or -1 for no chunks"),
        (
            ["--chunked-prefill-size", "512", "--max-num-batched-tokens", "1024"],
            "--chunked-prefill-size 512 and --max-num-batched-tokens 1024 are the same setting",
        ),
        (["--chunked-prefill-size", "512", "--no-enable-chunked-prefill"], "--no-enable-chunked-prefill switches off"),
        (["--chunked-prefill-size", "-1", "--enable-chunked-prefill"], "switches chunks off"),
        (["--set", "engine.max_num_seq=1"], "did you mean max_num_seqs?"),
        (["--set", "engine"], "--set: 'engine' is not of the form KEY=VALUE"),
        (["--set", "engine.page_size=[1"], "--set: the value of engine.page_size is not YAML"),
        (["--pools", "big=x"], "--pools: 'big=x' is not of the form big=1,small=2"),
        (["--pools", "big=1x2"], "--pools: 'big=1x2' is not of the form big=1,small=2 or prefill=2xtp1,decode=1xtp2"),
        (["--tp", "0"], "pools.0.tensor_parallel_size: must be greater than or equal to 1, not 0"),
        (["--config", "absent.yaml"], "absent.yaml: cannot be read: No such file or directory"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "config"])
def test_mistakes_are_told_in_a_line(command: str, args: list[str], told: str) -> None:
    result = run(command, *args)
    assert result.exit_code == 2
    assert told in result.stderr
    assert "Traceback" not in result.output


# --- serve, short of starting Ray


@dataclass
class Served:
    config: ClusterConfig | None = None


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> Served:
    record = Served()

    def serve_forever(config: ClusterConfig, starting: Callable[[str], None], started: Callable[[], None]) -> None:
        record.config = config
        started()

    monkeypatch.setattr(application, "serve_forever", serve_forever)
    return record


def test_serve_says_where_it_is(served: Served) -> None:
    result = run("serve", "--port", str(free_port()))
    assert result.exit_code == 0, result.output
    assert served.config is not None
    url = f"http://127.0.0.1:{served.config.http.port}"
    assert f"Crossdock serves SmolLM2-135M-Instruct at {url}/v1" in result.stdout
    assert f"crossdock chat --url {url}" in result.stdout


def test_serve_tells_a_missing_model_before_ray_starts(served: Served) -> None:
    result = run("serve", "org/absent", "--port", str(free_port()))
    assert result.exit_code == 2
    assert "'org/absent' is neither a directory nor in the hub's cache" in result.stderr
    assert served.config is None


def test_serve_tells_a_taken_port_before_ray_starts(served: Served) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = run("serve", "--port", str(taken.getsockname()[1]))
    assert result.exit_code == 2
    assert "Address already in use; see --host and --port" in result.stderr
    assert served.config is None


def test_help_is_quick_and_teaches() -> None:
    started = time.perf_counter()
    subprocess.run([COMMAND, "--help"], check=True, stdout=subprocess.DEVNULL)
    assert time.perf_counter() - started < 5  # 0.5 s on two quiet cores; torch alone would take as much as this
    heavy = (
        "import sys, crossdock.cluster.cli; sys.exit(any(m in sys.modules for m in ('torch', 'ray', 'transformers')))"
    )
    subprocess.run([sys.executable, "-c", heavy], check=True)
    text = run("serve", "--help").stdout
    assert "--long-prefill-token-threshold" in text
    assert "crossdock serve Qwen/Qwen3-0.6B --max-model-len 8192" in text


def test_version_names_what_matters_in_a_bug_report() -> None:
    lines = run("version").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["crossdock", "ray", "torch", "transformers"]


# --- chat


@dataclass
class Script:
    """What the server will answer next, and what it was asked."""

    url: str = ""
    pieces: list[str] = field(default_factory=lambda: ["Hel", "lo\u2028", "**you**"])
    asked: list[dict[str, Any]] = field(default_factory=list)
    key: str | None = None
    status: int = 200
    stalls: threading.Event | None = None  # after the first piece, until the client has gone
    ending: str = "data: [DONE]\n\n"


@pytest.fixture
def script() -> Iterator[Script]:
    it = Script()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"  # an answer ends with its connection

        def do_GET(self) -> None:
            self._answer(200, json.dumps({"data": [{"id": "smol"}, {"id": "other"}]}))

        def do_POST(self) -> None:
            it.key = self.headers["Authorization"]
            it.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if it.status != 200:
                self._answer(it.status, json.dumps({"error": {"message": "no room"}}))
                return
            self._answer(200, ": a comment\n\n")
            for piece in it.pieces:
                event = {"choices": [{"delta": {"content": piece}}]}
                self.wfile.write(f"data: {json.dumps(event, ensure_ascii=False)}\r\n\r\n".encode())
                if it.stalls:
                    while not select.select([self.connection], [], [], 0.05)[0]:
                        pass
                    it.stalls.set()
                    return
            usage = {"choices": [], "usage": {"completion_tokens": 3}}
            self.wfile.write(f"data: {json.dumps(usage)}\n\n{it.ending}".encode())

        def _answer(self, status: int, body: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        it.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield it
        server.shutdown()
        thread.join()


@pytest.fixture
def talk(script: Script) -> Iterator[Conversation]:
    with connect(script.url) as http:
        yield Conversation(http, first_model(http))


def free_port() -> int:
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        port: int = it.getsockname()[1]
        return port


def test_conversation_streams_and_remembers(talk: Conversation, script: Script) -> None:
    talk.system, talk.options = "Be brief.", {"temperature": 0}
    assert list(talk.say("hi")) == ["Hel", "lo\u2028", "**you**"]
    assert talk.usage == {"completion_tokens": 3}
    assert "".join(talk.say("again")) == "Hello\u2028**you**"
    first, second = script.asked
    assert first["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert (first["model"], first["stream"], first["temperature"]) == ("smol", True, 0)
    assert second["messages"][1:] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello\u2028**you**"},
        {"role": "user", "content": "again"},
    ]
    talk.reset()
    list(talk.say("new"))
    assert [message["content"] for message in script.asked[-1]["messages"]] == ["Be brief.", "new"]


def test_closing_an_answer_stops_the_server_and_keeps_what_was_said(talk: Conversation, script: Script) -> None:
    script.stalls = threading.Event()
    answer = talk.say("hi")
    assert next(answer) == "Hel"
    answer.close()
    assert script.stalls.wait(5)
    assert talk.turns[-1] == {"role": "assistant", "content": "Hel"}


def test_refused_turns_are_forgotten(talk: Conversation, script: Script) -> None:
    script.status = 429
    with pytest.raises(ChatError, match="no room"):
        list(talk.say("hi"))
    assert talk.turns == []


@pytest.mark.parametrize(
    ("ending", "told"),
    [("", "before it was complete"), ('data: {"error": {"message": "the replica died"}}\n\n', "the replica died")],
)
def test_broken_answers_are_told(talk: Conversation, script: Script, ending: str, told: str) -> None:
    script.ending = ending
    with pytest.raises(ChatError, match=told):
        list(talk.say("hi"))
    assert len(talk.turns) == 2  # what was said is kept


def test_chat_asks_once(script: Script) -> None:
    result = run("chat", "hi", "--url", script.url + "/v1/", "--model", "other", "--max-tokens", "9", "--api-key", "k")
    assert result.exit_code == 0, result.output
    assert result.stdout == "Hello\u2028**you**\n"
    assert script.asked[0]["max_tokens"] == 9
    assert script.asked[0]["model"] == "other"
    assert script.key == "Bearer k"


def test_a_pipe_is_one_message(script: Script) -> None:
    result = subprocess.run(
        [COMMAND, "chat", "--url", script.url], input="line one\nline two\n", capture_output=True, text=True, check=True
    )
    assert result.stdout == "Hello\u2028**you**\n"
    assert script.asked[0]["messages"] == [{"role": "user", "content": "line one\nline two"}]


def test_chat_without_a_server_says_what_to_do() -> None:
    result = run("chat", "hi", "--url", f"http://127.0.0.1:{free_port()}")
    assert result.exit_code == 1
    assert "start one with: crossdock serve" in result.stderr
    assert run("chat", "hi", "--url", "nonsense").exit_code == 1


def test_chat_at_a_terminal(script: Script) -> None:
    terminal = Pty("chat", "--url", script.url)
    terminal.expect("smol")
    terminal.expect("> ")
    terminal.send("hi\r")
    terminal.expect("you")
    terminal.expect("3 tokens · first token after")
    terminal.expect("> ")
    terminal.send("/system Be brief.\r")
    terminal.expect("system prompt set")
    terminal.send("/reset\r")
    terminal.expect("forgotten")
    terminal.send("/nonsense\r")
    terminal.expect("no such command: /nonsense")
    script.stalls = threading.Event()
    terminal.send("talk on\r")
    terminal.expect("Hel")
    terminal.send("\x03")
    terminal.expect("stopped")
    assert script.stalls.wait(5)
    terminal.expect("> ")
    script.stalls, script.status = None, 503
    terminal.send("and?\r")
    terminal.expect("error: no room")
    terminal.expect("> ")
    terminal.send("\x04")
    assert terminal.close() == 0
    contents = [[message["content"] for message in asked["messages"]] for asked in script.asked]
    assert contents == [["hi"], ["Be brief.", "talk on"], ["Be brief.", "talk on", "Hel", "and?"]]


# --- all of it


def test_serve_chat_and_stop(model_dir: Path, tmp_path: Path) -> None:
    """`crossdock serve` in a process of its own answers `crossdock chat`, and a SIGTERM ends it in seconds."""
    port = str(free_port())
    log = tmp_path / "log"
    with log.open("w") as output:
        server = subprocess.Popen([COMMAND, "serve", "--port", port], stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 240
        while "Crossdock serves" not in log.read_text():
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        asked, url = "What is the capital of France?", f"http://127.0.0.1:{port}"
        answer = subprocess.run(
            [COMMAND, "chat", asked, "--temperature", "0", "--url", url],
            capture_output=True,
            text=True,
            check=True,
        )
        assert "Paris" in answer.stdout
        stopped = time.monotonic()
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0
        assert time.monotonic() - stopped < 30  # 5 s on two quiet cores
    finally:
        server.kill()
        server.wait()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(port))) != 0
