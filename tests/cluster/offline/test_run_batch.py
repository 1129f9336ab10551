"""`crossdock run-batch`: the answers are those of the class, and wrong files end the command with their line."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from crossdock.cluster.offline import batch_files
from tests.cluster.ports import server_of
from tests.cluster.watch import terminal

CHATS = "/v1/chat/completions"


def line(custom_id: str, url: str = CHATS, **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"


def run(tmp_path: Path, content: str, *flags: str) -> tuple[int, str, dict[str, Any]]:
    """Return the status, the output and the records by custom id."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(content)
    found = terminal.run("run-batch", "-i", str(source), "-o", str(target), *flags)
    records = [json.loads(each) for each in target.read_text().splitlines()] if target.exists() else []
    assert {path.name for path in tmp_path.iterdir()} <= {"in.jsonl", "out.jsonl"} or found.exit_code
    return found.exit_code, found.output, {each["custom_id"]: each["response"] for each in records}


def test_model_in_this_process_answers_all_lines(tmp_path: Path, small_model_dir: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 4}
    content = (
        "".join(line(f"c{i}", **chat) for i in range(5))
        + line("text", "/v1/completions", prompt=[5, 6], max_tokens=3, ignore_eos=True)
        + line("vector", "/v1/embeddings", input="a")
        + line("score", "/score", text_1="a", text_2=["a", "b"])
        + line("wrong", **chat | {"temperature": 9})
    )
    flags = ["--model", str(small_model_dir), "--dtype", "float32", "--max-model-len", "256", "--max_num_seqs", "4"]
    status, output, found = run(tmp_path, content, *flags, "--kv-cache-memory", "16MiB", "--device", "cpu")
    assert status == 0, output
    assert "9 requests, 1 of them refused" in output
    assert "9/9" in output  # the progress
    texts = {json.dumps(found[f"c{i}"]["body"]["choices"][0]["message"]) for i in range(5)}
    assert len(texts) == 1
    assert found["text"]["body"]["usage"]["completion_tokens"] == 3
    assert len(found["vector"]["body"]["data"][0]["embedding"]) == 256
    assert found["score"]["body"]["data"][0]["score"] == pytest.approx(1.0)
    assert found["wrong"]["body"]["error"]["param"] == "temperature"


class Busy(BaseHTTPRequestHandler):
    """Answers each request when it comes for the second time."""

    seen: set[str]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        name = self.headers["X-Request-Id"]
        is_known = self.headers["Authorization"] == "Bearer key"
        status = 401 if not is_known else 200 if name in self.seen else 429
        self.seen.add(name)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: Any) -> None: ...


@pytest.fixture
def busy() -> Iterator[str]:
    Busy.seen = set()
    with server_of(Busy) as url:
        yield f"{url}/v1"


def test_busy_server_is_asked_again_for_each_line(tmp_path: Path, busy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_files, "_RETRY_S", (0.001, 0.01))
    content = "".join(line(f"c{i}", i=i) for i in range(30))
    status, output, found = run(tmp_path, content, "--url", busy, "--api-key", "key", "--max-concurrent", "4")
    assert status == 0, output
    assert {name: each["body"] for name, each in found.items()} == {f"c{i}": {"i": i} for i in range(30)}


@pytest.mark.parametrize(
    ("flags", "words"), [((), "refuses requests without a key"), (("--api-key", "old"), "refuses the key")]
)
def test_server_that_refuses_the_key_ends_the_command(
    tmp_path: Path, busy: str, flags: tuple[str, ...], words: str
) -> None:
    status, output, found = run(tmp_path, "".join(line(f"c{i}") for i in range(9)), "--url", busy, *flags)
    assert (status, found) == (2, {})
    assert words in output
    assert "give --api-key" in output
    assert output.count("error: ") == 1


@pytest.mark.parametrize(
    ("content", "flags", "words"),
    [
        (line("a") + "{", (), "line 2: This line is not valid JSON"),
        (line("a", "/v1/files"), (), "'url' must be one of"),
        (line("a"), ("--url", "http://127.0.0.1:9", "--dtype", "float32"), "cannot be given"),
        (line("a"), ("--port", "9000"), "--port: it is of a server's port"),
        (line("a"), ("--enable-metrics",), "there is no /metrics"),
        (line("a"), ("--output-tmp-dir", "/tmp"), "--output-tmp-dir: not needed"),
        (line("a"), ("-i", "https://host/in.jsonl"), "--input-file: must be a file"),
    ],
)
def test_wrong_file_or_flag_ends_the_command_with_the_reason(
    tmp_path: Path, content: str, flags: tuple[str, ...], words: str
) -> None:
    status, output, found = run(tmp_path, content, *flags)
    assert (status, found) == (2, {})
    assert words in output
