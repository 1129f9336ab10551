"""`crossdock chat`: one conversation with any OpenAI endpoint in the terminal, streamed."""

import contextlib
import json
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import httpx
import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from crossdock.cluster.watch.address import server_root

HELP = "/reset forgets the conversation · /system TEXT sets the system prompt · /quit exits · Ctrl-C stops an answer"


class ChatError(Exception):
    """The server cannot be reached, or refused the request; the message is for the user."""


class Piece(NamedTuple):
    """A part of the answer, or of the reasoning before it."""

    text: str
    is_reasoning: bool = False


@dataclass(slots=True)
class Conversation:
    """The messages so far. The base URL of `http` is the server's address, ending in /v1."""

    http: httpx.Client
    model: str
    system: str | None = None
    options: dict[str, Any] = field(default_factory=dict)  # fields of the request: temperature, max_tokens, …
    turns: list[dict[str, str]] = field(default_factory=list)
    usage: dict[str, Any] | None = None  # of the last answer, if that was complete

    def say(self, text: str) -> Generator[Piece, None, None]:
        """Yield the pieces of the answer. Closing the iterator stops the server; the answer so far stays in `turns`.

        Reasoning does not stay. A message without any answer is removed from `turns`.

        Raises:
            ChatError: the server cannot be reached, refused the request, or broke off.
        """
        self.turns.append({"role": "user", "content": text})
        self.usage = None
        answer: list[str] = []
        try:
            for event in self._events():
                self.usage = event.get("usage") or self.usage
                for choice in event.get("choices", ()):
                    delta = choice.get("delta", {})
                    if thought := delta.get("reasoning") or delta.get("reasoning_content"):
                        yield Piece(thought, is_reasoning=True)
                    if content := delta.get("content"):
                        answer.append(content)
                        yield Piece(content)
        finally:
            if answer:
                self.turns.append({"role": "assistant", "content": "".join(answer)})
            else:
                self.turns.pop()

    def reset(self) -> None:
        self.turns.clear()

    def _events(self) -> Iterator[dict[str, Any]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {
            "model": self.model,
            "messages": system + self.turns,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.options,
        }
        with _reachable(self.http), self.http.stream("POST", "chat/completions", json=body) as response:
            if response.is_error:
                response.read()
                raise ChatError(_reason(response))
            for line in _lines(response.iter_bytes()):
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise ChatError(event["error"].get("message", str(event["error"])))
                yield event
        raise ChatError("the server ended the answer before it was complete")


def connect(url: str, api_key: str | None = None) -> httpx.Client:
    """Return a client for the API at `url`, which may end in /v1 or not."""
    base = server_root(url) + "/v1/"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # No limit on reading: a prompt may wait in the server's queue, and Ctrl-C stops the answer.
    return httpx.Client(base_url=base, headers=headers, timeout=httpx.Timeout(None, connect=10))


def first_model(http: httpx.Client) -> str:
    """Return the first model that the server lists."""
    with _reachable(http):
        response = http.get("models", timeout=30)  # a busy ingress takes seconds
        if response.is_error:
            raise ChatError(_reason(response))
        models = response.json().get("data", [])
    if not models:
        raise ChatError(f"{http.base_url} serves no model")
    return str(models[0]["id"])


def chat(
    message: Annotated[str | None, typer.Argument(help="Send this, print the answer, and exit.")] = None,
    url: Annotated[str, typer.Option(help="Address of the server, with or without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the first model that the server lists.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 always takes the likeliest token.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answers.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Sent as bearer token.", envvar=["CROSSDOCK_API_KEY", "OPENAI_API_KEY"])
    ] = None,
) -> None:
    """Talk to a served model in the terminal. Text from a pipe is one message."""
    options = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    options = {name: value for name, value in options.items() if value is not None}
    try:
        with connect(url, api_key) as http:
            talk = Conversation(http, model or first_model(http), system, options)
            if message is None and not sys.stdin.isatty():
                message = sys.stdin.read().strip()
            if message is not None:
                _print(talk.say(message), Console())
            else:
                _Terminal(talk).run()
    except ChatError as error:
        Console(stderr=True).print(f"[red]chat:[/red] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


class _Terminal:
    """The dialogue at a terminal: reads lines, prints answers."""

    def __init__(self, talk: Conversation) -> None:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives input() a history and editing
        self.talk = talk
        self.console = Console()

    def run(self) -> None:
        self.console.print(f"[bold]{escape(self.talk.model)}[/bold] [dim]{HELP}[/dim]", highlight=False)
        while True:
            try:
                line = input("> ").strip()
            except (EOFError, KeyboardInterrupt):
                self.console.print()
                return
            if line in ("/quit", "/exit"):
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._answer(line)

    def _command(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        match command:
            case "/reset":
                self.talk.reset()
                reply = "conversation forgotten"
            case "/system":
                self.talk.system = rest.strip() or None
                reply = "system prompt set" if self.talk.system else "no system prompt"
            case "/help":
                reply = HELP
            case _:
                reply = f"no such command: {command}. {HELP}"
        self.console.print(f"[dim]{escape(reply)}[/dim]", highlight=False)

    def _answer(self, line: str) -> None:
        asked = time.perf_counter()
        try:
            note = self._pace(asked, _print(self.talk.say(line), self.console) or asked)
        except KeyboardInterrupt:
            note = "stopped"
        except ChatError as error:
            note = f"error: {error}"
        self.console.print(f"[dim]{escape(note)}[/dim]", highlight=False)

    def _pace(self, asked: float, first: float) -> str:
        note = f"first token after {first - asked:.2f} s"
        tokens = (self.talk.usage or {}).get("completion_tokens", 0)
        if tokens > 1:
            note = f"{tokens} tokens · {note} · {(tokens - 1) / (time.perf_counter() - first):.1f} tokens/s"
        return note


def _print(pieces: Generator[Piece, None, None], console: Console) -> float | None:
    """Print the answer as it comes, and return when its first piece came; None: there was none.

    Reasoning is for people alone: a pipe gets the answer.
    """
    first = None
    is_after_reasoning = False
    with contextlib.closing(pieces):
        try:
            for text, is_reasoning in pieces:
                first = first or time.perf_counter()
                if is_reasoning and not console.is_terminal:
                    continue
                if is_after_reasoning and not is_reasoning:
                    sys.stdout.write("\n\n")
                is_after_reasoning = is_reasoning
                if is_reasoning:
                    console.print(Text(text, style="dim"), end="", soft_wrap=True)
                else:
                    sys.stdout.write(text)
                sys.stdout.flush()
        finally:
            if first is not None:
                sys.stdout.write("\n")
    return first


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the lines of server-sent events. httpx's `iter_lines` also splits at U+2028, which JSON may contain."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    if rest:
        yield rest


@contextlib.contextmanager
def _reachable(http: httpx.Client) -> Iterator[None]:
    try:
        yield
    except httpx.ConnectError:
        raise ChatError(f"no server at {http.base_url}; start one with: crossdock serve") from None
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise ChatError(f"url: {error}") from None
    except httpx.HTTPError as error:
        raise ChatError(f"the connection to {http.base_url} failed: {error or type(error).__name__}") from None


def _reason(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code} {response.reason_phrase}"
