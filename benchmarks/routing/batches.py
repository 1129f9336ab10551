"""Measure what a batch costs interactive streams beside it, and what is left of its pace.

    python benchmarks/routing/batches.py --lines 2000

Serves the embedded model with a folder for batches. Runs a batch alone, then the same lines beside four interactive
streams (one answer after the other, of the class `--class`), and the streams alone. Prints the batch's output
tokens a second in both runs, their ratio to what it gets alone minus the streams' tokens, and the p50 and p99 of the
streams' gaps, whose promise is 50 ms for `interactive` and 100 ms for `standard`.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for servers
from servers import add_server_options, crossdock_server

OUTPUT, STREAMS = 24, 4  # tokens of a line, streams
TEXT = "Name a river, a city and a colour. Question number {}."


def lines(count: int) -> bytes:
    made = [
        {
            "custom_id": f"c{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": TEXT.format(number), "max_tokens": OUTPUT, "ignore_eos": True, "seed": number},
        }
        for number in range(count)
    ]
    return b"".join(json.dumps(each).encode() + b"\n" for each in made)


async def run_batch(http: httpx.AsyncClient, content: bytes) -> float:
    """Run a batch to its end, and return its output tokens a second."""
    form: Any = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", content)}}
    file = (await http.post("/v1/files", **form)).json()["id"]
    body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    began = time.perf_counter()
    name = (await http.post("/v1/batches", json=body)).json()["id"]
    while (batch := (await http.get(f"/v1/batches/{name}")).json())["status"] != "completed":
        if batch["status"] in ("failed", "expired", "cancelled"):
            raise RuntimeError(f"the batch is {batch['status']}: {batch['errors']}")
        await asyncio.sleep(0.25)
    counts = batch["request_counts"]
    if counts["failed"] or counts["completed"] != counts["total"]:
        raise RuntimeError(f"lines failed: {counts}")
    return counts["total"] * OUTPUT / (time.perf_counter() - began)


async def stream(http: httpx.AsyncClient, number: int, slo_class: str, gaps: list[float]) -> None:
    """Read one answer after the other until cancelled, and note the seconds between two events of text."""
    count = 0
    while True:
        count += 1
        body = {"prompt": f"Stream {number}, story {count}:", "max_tokens": 128, "ignore_eos": True, "stream": True}
        head, before = {"X-SLO-Class": slo_class}, 0.0
        async with http.stream("POST", "/v1/completions", json=body, headers=head) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    now = time.perf_counter()
                    if before:
                        gaps.append(now - before)
                    before = now


async def streams(http: httpx.AsyncClient, slo_class: str, name: str, work: Any) -> tuple[float, Any]:
    """Run streams beside `work`, and print their gaps. Returns their tokens a second, and the result of the work."""
    gaps = list[float]()
    began = time.perf_counter()
    tasks = [asyncio.create_task(stream(http, number, slo_class, gaps)) for number in range(STREAMS)]
    try:
        result = await work
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    taken = len(gaps) / (time.perf_counter() - began)
    p50, p99 = np.percentile(gaps, [50, 99]) * 1e3
    print(f"{STREAMS} streams {name}: gaps p50 {p50:.0f} ms, p99 {p99:.0f} ms ({len(gaps)} tokens)", flush=True)
    return taken, result


async def measure(address: str, count: int, alone_s: float, slo_class: str) -> None:
    async with httpx.AsyncClient(base_url=address, timeout=None) as http:
        with suppress(httpx.HTTPError):
            await run_batch(http, lines(32))  # warms up
        alone = await run_batch(http, lines(count))
        await streams(http, slo_class, "alone", asyncio.sleep(alone_s))
        taken, beside = await streams(http, slo_class, "beside the batch", run_batch(http, lines(count)))
    print(f"batch of {count} lines: alone {alone:.0f} tokens/s, beside {STREAMS} streams {beside:.0f} tokens/s")
    share = beside / max(alone - taken, 1e-9)
    print(f"streams took {taken:.0f} tokens/s; the batch has {share:.2f} of what it gets alone minus that")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--alone", type=float, default=20.0, help="seconds of the streams alone")
    parser.add_argument("--class", dest="slo_class", default="interactive", help="of the streams")
    add_server_options(parser, "batches", 31990)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        crossdock_server(args, "--batch-folder", folder, "--max-model-len", "2048") as server,
    ):
        asyncio.run(measure(server.address, args.lines, args.alone, args.slo_class))


if __name__ == "__main__":
    sys.exit(main())
