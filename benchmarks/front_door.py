"""How much CPU time does a streamed token cost before and after the engine? Needs no model of any size.

    python benchmarks/front_door.py --streams 1,8,64

Serves a random model of two layers, so that the engine takes little, and streams answers of 128 tokens from as many
clients at a time as `--streams` says. Prints, by kind of request, the CPU time of each kind of process: microseconds a
token beside many streams, milliseconds a request of one token. Then the engine's device is emulated: how many
milliseconds pass from a client's send until the engine has the request, and from the end of the step that made a token
until the client has read the token (the first and the last one of each answer, whose times the engine's timelines
have). `--vllm VENV` measures vLLM's API server the same way
(`benchmarks/peers/vllm.sh install` makes the environment), and `--crossdock-option=--set=http.replicas=2` two
ingresses. CPU time, unlike seconds, hardly depends on what else runs.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from servers import (
    RunningServer,
    add_server_options,
    command_line,
    cpu_seconds,
    crossdock_command,
    crossdock_server,
    log_of,
    serving,
)
from tables import hardware, markdown, today
from transformers import AutoTokenizer

from crossdock.workers.model.weights.checkpoint import default_model_dir

sys.path.insert(0, str(Path(__file__).parent / "chaos"))
from fleet import tiny_model

LENGTH = 128  # tokens of an answer
WORDS = "The quick brown fox jumps over the lazy dog and runs away from the old grey house by the river. "
EMULATED = "emulated:l4-8b"  # a step takes 38 ms
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
MESSAGES = [{"role": "user", "content": WORDS}]


KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {  # path, the field of an answer's length, and other fields
    "chat": ("/v1/chat/completions", "max_tokens", {"messages": MESSAGES, "ignore_eos": True}),
    "completion": ("/v1/completions", "max_tokens", {"prompt": WORDS, "ignore_eos": True}),
    "tools": ("/v1/chat/completions", "max_tokens", {"messages": MESSAGES, "ignore_eos": True, "tools": [TOOL]}),
    "response": ("/v1/responses", "max_output_tokens", {"input": WORDS, "store": False}),
    "message": ("/v1/messages", "max_tokens", {"messages": MESSAGES}),
}
PROCESSES = {  # what a process is, by what its command line contains; the first that fits
    "ingress": ("ServeReplica:crossdock:ingress", "vllm serve", "APIServer"),
    "engine": ("ServeReplica", "EngineCore"),
    "controller": ("ServeController",),
    "GCS": ("gcs_server",),
    "raylet": ("raylet",),
}


def request_of(kind: str, length: int) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a request whose answer has so many tokens."""
    path, field, body = KINDS[kind]
    return path, {**body, field: length}


class Client:
    """One connection that sends requests one after the other, and reads each answer as bytes."""

    def __init__(self, address: str, model: str) -> None:
        host, _, port = address.removeprefix("http://").partition(":")
        self._host, self._port, self._model = host, int(port), model

    async def run(self, path: str, body: dict[str, Any], times: int) -> int:
        """Send a request so many times; return the number of events. Raises RuntimeError unless each is answered."""
        content = json.dumps({"model": self._model, "stream": True, "temperature": 0, **body}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
        num_events = 0
        for _ in range(times):
            writer.write(request)
            answer = await reader.readuntil(b"\r\n0\r\n\r\n")
            if not answer.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(answer[:500].decode())
            num_events += answer.count(b"data: ")
        writer.close()
        return num_events


def usage(server: RunningServer) -> dict[str, float]:
    """Return the CPU time of the processes of a server, by kind of process, in seconds."""
    sums: dict[str, float] = defaultdict(float)
    for pid in server.processes:
        line = command_line(pid)
        kind = next((kind for kind, marks in PROCESSES.items() if any(mark in line for mark in marks)), "other")
        sums[kind] += cpu_seconds([pid])
    return sums


class TimedClient(Client):
    """Notes when each token of its answers was read, in Unix seconds."""

    async def delays(self, length: int, times: int) -> list[tuple[float, float, float]]:
        """Return, for each answer, the seconds from the send to the engine, and those of the first and last token back.

        The engine's times are those of `/v1/requests/{id}`, to the millisecond. An answer before these is not counted.
        """
        found = []
        async with httpx.AsyncClient(base_url=f"http://{self._host}:{self._port}", timeout=120) as http:
            path, body = request_of("completion", length)
            body |= {"model": self._model, "stream": True, "return_token_ids": True}
            for _ in range(times + 1):
                sent, read, name = time.time(), list[float](), ""
                async with http.stream("POST", path, json=body) as answer:
                    async for line in answer.aiter_lines():
                        now, event = time.time(), line.removeprefix("data: ")
                        if event.startswith("{"):
                            [choice], name = (each := json.loads(event))["choices"], each["id"]
                            read += [now] * bool(choice.get("token_ids"))
                [timeline] = (await http.get(f"/v1/requests/{name}")).json()["requests"]
                arrived = timeline["arrived"]
                first, last = arrived + timeline["first_token_s"], arrived + timeline["ended_s"]
                found.append((arrived - sent, read[0] - first, read[-1] - last))
        return found[1:]


async def measure_delays(server: RunningServer, model: str, args: argparse.Namespace) -> list[list[str]]:
    rows = []
    for num_streams in map(int, args.streams.split(",")):
        clients = [TimedClient(server.address, model) for _ in range(num_streams)]
        times = max(1, args.delays // num_streams)
        answers = await asyncio.gather(*(client.delays(args.delay_tokens, times) for client in clients))
        each = list(zip(*(delays for client in answers for delays in client), strict=True))
        cells = [f"{1e3 * median(one):.1f} / {1e3 * sorted(one)[int(0.99 * len(one))]:.1f}" for one in each]
        rows.append([f"{num_streams}", *cells])
    return rows


async def measure(server: RunningServer, model: str, args: argparse.Namespace) -> list[list[str]]:
    rows = []
    for kind in args.kinds.split(","):
        for num_streams in map(int, args.streams.split(",")):
            times = max(1, args.tokens // (num_streams * LENGTH))
            seconds = await _seconds(server, model, request_of(kind, LENGTH), num_streams, times)
            num_tokens = num_streams * times * LENGTH
            rows.append([kind, f"{num_streams} streams, µs a token", *_cells(seconds, 1e6 / num_tokens)])
        seconds = await _seconds(server, model, request_of(kind, 1), 8, args.requests // 8)
        rows.append([kind, "ms a request of one token", *_cells(seconds, 1e3 / (args.requests // 8 * 8))])
    return rows


async def _seconds(
    server: RunningServer, model: str, request: tuple[str, dict[str, Any]], num_streams: int, times: int
) -> dict[str, float]:
    await Client(server.address, model).run(*request, 2)
    before = usage(server)
    await asyncio.gather(*(Client(server.address, model).run(*request, times) for _ in range(num_streams)))
    return {kind: seconds - before[kind] for kind, seconds in usage(server).items()}


def _cells(seconds: dict[str, float], factor: float) -> list[str]:
    return [f"{seconds.get(kind, 0.0) * factor:.3g}" for kind in (*PROCESSES, "other")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,8,64", help="clients at a time, joined by commas")
    parser.add_argument("--kinds", default="chat", help="kinds of requests: " + ",".join(KINDS))
    parser.add_argument("--tokens", type=int, default=40_000, help="tokens of a measurement")
    parser.add_argument("--requests", type=int, default=400, help="requests of one token")
    parser.add_argument("--delays", type=int, default=128, help="answers whose delays are measured; 0: none")
    parser.add_argument("--delay-tokens", type=int, default=32, help="of each of these")
    parser.add_argument("--vllm", type=Path, help="an environment with vLLM, which is measured too")
    add_server_options(parser, "front-door", 8190)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = AutoTokenizer.from_pretrained(default_model_dir())
        args.model = tiny_model(Path(folder) / "tiny", tokenizer, num_heads=2)  # vLLM has no heads of 16 on CPUs
        flags = ("--max-num-seqs", "64", "--max-model-len", "2048", "--dtype", "float32")
        commands = {"Crossdock": crossdock_command(args, *flags)}
        if args.vllm is not None:
            script = Path(__file__).parent / "peers" / "vllm.sh"
            options = ("--port", str(args.port), "--venv", str(args.vllm), "--served-model-name", "tiny", *flags)
            commands["vLLM"] = [str(script), "serve", str(args.model), *options]
        for name, command in commands.items():
            with serving(name, command, args, log_of(args, name)) as server:
                rows = asyncio.run(measure(server, "tiny", args))
            print(f"\n{name}; {hardware()}, {today()}\n")
            print(markdown([["requests", "", *PROCESSES, "other"], *rows]), flush=True)
        if args.delays:
            with crossdock_server(args, "--max-model-len", "2048", "--device", EMULATED, name="emulated") as server:
                rows = asyncio.run(measure_delays(server, "tiny", args))
            print(f"\nCrossdock, an emulated device, ms of the path, median / p99; {hardware()}, {today()}\n")
            print(markdown([["streams", "request to engine", "first token back", "last token back"], *rows]))


if __name__ == "__main__":
    main()
