"""Do hostile requests disturb the streams beside them, fail in any other way than a clear 4xx, or leave memory behind?

    python benchmarks/hostile.py                     # about 4 minutes
    python benchmarks/hostile.py --only lists chats

Starts `crossdock serve`, streams one answer after the other from it, and sends the requests of hostile_requests.py one
after the other. Prints the gaps between the stream's tokens (ms) in quiet and beside the requests, those over twice the
quiet p99 by request, the times of another client's GET /health, the answers by status, and the memory (MiB) of ingress
and replica: after one ordinary request of each kind, and after each group of requests. Lists answers of 5xx, and memory
that in the end is more than 5 % larger than after the ordinary requests.
"""

import argparse
import json
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import httpx
from hostile_requests import GROUPS, HostileRequest, Slow, hostile_requests, ordinary_requests
from servers import add_server_options, command_line, crossdock_command, log_of, memory_mib, serving
from tables import Row, hardware, table, today, write

from crossdock.cluster.bench.metrics import spread_ms

STREAM = {"prompt": "Once upon a time", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
SETTLED_S = 2.0  # after a group of requests; the processes return their memory within a second
ROLES = ("ingress", "mixed")  # deployments, as Serve names their processes


class Span(NamedTuple):
    """Two moments, in seconds: of a gap, an answer, or a group of requests."""

    begin: float
    end: float


class Answered(NamedTuple):
    """How a request was answered: the status, or the client's error."""

    request: HostileRequest
    status: str
    span: Span


def read_streams(address: str, orders: Connection) -> None:
    """Read streams until told to stop. Sends the gaps between their tokens, and their texts."""
    gaps, texts = list[Span](), list[str]()
    with httpx.Client(base_url=address, timeout=120) as http:
        while not orders.poll():
            arrivals, text = list[float](), ""
            with http.stream("POST", "/v1/completions", json=STREAM) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        arrivals.append(time.monotonic())
                        data = json.loads(line[6:])
                        text += data["choices"][0]["text"] if "choices" in data else f"error {data}"
            gaps += [Span(*each) for each in pairwise(arrivals)]
            texts.append(text if answer.status_code == 200 else f"status {answer.status_code}")
    orders.send((gaps, texts))


def read_health(address: str, orders: Connection) -> None:
    """Ask for /health 20 times a second until told to stop. Sends the span of each answer."""
    answers = list[Span]()
    with httpx.Client(base_url=address, timeout=120) as http:
        while not orders.poll(0.05):
            begin = time.monotonic()
            http.get("/health").raise_for_status()
            answers.append(Span(begin, time.monotonic()))
    orders.send(answers)


@contextmanager
def beside(read: Callable[[str, Connection], None], address: str) -> Iterator[Callable[[], Any]]:
    """Run a reader in a process of its own, and yield a function that stops it and returns what it sends."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=read, args=(address, theirs), daemon=True)
    process.start()

    def stop() -> Any:
        ours.send("stop")
        return ours.recv()

    yield stop
    process.join()


def spread(found: Iterable[Span], phases: Sequence[Span]) -> Row:
    """Return the spread in ms of those that ended in one of the phases."""
    ended = [each for each in found if any(phase.begin <= each.end <= phase.end for phase in phases)]
    return spread_ms(each.end - each.begin for each in ended)


def memory(processes: set[int]) -> Row:
    """Return the memory (PSS) of ingress and replica in MiB."""
    titles = {pid: title for pid in processes if (title := command_line(pid)).startswith("ray::ServeReplica:")}
    return {role: memory_mib(pid for pid, title in titles.items() if f":{role}" in title) for role in ROLES}


def parts(body: bytes) -> Iterator[bytes]:
    """Yield the parts of a slow body."""
    size = -(-len(body) // 20)
    for start in range(0, len(body), size):
        time.sleep(0.1)
        yield body[start : start + size]


def attack(address: str, requests: Iterable[HostileRequest]) -> list[Answered]:
    """Send requests, one after the other."""
    found = []
    head = {"content-type": "application/json"}
    with httpx.Client(base_url=address, timeout=120) as http:
        for request in requests:
            begin = time.monotonic()
            body = parts(request.body) if isinstance(request.body, Slow) else request.body
            try:
                method = "GET" if request.body is None else "POST"
                answer = http.request(method, request.path, content=body, headers=head)
                status, text = str(answer.status_code), answer.text
                status += " (long)" if answer.status_code >= 400 and len(text) > 3000 else ""
            except httpx.HTTPError as error:
                status, text = type(error).__name__, str(error)
            found.append(Answered(request, status, Span(begin, time.monotonic())))
            seconds = found[-1].span.end - begin
            print(f"{status:>12} {seconds:7.3f} s  {request.group}: {request.name}: {text[:150]}", flush=True)
    return found


def slow_gaps(answered: Sequence[Answered], gaps: Iterable[Span], over_s: float) -> dict[str, Row]:
    """Return, by request, the number and the longest (ms) of the gaps of more than `over_s` that overlap it most."""
    found: dict[str, list[float]] = {}
    for begin, end in (gap for gap in gaps if gap.end - gap.begin > over_s):
        overlaps = [(min(end, each.span.end) - max(begin, each.span.begin), each.request) for each in answered]
        overlap, request = max(overlaps, key=lambda pair: pair[0])
        if overlap > 0:
            found.setdefault(f"{request.group}: {request.name}", []).append(1000 * (end - begin))
    rows: dict[str, Row] = {name: {"gaps": len(each), "longest": max(each)} for name, each in found.items()}
    return dict(sorted(rows.items(), key=lambda row: -row[1]["longest"]))


def statuses(answered: Sequence[Answered]) -> dict[str, Row]:
    """Return how often each group of requests had each status, and its slowest answer."""
    rows: dict[str, Row] = {}
    for group in dict.fromkeys(each.request.group for each in answered):
        own = [each for each in answered if each.request.group == group]
        slowest = max(each.span.end - each.span.begin for each in own)
        rows[group] = {**dict(sorted(Counter(each.status for each in own).items())), "slowest, s": slowest}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="", help="default: the embedded one")
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), default=list(GROUPS), help="groups of requests")
    parser.add_argument("--quiet", type=float, default=30.0, help="seconds of the stream alone (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="how often all requests are sent (default: %(default)s)")
    add_server_options(parser, "hostile", 18360)
    args = parser.parse_args()
    requests = [one for one in hostile_requests() if one.group in args.only]  # made here: that takes CPU time too
    with (
        serving("crossdock", crossdock_command(args), args, log_of(args, "crossdock")) as server,
        beside(read_streams, server.address) as streams,
        beside(read_health, server.address) as health,
    ):
        attack(server.address, ordinary_requests())
        begin = time.monotonic()
        time.sleep(args.quiet)
        quiet, hostile, answered = Span(begin, time.monotonic()), list[Span](), list[Answered]()
        memories = {"after ordinary requests": memory(server.processes)}
        for number in range(1, args.rounds + 1):
            for group in args.only:
                begin = time.monotonic()
                answered += attack(server.address, [one for one in requests if one.group == group])
                hostile.append(Span(begin, time.monotonic()))
                time.sleep(SETTLED_S)
                memories[f"after {group}, round {number}"] = memory(server.processes)
        (gaps, texts), answers = streams(), health()
    rows = {"quiet": spread(gaps, [quiet]), "beside hostile requests": spread(gaps, hostile)}
    rows |= {"/health in quiet": spread(answers, [quiet]), "/health beside": spread(answers, hostile)}
    slow = slow_gaps(answered, gaps, 2e-3 * rows["quiet"]["p99"])
    first, *_, last = memories.values()
    wrong = [f"{one.request.name}: {one.status}" for one in answered if not "200" <= one.status < "500"]
    wrong += [
        f"{role}: {last[role] / size:.0%} of its memory" for role, size in first.items() if last[role] > 1.05 * size
    ]
    text = [
        f"{today()}, {hardware()}; {len(answered)} requests\n",
        table(rows, "gaps of the stream, and times of /health, ms"),
        table(statuses(answered), "answers"),
        table(memories, "memory (PSS), MiB"),
        f"texts of the stream: {len(set(texts[:-1]))} different\n",
        table(slow, "gaps of more than twice the quiet p99, ms"),
        "no clear answer, or memory that stays:\n",
        *(f"- {one}" for one in wrong),
    ]
    write(args.output, "\n".join(text) + "\n", {"rows": rows, "slow": slow, "memory": memories, "wrong": wrong})


if __name__ == "__main__":
    main()
