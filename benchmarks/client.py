"""How much CPU does the load generator spend on each token, and what would it spend on httpx?

    python benchmarks/client.py                     # about 10 seconds; no model, nothing else needed

The load generator often shares its cores with the server that it measures, so its own CPU time is an error of the
measurement. A scripted server in another process streams `--tokens` events to each of `--streams` clients, spaced
`--gap` seconds apart. Prints, for the load generator's own HTTP client and for httpx: CPU µs per token of this process.
Both parse every event, and both take the time of arrival once per read.
"""

import argparse
import asyncio
import json
import multiprocessing
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection

import httpx

from crossdock.cluster.bench.http import Endpoint, TokenStream
from crossdock.cluster.bench.metrics import Sample

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"


def event(number: int, count: int) -> bytes:
    """Return one HTTP chunk with one event, as Crossdock's server sends them."""
    choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": "length" if number == count else None}
    usage = {"prompt_tokens": 128, "completion_tokens": number, "total_tokens": 128 + number}
    body = {"id": "cmpl-1", "object": "text_completion", "model": "scripted", "choices": [choice], "usage": usage}
    data = b"data: " + json.dumps(body).encode() + b"\n\n"
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def serve(tokens: int, gap: float, port: Connection) -> None:
    """Stream `tokens` events to every client that connects, until this process is ended. Sends its port once."""
    events = [event(number, tokens) for number in range(1, tokens + 1)]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD)
        for part in events:
            writer.write(part)
            await asyncio.sleep(gap)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


async def own_client(url: str, sample: Sample) -> None:
    """Read one stream with the load generator's client."""
    await Endpoint(url, {}).exchange("GET", "/", on_body=TokenStream(sample).feed)


async def httpx_client(url: str, sample: Sample) -> None:
    """Read one stream with httpx, and its events with the same parser."""
    stream = TokenStream(sample)
    async with httpx.AsyncClient() as http, http.stream("GET", url) as answer:
        async for data in answer.aiter_bytes():
            stream.feed(data, time.perf_counter())


async def run(read: Callable[[str, Sample], Awaitable[None]], url: str, streams: int) -> list[Sample]:
    samples = [Sample("request", 0, 0) for _ in range(streams)]
    await asyncio.gather(*(read(url, sample) for sample in samples))
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8, help="clients at a time")
    parser.add_argument("--tokens", type=int, default=300, help="of each stream")
    parser.add_argument("--gap", type=float, default=0.01, help="seconds between two tokens of a stream")
    arguments = parser.parse_args()
    receiver, sender = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(arguments.tokens, arguments.gap, sender))
    process.start()
    try:
        url = f"http://127.0.0.1:{receiver.recv()}/"
        for name, read in (("own client", own_client), ("httpx", httpx_client)):
            asyncio.run(run(read, url, 1))  # imports and caches
            cpu = time.process_time()
            samples = asyncio.run(run(read, url, arguments.streams))
            cpu = time.process_time() - cpu
            tokens = sum(sample.output_tokens for sample in samples)
            assert tokens == arguments.streams * arguments.tokens, f"{name} saw {tokens} tokens"
            print(f"{name:12} {1e6 * cpu / tokens:6.0f} µs of CPU per token")
    finally:
        process.terminate()
        process.join()


if __name__ == "__main__":
    main()
