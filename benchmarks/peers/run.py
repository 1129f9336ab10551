"""Measures servers side by side: one at a time, alone, with the same model and the same load; medians over repeats.

    python benchmarks/peers/run.py MODEL_DIR --servers crossdock:512 vllm:512 vllm:128 --repeats 2

A server is NAME[:BUDGET], the budget being the most tokens one of its steps may carry, in order of arrival as vLLM has
it; `crossdock:adaptive` is what users get; `crossdock:unchunked` computes every prompt in one step, whatever waits. The
peers are installed first with their scripts beside this file (`vllm.sh install`). Repeats are interleaved, every server
in turn, so that a machine that slows down slows all of them; a server starts afresh each time and nothing else
should run beside it: `others CPU %` is what did (of one core, in the workload with the most of it), the host's other
guests included.
"""

import argparse
import asyncio
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from crossdock.cluster.bench.http import BenchError
from crossdock.cluster.bench.report import as_json
from crossdock.cluster.bench.run import BenchOptions, run_bench
from crossdock.cluster.bench.workloads import Interference

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PEERS = ("vllm", "llamacpp", "transformers", "rayserve")
WORKLOADS = ("chat", "prefill", "interference")
_ADAPTIVE = 0
_UNCHUNKED = 8192  # tokens: the longest prompt of the model that is measured, in one step
# Inherited by whatever a server starts, in however many process groups.
MARK = "CROSSDOCK_PEER_RUN"


@dataclass(frozen=True)
class ServerSpec:
    """A server to measure. `name` is `crossdock` or one of the peers."""

    name: str
    budget: int

    @classmethod
    def parse(cls, text: str) -> "ServerSpec":
        name, _, budget = text.partition(":")
        if text in ("crossdock:unchunked", "crossdock:adaptive"):
            return cls(name, _UNCHUNKED if text.endswith("unchunked") else _ADAPTIVE)
        if name not in ("crossdock", *PEERS):
            raise argparse.ArgumentTypeError(f"no server {name!r}: crossdock, {', '.join(PEERS)}")
        if budget and not budget.isdecimal():
            raise argparse.ArgumentTypeError(f"{text!r}: the budget is a number of tokens")
        return cls(name, int(budget or 512))

    def command(self, args: argparse.Namespace, port: int) -> list[str]:
        model = str(args.gguf if self.name == "llamacpp" and args.gguf else args.model)
        if self.name == "crossdock":
            command = [str(Path(sys.executable).with_name("crossdock")), "serve", model, "--port", str(port)]
            whole = ["--no-enable-chunked-prefill"] if self.budget == _UNCHUNKED else []
            fixed = ["--chunk-policy", "fixed", "--prefill-order", "fcfs", "--max-num-batched-tokens", str(self.budget)]
            policy = [*fixed, *whole] if self.budget != _ADAPTIVE else []
            return [*command, "--admission", "queue", *policy, *args.crossdock_option]
        command = [str(HERE / f"{self.name}.sh"), "serve", model, "--port", str(port), "--budget", str(self.budget)]
        return [*command, *(["--venv", str(args.venvs / self.name)] if args.venvs else [])]

    def model(self, args: argparse.Namespace) -> str | None:
        """What to ask for; None is the first of the models that the server lists."""
        # transformers lists whatever lies in the hub's cache, not what it was started with.
        return str(args.model) if self.name == "transformers" else None


def processes_of(session: int, mark: str) -> set[int]:
    """Ids of all living processes of a server: those of its session, those marked in their environment, and all that
    descend from either. One sign alone does not do: Ray's daemons leave the session, and processes that set their title
    (vLLM's workers, Ray's) overwrite their environment."""
    parents: dict[int, int] = {}
    found = set()
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        pid = int(entry.name)
        try:
            # pid (name) state parent group session ...; the name may hold anything, so read from its closing bracket
            state, parent, _, its_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            if state == "Z":
                continue
            parents[pid] = int(parent)
            if int(its_session) == session or wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.add(pid)
        except OSError:  # gone meanwhile, or another user's
            continue
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _living(pid: int) -> bool:
    try:
        return not Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].lstrip().startswith("Z")
    except OSError:
        return False


def memory_mib(processes: set[int]) -> float:
    """Memory of all of a server's processes; pages they share count once (PSS)."""
    total = 0
    for pid in processes:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def cpu_seconds(processes: Iterable[int]) -> float:
    """CPU time of processes and of those of their children that have ended."""
    ticks = 0
    for pid in processes:
        try:
            # utime stime cutime cstime are the 14th to 17th field; the second, a name in brackets, may hold anything
            ticks += sum(
                int(field) for field in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
            )
        except OSError:
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


def machine_cpu_seconds() -> float:
    """CPU time of everything on this machine, and what its host took from it."""
    user, nice, system, _, _, irq, softirq, steal = Path("/proc/stat").read_text().split()[1:9]
    return sum(map(int, (user, nice, system, irq, softirq, steal))) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(spec: ServerSpec, args: argparse.Namespace, log: Path) -> Iterator[tuple[str, set[int], float]]:
    """Starts a server, waits until it answers, gives (address, its processes, seconds to start), and ends them all."""
    port, mark = args.port, uuid.uuid4().hex
    address = f"http://127.0.0.1:{port}"
    started = time.monotonic()
    with log.open("ab") as output:
        process = subprocess.Popen(
            spec.command(args, port),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, MARK: mark},
            start_new_session=True,
        )
    try:
        while not _answers(address, spec.model(args)):
            if process.poll() is not None:
                raise RuntimeError(f"{spec.name} ended with {process.returncode} before it was ready; see {log}")
            if time.monotonic() - started > args.start_timeout:
                raise RuntimeError(f"{spec.name} was not ready within {args.start_timeout} s; see {log}")
            time.sleep(0.5)
        yield address, processes_of(process.pid, mark), time.monotonic() - started
    finally:
        left = processes_of(process.pid, mark)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.terminate()
        deadline = time.monotonic() + 15
        while left and time.monotonic() < deadline:
            time.sleep(0.5)
            # Some may have lost their parent meanwhile, and with it the way in which they were found.
            process.poll()
            left = {pid for pid in left if _living(pid)} | processes_of(process.pid, mark)
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()


def _answers(address: str, model: str | None) -> bool:
    """Whether it completes a prompt: Ray's router lists the models long before there is an engine behind it."""
    try:
        models = httpx.get(f"{address}/v1/models", timeout=5)
        if models.status_code != 200:
            return False
        body = {"model": model or models.json()["data"][0]["id"], "prompt": "One", "max_tokens": 1}
        return httpx.post(f"{address}/v1/completions", json=body, timeout=60).status_code == 200
    except httpx.HTTPError:
        return False


def measure(spec: ServerSpec, workload: str, address: str, args: argparse.Namespace) -> dict[str, Any]:
    counts = {"chat": args.chat_requests, "prefill": args.prefill_requests, "interference": None}
    options = BenchOptions(
        url=address,
        workload=workload,
        num_requests=counts[workload],
        model=spec.model(args),
        tokenizer=args.model if (args.model / "tokenizer.json").is_file() else None,
        interference=Interference(long_prompts=args.long_prompts),
        seed=args.seed,
    )
    return as_json(asyncio.run(asyncio.wait_for(run_bench(options), args.workload_timeout)))


def measure_all(
    spec: ServerSpec, address: str, processes: set[int], args: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Every workload up to the first that fails or takes too long: what that left running would disturb the next."""
    runs: dict[str, dict[str, Any]] = {}
    ours = processes | {os.getpid()}
    for workload in args.workloads:
        started, ours_before, all_before = time.monotonic(), cpu_seconds(ours), machine_cpu_seconds()
        try:
            run = measure(spec, workload, address, args)
            others = machine_cpu_seconds() - all_before - (cpu_seconds(ours) - ours_before)
            runs[workload] = run | {"others_cpu_share": max(0.0, others / (time.monotonic() - started))}
        except (TimeoutError, BenchError) as error:
            reason = str(error) or f"not done within {args.workload_timeout:.0f} s"
            print(f"  {workload}: {reason}; it and those after it are left out", file=sys.stderr, flush=True)
            break
    return runs


def figures(runs: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The numbers of one pass over one server that stand in the table."""
    row: dict[str, float] = {}
    if "chat" in runs:
        chat = runs["chat"]["summary"]
        row["chat tok/s"] = chat["output_tokens_per_s"]
        row["chat TTFT p50"] = chat["ttft_ms"].get("p50", float("nan"))
        row["chat gap p50"] = chat["gap_ms"].get("p50", float("nan"))
        row["chat gap p99"] = chat["gap_ms"].get("p99", float("nan"))
    if "prefill" in runs:
        row["prefill tok/s"] = runs["prefill"]["summary"]["prompt_tokens_per_s"]
    if "interference" in runs:
        what = runs["interference"]["summary"]["interference"]
        row["quiet gap p50"] = what["quiet_gap_ms"].get("p50", float("nan"))
        row["interfered gap p50"] = what["interfered_gap_ms"].get("p50", float("nan"))
        row["interfered gap p99"] = what["interfered_gap_ms"].get("p99", float("nan"))
        row["long TTFT p50"] = what["long_ttft_ms"].get("p50", float("nan"))
    row["failed"] = sum(run["summary"]["requests_failed"] for run in runs.values())
    row["others CPU %"] = 100 * max((run["others_cpu_share"] for run in runs.values()), default=0.0)
    row["client CPU %"] = 100 * max((run["client_cpu_share"] for run in runs.values()), default=0.0)
    return row


def medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    names = {name: None for row in rows for name in row}  # a set that keeps its order
    return {name: statistics.median(row[name] for row in rows if name in row) for name in names}


def hardware() -> str:
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
        memory = int(Path("/proc/meminfo").read_text().split()[1]) / 2**20
    except OSError:
        return model
    return f"{os.cpu_count()} cores, {model}, {memory:.0f} GiB"


def markdown(results: dict[str, dict[str, float]], caption: str) -> str:
    """One row per server; times in milliseconds."""
    names = {name: None for row in results.values() for name in row}
    lines = [caption, "", "| server | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for server, row in results.items():
        cells = (_cell(row.get(name)) for name in names)
        lines.append(f"| {server} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face directory with bf16 safetensors")
    parser.add_argument("--gguf", type=Path, help="the same weights for llamacpp (see bf16_gguf.py)")
    parser.add_argument("--servers", nargs="+", type=ServerSpec.parse, default=[ServerSpec("crossdock", 512)])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--chat-requests", type=int, default=32)
    parser.add_argument("--prefill-requests", type=int, default=4)
    parser.add_argument("--long-prompts", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--venvs", type=Path, help="directory of the peers' environments (default: .cache/peers)")
    parser.add_argument("--port", type=int, default=8411)
    parser.add_argument("--start-timeout", type=float, default=300.0, help="seconds")
    parser.add_argument("--workload-timeout", type=float, default=300.0, help="seconds; what takes longer is left out")
    parser.add_argument("--crossdock-option", action="append", default=[], metavar="--OPTION=VALUE")
    parser.add_argument("--output", type=Path, default=ROOT / ".cache" / "peers" / "results", help="without suffix")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    passes: dict[str, list[dict[str, float]]] = {}
    raw: list[dict[str, Any]] = []
    for repeat in range(args.repeats):
        for spec in args.servers:
            label = f"{spec.name}, budget {spec.budget}" if spec.budget != _ADAPTIVE else f"{spec.name}, adaptive"
            log = args.output.with_name(f"{args.output.name}-{spec.name}.log")
            print(f"[{repeat + 1}/{args.repeats}] {label}: starting", flush=True)
            try:
                with serving(spec, args, log) as (address, processes, start_seconds):
                    load = os.getloadavg()[0]
                    runs = measure_all(spec, address, processes, args)
                    row = figures(runs) | {"memory MiB": memory_mib(processes), "start s": start_seconds}
            except (RuntimeError, OSError) as error:
                print(f"  {error}", file=sys.stderr, flush=True)
                continue
            passes.setdefault(label, []).append(row)
            raw.append({"server": label, "repeat": repeat, "load_average_before": load, "figures": row, "runs": runs})
            print("  " + ", ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
    date = datetime.now(UTC).date().isoformat()
    caption = f"{args.model.name}, bf16; {hardware()}; {date}; medians of {args.repeats}; times in ms."
    results = {label: medians(rows) for label, rows in passes.items()}
    text = markdown(results, caption)
    args.output.with_suffix(".md").write_text(text)
    summary = {"date": date, "hardware": hardware(), "medians": results, "passes": raw}
    args.output.with_suffix(".json").write_text(json.dumps(summary, indent=1) + "\n")
    print("\n" + text)
    if not results:
        sys.exit(1)


if __name__ == "__main__":
    main()
