"""Do hostile requests disturb the streams beside them, fail in any other way than a clear 4xx, or leave memory behind?

    python benchmarks/hostile.py                     # about 4 minutes
    python benchmarks/hostile.py --only lists chats

Starts `crossdock serve`, streams one answer after the other from it, and sends the requests of hostile_requests.py one
at a time, from several clients with --clients. Prints the gaps between the stream's tokens (p50, p99, longest; ms) in
quiet and beside the requests, the answers by status, the times of another client's GET /health, and the memory
(MiB) of ingress and replica: fresh, after one ordinary request of each kind, and after each group of requests. Lists
answers of 5xx, and memory that in the end is more than 5 % larger than after the ordinary requests.
"""

import argparse
import json
import multiprocessing
import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
from hostile_memory import STORED, Slow
from hostile_requests import GROUPS, HostileRequest, hostile_requests, ordinary_requests
from servers import add_server_options, crossdock_command, log_of, serving
from tables import Row, hardware, table, today, write

STREAM: dict[str, Any] = {
    "prompt": "Once upon a time",
    "max_tokens": 400,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}
SETTLED_S = 2.0  # after a group of requests; the processes return their memory within a second
ROLES = ("ingress", "mixed")  # deployments, as Serve names their processes


def read_streams(address: str, slo_class: str, orders: Connection) -> None:
    """Read streams of a class until told to stop. Sends the arrivals of each stream's tokens (s), and its text."""
    streams: list[tuple[list[float], str]] = []
    with httpx.Client(base_url=address, timeout=120) as http:
        while not orders.poll():
            arrivals: list[float] = []
            text = ""
            with http.stream("POST", "/v1/completions", json={**STREAM, "service_tier": slo_class}) as answer:
                if answer.status_code != 200:
                    text = f"status {answer.status_code}"
                    time.sleep(0.2)
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        arrivals.append(time.monotonic())
                        data = json.loads(line[6:])
                        text += data["choices"][0]["text"] if "choices" in data else f"error {data}"
            streams.append((arrivals, text))
    orders.send(streams)


def read_health(address: str, orders: Connection) -> None:
    """Ask for /health 20 times a second until told to stop. Sends (end, seconds) of each answer."""
    answers: list[tuple[float, float]] = []
    with httpx.Client(base_url=address, timeout=120) as http:
        while not orders.poll(0.05):
            begin = time.monotonic()
            http.get("/health").raise_for_status()
            answers.append((time.monotonic(), time.monotonic() - begin))
    orders.send(answers)


def health(answers: list[tuple[float, float]], phases: list[tuple[float, float]]) -> Row:
    """Return the times of the answers that ended in one of the phases, in ms."""
    found = sorted(1000 * s for at, s in answers if any(begin <= at <= end for begin, end in phases))
    return {
        "answers": len(found),
        "p50": found[len(found) // 2],
        "p99": found[int(0.99 * len(found))],
        "longest": found[-1],
    }


def gaps(streams: list[tuple[list[float], str]], phases: list[tuple[float, float]]) -> Row:
    """Return the gaps between tokens that ended in one of the phases, each (begin, end), in ms."""
    found = sorted(
        1000 * (after - before)
        for arrivals, _ in streams
        for before, after in pairwise(arrivals)
        if any(begin <= after <= end for begin, end in phases)
    )
    p50, p99 = (found[int(share * len(found))] for share in (0.5, 0.99))
    return {"gaps": len(found), "p50": p50, "p99": p99, "longest": found[-1]}


def memory(processes: set[int]) -> dict[str, float]:
    """Return the memory of ingress and replica in MiB; pages that processes share count once (PSS)."""
    found = {}
    for pid in processes:
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            sizes = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        for role in ROLES:
            if title.startswith("ray::ServeReplica:") and f":{role}" in title:
                pss = next(line for line in sizes.splitlines() if line.startswith("Pss:"))
                found[role] = int(pss.split()[1]) / 1024
    return found


def parts(body: bytes) -> Iterator[bytes]:
    """Yield the parts of a slow body."""
    size = -(-len(body) // 20)
    for start in range(0, len(body), size):
        time.sleep(0.1)
        yield body[start : start + size]


def send(http: httpx.Client, request: HostileRequest) -> tuple[str, float, str]:
    """Send a request. Returns the status or the client's error, seconds, and the beginning of the answer."""
    begin = time.monotonic()
    try:
        method = "GET" if request.body is None else "POST"
        body = parts(request.body) if isinstance(request.body, Slow) else request.body
        answer = http.request(method, request.path, content=body, headers=request.headers)
        status, text = str(answer.status_code), answer.text[:300]
        if answer.status_code >= 400 and len(answer.content) > 3000:
            status += " (long)"
    except httpx.HTTPError as error:
        status, text = type(error).__name__, str(error)
    return status, time.monotonic() - begin, text


def attack(address: str, requests: list[HostileRequest]) -> list[dict[str, Any]]:
    """Send requests, one after the other."""
    results, stored = [], ""
    with httpx.Client(base_url=address, timeout=120) as http:
        for request in requests:
            status, seconds, text = send(http, replace(request, path=request.path.replace(STORED, stored)))
            if status == "200" and (name := re.match(r'{"id":"(resp_\w+)"', text)):
                stored = name[1]
            found = {"group": request.group, "name": request.name, "status": status, "s": seconds}
            results.append({**found, "at": time.monotonic()})
            print(f"{status:>12} {seconds:7.3f} s  {request.group}: {request.name}: {text[:150]}", flush=True)
    return results


def slow_gaps(results: list[dict[str, Any]], streams: list[tuple[list[float], str]], over: float) -> dict[str, Row]:
    """Return, by request, the number and the longest (ms) of the stream's gaps of more than `over` ms beside it.

    A gap counts for the request with which it overlaps most.
    """
    found: dict[str, list[float]] = {}
    for arrivals, _ in streams:
        for before, after in pairwise(arrivals):
            if 1000 * (after - before) <= over:
                continue
            overlaps = [
                (min(after, one["at"]) - max(before, one["at"] - one["s"]), f"{one['group']}: {one['name']}")
                for one in results
            ]
            overlap, name = max(overlaps)
            if overlap > 0:
                found.setdefault(name, []).append(1000 * (after - before))
    rows = {name: Row(gaps=len(each), longest=max(each)) for name, each in found.items()}
    return dict(sorted(rows.items(), key=lambda row: -max(found[row[0]])))


def report(
    results: list[dict[str, Any]],
    rows: dict[str, Row],
    slow: dict[str, Row],
    memories: dict[str, Row],
    texts: set[str],
) -> str:
    """Return the results as Markdown."""
    statuses: dict[str, Row] = {}
    for group in dict.fromkeys(one["group"] for one in results):
        counts = Counter(one["status"] for one in results if one["group"] == group)
        slowest = max(one["s"] for one in results if one["group"] == group)
        statuses[group] = {**dict(sorted(counts.items())), "slowest, s": slowest}
    wrong = [
        f"{one['group']}: {one['name']}: {one['status']}"
        for one in results
        if not one["status"][:3].isdecimal() or one["status"] >= "5"
    ]
    _, first, *_, last = memories.values()
    wrong += [
        f"{role}: {last[role] / size:.0%} of its memory" for role, size in first.items() if last[role] > 1.05 * size
    ]
    lines = [
        f"{today()}, {hardware()}; {len(results)} requests\n",
        table(rows, "gaps of the stream, and times of /health, ms"),
        table(statuses, "answers"),
        table(memories, "memory (PSS), MiB"),
        f"texts of the stream: {len(texts)} different\n",
        table(slow, "gaps of more than twice the quiet p99, ms"),
        "\nno clear answer, or memory that stays:\n",
        *(f"- {one}" for one in wrong),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="", help="default: the embedded one")
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), default=list(GROUPS), help="groups of requests")
    parser.add_argument("--quiet", type=float, default=30.0, help="seconds of the stream alone (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="how often all requests are sent (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=1, help="that send at once (default: %(default)s)")
    parser.add_argument("--slo-class", default="standard", help="class of the stream (default: %(default)s)")
    add_server_options(parser, "hostile", 18360)
    args = parser.parse_args()
    requests = [one for one in hostile_requests() if one.group in args.only]  # made here: that takes CPU time too
    command = [part for part in crossdock_command(args) if part]
    with serving("crossdock", command, args, log_of(args, "crossdock")) as server:
        ours, theirs = multiprocessing.Pipe()
        reader = multiprocessing.Process(target=read_streams, args=(server.address, args.slo_class, theirs))
        reader.start()
        asked, asking = multiprocessing.Pipe()
        other = multiprocessing.Process(target=read_health, args=(server.address, asking))
        other.start()
        time.sleep(3)
        memories = {"fresh": Row(memory(server.processes))}
        attack(server.address, list(ordinary_requests()))
        begin = time.monotonic()
        time.sleep(args.quiet)
        memories["after ordinary requests"] = Row(memory(server.processes))
        quiet, beside, results = (begin, time.monotonic()), [], []
        for number in range(1, args.rounds + 1):
            for group in args.only:
                begin = time.monotonic()
                chosen = [one for one in requests if one.group == group]
                with ThreadPoolExecutor(args.clients) as pool:
                    for found in pool.map(lambda _, chosen=chosen: attack(server.address, chosen), range(args.clients)):
                        results += found
                beside.append((begin, time.monotonic()))
                time.sleep(SETTLED_S)
                memories[f"after {group}, round {number}"] = Row(memory(server.processes))
        ours.send("stop")
        streams = ours.recv()
        reader.join()
        asked.send("stop")
        answers = asked.recv()
        other.join()
    rows = {"quiet": gaps(streams, [quiet]), "beside hostile requests": gaps(streams, beside)}
    rows |= {"/health in quiet": health(answers, [quiet]), "/health beside": health(answers, beside)}
    slow = slow_gaps(results, streams, 2 * rows["quiet"]["p99"])
    texts = {text for _, text in streams[:-1]}
    found = {"rows": rows, "slow": slow, "memory": memories, "results": results}
    write(args.output, report(results, rows, slow, memories, texts), found)


if __name__ == "__main__":
    main()
