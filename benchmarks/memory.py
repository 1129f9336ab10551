"""How much memory does `crossdock serve` take, process by process, and how long does it take to start?

    python benchmarks/memory.py                       # about a minute
    python benchmarks/memory.py --repeats 3 --crossdock-option=--cpu-kernels=onednn

Starts `crossdock serve` on a free port. Prints the seconds and CPU seconds until `/ready`; then, after a few requests,
the memory of each process in MiB. Pages that several processes share count once (PSS). `private` is what no other
process has; the rest is mostly libraries that all of Python's processes map.
"""

import argparse
import os
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from servers import (
    add_server_options,
    command_line,
    cpu_seconds,
    crossdock_command,
    log_of,
    memory_of,
    serving,
)
from tables import Row, hardware, medians, table, today, write

MIB = 2**20
TITLES = {  # role: text in the command line of its process, the first that is found
    "raylet": "raylet/raylet",
    "replica": "ServeReplica:crossdock:mixed",
    "ingress": "ServeReplica:crossdock:ingress",
    "controller": "ServeController",
    "worker without work": "ray::IDLE",
    "worker that starts": "default_worker.py",
    "dashboard agent": "DashboardAgent",
    "runtime environment agent": "RuntimeEnvAgent",
    "grammar check": "grammar.vetting",
    "gcs": "gcs_server",
    "autoscaler": "autoscaler/_private/monitor.py",
    "log monitor": "log_monitor.py",
    "dashboard": "dashboard/dashboard.py",
    "driver": "crossdock serve",
    "API server of vLLM": "vllm serve",
    "engine of vLLM": "EngineCore",
}


def role_of(pid: int) -> str:
    """Return the role of a process by its command line; an empty text where the process has ended."""
    line = command_line(pid)
    role = next((role for role, text in TITLES.items() if text in line), None)
    return role or Path(line.split(" ")[0]).name


def memory_by_role(processes: set[int]) -> dict[str, Row]:
    """Return the memory of all processes of each role, the largest role first."""
    found: dict[str, Row] = {}
    for pid in processes:
        if row := memory_of(pid):
            before = found.setdefault(role_of(pid), {"processes": 0.0})
            found[role_of(pid)] = {
                name: before.get(name, 0.0) + value for name, value in ({"processes": 1} | row).items()
            }
    return dict(sorted(found.items(), key=lambda item: -item[1]["PSS"]))


def _is_ready(http: httpx.Client, address: str) -> bool:
    try:
        return http.get(f"{address}/ready").status_code == 200
    except httpx.HTTPError:
        return False


def use(address: str) -> dict[str, Any]:
    """Send the server requests of several kinds, and return its only replica as /v1/replicas describes it."""
    with httpx.Client(base_url=address, timeout=120) as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        long = {"model": model, "prompt": "one two three four " * 500, "max_tokens": 16}
        chat = {"model": model, "messages": [{"role": "user", "content": "Name a colour as JSON."}], "max_tokens": 32}
        schema = {"type": "object", "properties": {"colour": {"type": "string"}}, "required": ["colour"]}
        form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": schema}}
        bodies = [*([("completions", long)] * 4), *([("chat/completions", chat)] * 8)]
        bodies.append(("chat/completions", {**chat, "response_format": form}))
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda body: http.post(f"/v1/{body[0]}", json=body[1]).status_code, bodies))
        if set(answers) != {200}:
            raise RuntimeError(f"the requests were answered by {answers}")
        replica: dict[str, Any] = http.get("/v1/replicas").json()["data"][0]
    return replica


def measure(args: argparse.Namespace) -> tuple[float, dict[str, Row]]:
    """Start a server once. Return the seconds until it was ready, and memory and CPU time by role."""
    log, cpu = log_of(args, "crossdock"), defaultdict[str, float](float)
    with (
        httpx.Client(timeout=5) as http,
        serving("crossdock", crossdock_command(args), args, log, is_ready=partial(_is_ready, http)) as server,
    ):
        for pid in server.processes:
            cpu[role_of(pid)] += cpu_seconds([pid])
        replica = use(server.address)
        time.sleep(args.settle)
        roles = memory_by_role(server.processes_now())
    machine = replica["machine"]
    total = sum(row["PSS"] for row in roles.values())
    weights, pool = machine["weights"] / MIB, machine["pool"] / MIB
    roles["all"] = {
        "PSS": total,
        **{name: sum(row[name] for row in roles.values()) for name in ("anonymous", "private")},
    }
    roles["weights, once"], roles["KV pages, all"] = {"PSS": weights}, {"PSS": pool}
    roles["all but weights and KV pages"] = {"PSS": total - weights - pool}
    for role, own in cpu.items():
        roles.setdefault(role, {})["CPU s until ready"] = own
    roles["all"]["CPU s until ready"] = sum(cpu.values())
    return server.start_s, roles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="", help="default: the embedded one")
    parser.add_argument("--repeats", type=int, default=1, help="starts; the figures are medians (default: %(default)s)")
    parser.add_argument("--settle", type=float, default=5.0, help="seconds after the requests (default: %(default)s)")
    add_server_options(parser, "memory", 18420)
    args = parser.parse_args()
    measured = [measure(args) for _ in range(args.repeats)]
    ready = median(seconds for seconds, _ in measured)
    roles = {name: medians([found.get(name, {}) for _, found in measured]) for name in measured[0][1]}
    text = f"{today()}, {hardware()}; load {os.getloadavg()[0]:.1f}; {' '.join(sys.argv[1:])}\n\n"
    text += f"ready after {ready:.2f} s\n\n{table(roles, 'PSS, anonymous, private: MiB')}"
    write(args, text, {"ready_s": ready, "memory": roles, "all": measured})


if __name__ == "__main__":
    main()
