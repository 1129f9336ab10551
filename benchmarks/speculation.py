"""Measure what speculation gains, and whether adaptive drafts beat fixed ones: Crossdock without and with, and vLLM.

    python benchmarks/speculation.py --streams 1                # one stream: 6 minutes
    python benchmarks/speculation.py --streams 8                # eight streams: 6 minutes
    python benchmarks/speculation.py --streams 64 --workloads chat all --tokens 96   # a full batch: 5 minutes
    python benchmarks/speculation.py --settings none grammar adaptive --workloads forms    # JSON schemas: 2 minutes
    python benchmarks/speculation.py --settings vllm vllm-ngram --streams 1 8   # after peers/vllm.sh install: 6 minutes
    python benchmarks/speculation.py --settings none adaptive head --head HEAD --workloads chat   # 4 minutes

Prompts are those of speculation_inputs.py: three workloads whose answers repeat the prompt (quotes, edits of programs,
JSON from text), free chat, and `all`, in which the four are mixed; and `forms`, whose answers follow a JSON schema
each, so that a grammar dictates many of their tokens. `head` drafts with a head of EAGLE-3, such as
models/eagle_head.py trains; `adaptive` looks up what followed the same tokens before. Answers are greedy. The default
model, SmolLM2-135M-Instruct, copies less faithfully than a large model, and it repeats itself, also in free chat: both
count as repetition here. So look at the differences between settings, not at how much a workload gains.

Each cell of the table is a closed loop of so many streams, each with its next prompt as soon as an answer ends. Prints
output tokens per second, gaps between events in ms (an event has several tokens where drafts were accepted), the
accepted share of drafts by the server's own counters, and the share of answers that equal those of the first setting.
In bfloat16, a row of a larger batch may be rounded in another way, and a near tie may fall the other way.

Settings run one at a time, each on a server of its own, and alternate in every repeat. Run nothing else beside them.
"""

import argparse
import asyncio
import itertools
import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from in_turn import in_turn, report
from servers import RunningServer, add_peer_option, add_server_options, crossdock_command, peer_command
from speculation_inputs import CHATS, FORMS, WORKLOADS
from tables import Row, cell, markdown

from crossdock.cluster.bench.http import BenchError, Endpoint, TokenStream
from crossdock.cluster.bench.metrics import Sample, spread_ms
from crossdock.cluster.watch.scrape import Scrape
from crossdock.workers.model.weights.checkpoint import default_model_dir

MOST = 8  # drafts of a stream, where the length is not fixed


def _ours(num_tokens: int, adaptive: bool) -> tuple[str, str]:
    config = {"method": "ngram", "num_speculative_tokens": num_tokens, "adaptive": adaptive}
    return "--speculative-config", json.dumps(config)


SETTINGS: dict[str, tuple[str, ...]] = {  # flags by the name of the setting; names that begin with vllm are vLLM's
    "none": (),
    **{f"fixed-{length}": _ours(length, adaptive=False) for length in (2, 4, 8)},
    "adaptive": _ours(MOST, adaptive=True),
    "grammar": ("--speculative-config", json.dumps({"method": "grammar", "num_speculative_tokens": MOST})),
    "head": (),  # with a directory that is known when the script runs: see `command`
    "vllm": (),
    "vllm-ngram": (
        "--speculative-config",
        json.dumps({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5}),
    ),
}
OURS = [name for name in SETTINGS if not name.startswith("vllm")]
OF_SOME = ("grammar", "head")  # settings for some workloads, or models, which are measured when they are asked for
DRAFTED = ("crossdock_draft_tokens_total", "vllm:spec_decode_num_draft_tokens_total")  # the server has one of them
FORCED = ("crossdock_draft_tokens_forced_total",)
ACCEPTED = ("crossdock_draft_tokens_accepted_total", "vllm:spec_decode_num_accepted_tokens_total")


@dataclass
class Answers:
    """The samples of one cell, and the texts in the order of their requests."""

    samples: list[Sample] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)


class Question(NamedTuple):
    """One request of a workload."""

    prompt: str
    is_chat: bool
    schema: str = ""  # JSON, which the answer must follow; empty: none


def questions(workload: str) -> Iterator[Question]:
    """Yield the questions of a workload, again and again."""
    names = list(WORKLOADS) if workload == "all" else [workload]
    while True:
        if workload == "forms":
            yield from (Question(prompt, True, schema) for prompt, schema in FORMS)
            continue
        for group in zip(*(WORKLOADS[name] for name in names), strict=True):
            yield from map(Question, group, (name in CHATS for name in names))


# -- one measurement -------------------------------------------------------------------------------------------------


async def ask(endpoint: Endpoint, number: int, question: Question, args: argparse.Namespace) -> tuple[Sample, str]:
    """Send one request and read its stream; return how it went, and the text."""
    prompt, is_chat, schema = question
    content: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
    if schema:
        form = {"name": "form", "schema": json.loads(schema), "strict": True}
        content["response_format"] = {"type": "json_schema", "json_schema": form}
    body = {"model": args.served, "max_tokens": args.tokens, "temperature": 0, "stream": True, **content}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    sample, received = Sample("request", args.tokens, 0), bytearray()
    stream = TokenStream(sample)

    def read(data: bytes, now: float) -> None:
        received.extend(data)
        stream.feed(data, now)

    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    exchange = await endpoint.exchange("POST", path, json.dumps(body).encode(), on_body=read)
    if exchange.response.status != 200 or not sample.ok:
        raise BenchError(f"request {number}: {exchange.response.status} {bytes(exchange.body)[:200]!r} {sample.error}")
    return sample, text_of(bytes(received))


def text_of(received: bytes) -> str:
    """Return the text of a stream of events."""
    events = [json.loads(line[6:]) for line in received.split(b"\n") if line.startswith(b"data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


async def load(address: str, workload: str, streams: int, args: argparse.Namespace) -> tuple[Answers, float]:
    """Return the answers of one cell and its seconds: a closed loop of `streams` clients."""
    endpoint, answers = Endpoint(address, {}), Answers()
    count = max(args.requests, 2 * streams if streams < 32 else streams)
    jobs = iter(list(enumerate(islice(questions(workload), count))))

    async def client() -> None:
        for number, question in jobs:
            sample, answers.texts[number] = await ask(endpoint, number, question, args)
            answers.samples.append(sample)

    loop = asyncio.get_running_loop()
    started = loop.time()
    await asyncio.gather(*(client() for _ in range(streams)))
    return answers, loop.time() - started


def measure(server: RunningServer, workload: str, streams: int, args: argparse.Namespace) -> tuple[Row, dict[int, str]]:
    """Return the figures of one cell and its texts."""
    before = scraped(server.address)
    answers, seconds = asyncio.run(load(server.address, workload, streams, args))
    change = scraped(server.address).since(before)
    tokens = sum(sample.output_tokens for sample in answers.samples)
    gaps = spread_ms([gap for sample in answers.samples for gap in sample.gaps])
    row: Row = {"tok/s": tokens / seconds, "gap p99": gaps.get("p99", float("nan")), "tokens": tokens}
    drafted, accepted, forced = (
        sum(change.total(name) or 0 for name in names) for names in (DRAFTED, ACCEPTED, FORCED)
    )
    if drafted:
        row |= {"accepted %": 100 * accepted / drafted, "drafted": drafted, "forced": forced}
    return row, answers.texts


def scraped(address: str) -> Scrape:
    """Return the server's counters now."""
    return Scrape.parse(httpx.get(f"{address}/metrics", timeout=30).text, 0.0)


# -- the report ------------------------------------------------------------------------------------------------------


def table(rows: Mapping[str, Row]) -> str:
    """Return one row per setting. `gain`: tokens per second beside those of the same server without drafts."""
    heads = ("gap p99", "drafted", "forced", "accepted %", "same answers %", "others CPU %")
    lines = [["setting", "tok/s", "gain", *heads]]
    for name, row in rows.items():
        base = rows.get("vllm" if name.startswith("vllm") else "none", {}).get("tok/s")
        gain = row["tok/s"] / base if base else None
        names = ("gap p99", "drafted", "forced", "accepted %", "same %", "others CPU %")
        lines.append([name, cell(row["tok/s"]), cell(gain), *(cell(row.get(key)) for key in names)])
    return markdown(lines)


def verdict(rows: Mapping[str, Row]) -> str:
    """Return adaptive beside the best fixed number of drafts and beside none, in words."""
    speeds = {name: row["tok/s"] for name, row in rows.items() if name in OURS}
    fixed = [name for name in speeds if name not in ("adaptive", *OF_SOME)]
    if "adaptive" not in speeds or not fixed:
        return ""
    best, ours = max(fixed, key=lambda name: speeds[name]), speeds["adaptive"]
    return f"Adaptive {ours:.0f} tok/s, {ours / speeds[best]:.2f} times the best of the others ({best}).\n"


# -- all settings ----------------------------------------------------------------------------------------------------


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="Hugging Face directory (default: the embedded model)")
    usual = [name for name in OURS if name not in OF_SOME]
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=usual)
    parser.add_argument("--workloads", nargs="+", choices=[*WORKLOADS, "all", "forms"], default=[*WORKLOADS, "all"])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8], help="clients at a time")
    parser.add_argument("--requests", type=int, default=6, help="least requests of a cell (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=160, help="most tokens of an answer (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--head", type=Path, help="directory of the head of setting head")
    add_peer_option(parser)
    add_server_options(parser, "speculation", 8413)
    args = parser.parse_args()
    args.model = args.model or default_model_dir()
    if "head" in args.settings and args.head is None:
        parser.error("setting head needs --head")
    return args


def command(args: argparse.Namespace, name: str, _: Path) -> list[str]:
    """Return the command that serves the model with one setting."""
    if name == "head":
        config = {"method": "eagle3", "model": str(args.head), "num_speculative_tokens": 3}
        return crossdock_command(args, "--speculative-config", json.dumps(config))
    if not name.startswith("vllm"):
        return crossdock_command(args, *SETTINGS[name])
    return peer_command(args, "vllm", 2048, "--max-num-seqs", "64", *SETTINGS[name])


def cells(
    args: argparse.Namespace, first: dict[str, dict[int, str]], _: str, server: RunningServer
) -> Iterator[tuple[str, Row]]:
    """Yield the figures of all cells. `first`: the texts of the first setting, by cell."""
    args.served = httpx.get(f"{server.address}/v1/models").json()["data"][0]["id"]
    asyncio.run(load(server.address, "all", 2, args))  # caches and kernels
    for streams, workload in itertools.product(args.streams, args.workloads):
        part = f"{workload}, {streams} stream{'s' * (streams > 1)}"
        row, texts = measure(server, workload, streams, args)
        same = first.setdefault(part, texts)
        row["same %"] = 100 * statistics.mean(same[key] == text for key, text in texts.items())
        yield part, row


def main() -> None:
    args = parse_args()
    passes = in_turn(args.settings, args, partial(command, args), partial(cells, args, {}))
    caption = f"answers of at most {args.tokens} tokens; times in ms"
    report(args, caption, passes, lambda part, rows: f"**{part}**\n\n{table(rows)}\n{verdict(rows)}")


if __name__ == "__main__":
    main()
