"""`crossdock chat`, as a person or a script meets it. The server behind it is a scripted one."""

import json
import select
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from crossdock.cluster.watch.chat import ChatError, Conversation, connect, first_model
from tests.cluster.ports import free_port, server_of
from tests.cluster.watch.terminal import COMMAND, Pty, background_job, run


@dataclass
class Script:
    """The server's next answer, and the requests it received."""

    url: str = ""
    thoughts: list[dict[str, str]] = field(default_factory=list)  # deltas before the pieces
    pieces: list[str] = field(default_factory=lambda: ["Hel", "lo\u2028", "**you**"])
    asked: list[dict[str, Any]] = field(default_factory=list)
    key: str | None = None
    status: int = 200
    stalls: threading.Event | None = None  # the server stalls after the first piece; set once the client has gone
    ending: str = "data: [DONE]\n\n"


@pytest.fixture
def script() -> Iterator[Script]:
    script = Script()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"  # an answer ends with its connection

        def do_GET(self) -> None:
            self._answer(200, json.dumps({"data": [{"id": "smol"}, {"id": "other"}]}))

        def do_POST(self) -> None:
            script.key = self.headers["Authorization"]
            script.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if script.status != 200:
                self._answer(script.status, json.dumps({"error": {"message": "no room"}}))
                return
            self._answer(200, ": a comment\n\n")
            for delta in [*script.thoughts, *({"content": piece} for piece in script.pieces)]:
                event = {"choices": [{"delta": delta}]}
                self.wfile.write(f"data: {json.dumps(event, ensure_ascii=False)}\r\n\r\n".encode())
                if script.stalls:
                    while not select.select([self.connection], [], [], 0.05)[0]:
                        pass
                    script.stalls.set()
                    return
            usage = {"choices": [], "usage": {"completion_tokens": 3}}
            self.wfile.write(f"data: {json.dumps(usage)}\n\n{script.ending}".encode())

        def _answer(self, status: int, body: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    with server_of(Handler) as script.url:
        yield script


@pytest.fixture
def talk(script: Script) -> Iterator[Conversation]:
    with connect(script.url) as http:
        yield Conversation(http, first_model(http))


def test_conversation_streams_answers_and_remembers_turns(talk: Conversation, script: Script) -> None:
    talk.system, talk.options = "Be brief.", {"temperature": 0}
    assert [piece.text for piece in talk.say("hi")] == ["Hel", "lo\u2028", "**you**"]
    assert talk.usage == {"completion_tokens": 3}
    assert "".join(piece.text for piece in talk.say("again")) == "Hello\u2028**you**"
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


def test_closed_answer_stops_the_server_and_keeps_its_text(talk: Conversation, script: Script) -> None:
    script.stalls = threading.Event()
    answer = talk.say("hi")
    assert next(answer).text == "Hel"
    answer.close()
    assert script.stalls.wait(240)
    assert talk.turns[-1] == {"role": "assistant", "content": "Hel"}


def test_refused_turn_is_forgotten(talk: Conversation, script: Script) -> None:
    script.status = 429
    with pytest.raises(ChatError, match="no room"):
        list(talk.say("hi"))
    assert talk.turns == []


@pytest.mark.parametrize(
    ("ending", "message"),
    [("", "before it was complete"), ('data: {"error": {"message": "the replica died"}}\n\n', "the replica died")],
)
def test_broken_answer_raises_and_keeps_its_text(talk: Conversation, script: Script, ending: str, message: str) -> None:
    script.ending = ending
    with pytest.raises(ChatError, match=message):
        list(talk.say("hi"))
    assert len(talk.turns) == 2


def test_chat_with_a_message_prints_the_answer_and_leaves(script: Script) -> None:
    result = run("chat", "hi", "--url", script.url + "/v1/", "--model", "other", "--max-tokens", "9", "--api-key", "k")
    assert result.exit_code == 0, result.output
    assert result.stdout == "Hello\u2028**you**\n"
    assert script.asked[0]["max_tokens"] == 9
    assert script.asked[0]["model"] == "other"
    assert script.key == "Bearer k"


THOUGHTS = [{"reasoning": "Let me", "reasoning_content": "Let me"}, {"reasoning_content": " see."}]


def test_reasoning_of_any_server_comes_before_the_answer_and_is_no_turn(talk: Conversation, script: Script) -> None:
    script.thoughts = THOUGHTS
    pieces = list(talk.say("hi"))
    assert "".join(piece.text for piece in pieces if piece.is_reasoning) == "Let me see."
    assert [piece.text for piece in pieces[2:]] == script.pieces
    assert talk.turns[-1] == {"role": "assistant", "content": "".join(script.pieces)}


def test_reasoning_is_dimmed_at_a_terminal_and_left_out_of_a_pipe(script: Script) -> None:
    script.thoughts = THOUGHTS
    assert run("chat", "hi", "--url", script.url).stdout == "Hello\u2028**you**\n"
    alone = Pty("chat", "hi", "--url", script.url)
    alone.expect("Let me see.")
    alone.expect("**you**")
    assert alone.close() == 0
    assert "\x1b[2mLet me" in alone.output
    assert "\x1b[2m" not in alone.output.partition("see.")[2]
    dialogue = Pty("chat", "--url", script.url)
    dialogue.expect("> ")
    dialogue.send("hi\r")
    dialogue.expect("Let me see.")
    dialogue.expect("first token after")
    dialogue.expect("> ")
    dialogue.send("\x04")
    assert dialogue.close() == 0
    assert "\x1b[2mLet me" in dialogue.output


def test_chat_with_a_pipe_sends_one_message(script: Script) -> None:
    result = subprocess.run(
        [COMMAND, "chat", "--url", script.url], input="line one\nline two\n", capture_output=True, text=True, check=True
    )
    assert result.stdout == "Hello\u2028**you**\n"
    assert script.asked[0]["messages"] == [{"role": "user", "content": "line one\nline two"}]


def test_chat_without_a_server_names_the_command_that_starts_one() -> None:
    result = run("chat", "hi", "--url", f"http://127.0.0.1:{free_port()}")
    assert result.exit_code == 1
    assert "start one with: crossdock serve" in result.stderr
    assert run("chat", "hi", "--url", "nonsense").exit_code == 1


def test_chat_at_a_terminal_answers_commands_ctrl_c_and_ctrl_d(script: Script) -> None:
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
    assert script.stalls.wait(240)
    terminal.expect("> ")
    script.stalls, script.status = None, 503
    terminal.send("and?\r")
    terminal.expect("error: no room")
    terminal.expect("> ")
    terminal.send("\x04")
    assert terminal.close() == 0
    contents = [[message["content"] for message in asked["messages"]] for asked in script.asked]
    assert contents == [["hi"], ["Be brief.", "talk on"], ["Be brief.", "talk on", "Hel", "and?"]]


def test_chat_as_background_job_stops_on_sigint(script: Script) -> None:
    script.stalls = threading.Event()
    with background_job("chat", "hi", "--url", script.url, stdout=subprocess.PIPE) as chat:
        try:
            assert chat.stdout is not None
            assert chat.stdout.read(3) == "Hel"
            chat.send_signal(signal.SIGINT)
            assert chat.wait(240) == 130
        finally:
            chat.kill()
    assert script.stalls.wait(240)


@pytest.mark.parametrize("gets_hangup", [True, False])
def test_chat_ends_with_its_terminal(script: Script, gets_hangup: bool) -> None:
    terminal = Pty("chat", "--url", script.url, gets_hangup=gets_hangup)
    terminal.expect("> ")
    assert terminal.vanish() in (1, -signal.SIGHUP)
