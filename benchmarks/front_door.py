"""How much CPU time does a streamed token cost before and after the engine? Needs no model of any size.

    python benchmarks/front_door.py --streams 1,8,64

Serves a random model of two layers, so that the engine takes little, and streams answers of 128 tokens from as many
clients at a time as `--streams` says. Prints the CPU time of each kind of process: microseconds a token beside many
streams, milliseconds a request of one token. `--vllm VENV` measures vLLM's API server the same way
(`benchmarks/peers/vllm.sh install` makes the environment), and `--crossdock-option=--set=http.replicas=2` two
ingresses. CPU time, unlike seconds, hardly depends on what else runs.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from memory import role_of
from servers import RunningServer, add_server_options, cpu_seconds, crossdock_command, log_of, serving
from tables import Row, hardware, table, today
from transformers import AutoTokenizer

from crossdock.workers.model.weights.checkpoint import default_model_dir

sys.path.insert(0, str(Path(__file__).parent / "chaos"))
from fleet import tiny_model

LENGTH = 128  # tokens of an answer
WORDS = "The quick brown fox jumps over the lazy dog and runs away from the old grey house by the river. "
CHAT = {"messages": [{"role": "user", "content": WORDS}], "ignore_eos": True}


async def send(address: str, length: int, times: int) -> None:
    """Send a chat so many times on one connection, and read the answers of so many tokens as bytes.

    Raises:
        RuntimeError: an answer is an error.
    """
    host, _, port = address.removeprefix("http://").partition(":")
    content = json.dumps({"model": "tiny", "stream": True, "temperature": 0, "max_tokens": length, **CHAT}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    for _ in range(times):
        writer.write(request)
        answer = await reader.readuntil(b"\r\n0\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(answer[:500].decode())
    writer.close()


def usage(server: RunningServer) -> Row:
    """Return the CPU time of the processes of a server, by role, in seconds."""
    sums: Row = defaultdict(float)
    for pid in server.processes:
        sums[role_of(pid)] += cpu_seconds([pid])
    return sums


async def measure(server: RunningServer, args: argparse.Namespace) -> dict[str, Row]:
    """Return the CPU time by role, for each number of streams and for requests of one token."""
    rows = {}
    for num_streams in map(int, args.streams.split(",")):
        times = max(1, args.tokens // (num_streams * LENGTH))
        factor = 1e6 / (num_streams * times * LENGTH)
        rows[f"{num_streams} streams, µs a token"] = await _used(server, LENGTH, num_streams, times, factor)
    times = args.requests // 8
    rows["ms a request of one token"] = await _used(server, 1, 8, times, 1e3 / (8 * times))
    return rows


async def _used(server: RunningServer, length: int, num_streams: int, times: int, factor: float) -> Row:
    await send(server.address, length, 2)
    before = usage(server)
    await asyncio.gather(*(send(server.address, length, times) for _ in range(num_streams)))
    return {role: factor * (seconds - before[role]) for role, seconds in usage(server).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,8,64", help="clients at a time, joined by commas")
    parser.add_argument("--tokens", type=int, default=40_000, help="tokens of a measurement")
    parser.add_argument("--requests", type=int, default=400, help="requests of one token")
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
                rows = asyncio.run(measure(server, args))
            print(f"\n{name}; {hardware()}, {today()}\n")
            print(table(rows, "requests"), flush=True)


if __name__ == "__main__":
    main()
