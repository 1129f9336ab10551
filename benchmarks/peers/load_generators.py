"""Do aiperf, guidellm, `vllm bench serve` and `crossdock bench` measure the same of one server under one load?

    for name in aiperf==0.13.0 guidellm==0.8.1; do       # each in an environment of its own; vLLM's takes 3.4 GB
        python -m venv .cache/peers/${name%==*} && .cache/peers/${name%==*}/bin/pip install $name
    done
    benchmarks/peers/vllm.sh install
    python benchmarks/peers/load_generators.py            # 3 minutes

Each in turn sends 32 completions to `crossdock serve`, 8 at a time, of about 128 prompt tokens and exactly 64 output
tokens. Prints a row per generator: output tokens per second, and medians over requests in ms. They make unlike texts,
so prompts differ by a few tokens. *TPOT*: time from a request's first to its last token over the tokens after the
first.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for servers and tables

from servers import ROOT, OtherLoad, add_server_options, crossdock_command, log_of, serving
from tables import Row, hardware, medians, table, today, write

from crossdock.workers.model.weights.checkpoint import default_model_dir

REQUESTS, CONCURRENCY, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 8, 128, 64

Generator = Callable[[argparse.Namespace, str, Path], tuple[list[str], Path]]


def crossdock(args: argparse.Namespace, address: str, folder: Path) -> tuple[list[str], Path]:
    """Return the command and the file that it writes. `folder`: empty."""
    load = ["-n", REQUESTS, "-c", CONCURRENCY, "--prompt-tokens", PROMPT_TOKENS, "--output-tokens", OUTPUT_TOKENS]
    result = folder / "result.json"
    return [
        str(Path(sys.executable).with_name("crossdock")),
        "bench",
        address,
        *map(str, load),
        "--json",
        str(result),
    ], result


def aiperf(args: argparse.Namespace, address: str, folder: Path) -> tuple[list[str], Path]:
    lengths = {"--prompt-input-tokens": PROMPT_TOKENS, "--prompt-output-tokens": OUTPUT_TOKENS}
    flags = [part for name, mean in lengths.items() for part in (f"{name}-mean", str(mean), f"{name}-stddev", "0")]
    quiet = ["--no-server-metrics", "--no-gpu-telemetry", "--ui", "none"]
    return [
        *(str(args.venvs / "aiperf/bin/aiperf"), "profile", "-u", address, "-m", args.model.name),
        *("--endpoint-type", "completions", "--streaming", "--tokenizer", str(args.model), *flags, *quiet),
        *("--concurrency", str(CONCURRENCY), "--request-count", str(REQUESTS), "--warmup-request-count", "2"),
        *("--extra-inputs", "ignore_eos:true", "--use-legacy-max-tokens", "--use-server-token-count"),
        *("--output-artifact-dir", str(folder)),
    ], folder / "profile_export_aiperf.json"


def guidellm(args: argparse.Namespace, address: str, folder: Path) -> tuple[list[str], Path]:
    result = folder / "result.json"
    return [
        *(str(args.venvs / "guidellm/bin/guidellm"), "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={address},model={args.model.name},request_format=/v1/completions"),
        *("--profile", f"kind=concurrent,streams={CONCURRENCY}"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}", "--tokenizer", f"kind=hf_auto,model={args.model}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"),
        *("--output", f"kind=json,path={result}"),
    ], result


def vllm(args: argparse.Namespace, address: str, folder: Path) -> tuple[list[str], Path]:
    return [
        *(str(args.venvs / "vllm/bin/vllm"), "bench", "serve", "--backend", "openai", "--base-url", address),
        *("--model", args.model.name, "--tokenizer", str(args.model), "--dataset-name", "random", "--ignore-eos"),
        *("--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS), "--num-warmups", "2"),
        *("--num-prompts", str(REQUESTS), "--max-concurrency", str(CONCURRENCY)),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50"),
        *("--save-result", "--result-dir", str(folder), "--result-filename", "result.json"),
    ], folder / "result.json"


GENERATORS: dict[str, Generator] = {
    "crossdock bench": crossdock,
    "aiperf": aiperf,
    "guidellm": guidellm,
    "vllm bench serve": vllm,
}


def figures(name: str, result: dict[str, Any]) -> Row:
    """Return the figures in a generator's result, under one name each."""
    match name:
        case "crossdock bench":
            summary = result["summary"]
            values = [
                summary["output_tokens_per_s"],
                *(summary[f"{part}_ms"]["p50"] for part in ("ttft", "tpot", "e2e")),
            ]
            counted = [summary["requests_ok"], summary["prompt_tokens"] / REQUESTS]
        case "aiperf":
            parts = ("time_to_first_token", "inter_token_latency", "request_latency")
            values = [result["output_token_throughput"]["avg"], *(result[part]["p50"] for part in parts)]
            counted = [result["request_count"]["avg"], result["input_sequence_length"]["avg"]]
        case "guidellm":
            found = {
                key: value["successful"] for key, value in result["benchmarks"][0]["metrics"].items() if _has(value)
            }
            values = [found["output_tokens_per_second"]["mean"], found["time_to_first_token_ms"]["median"]]
            values += [found["inter_token_latency_ms"]["median"], 1e3 * found["request_latency"]["median"]]
            counted = [found["request_latency"]["count"], found["prompt_token_count"]["mean"]]
        case _:
            values = [result["output_throughput"], *(result[f"median_{part}_ms"] for part in ("ttft", "tpot", "e2el"))]
            counted = [result["completed"], result["total_input_tokens"] / REQUESTS]
    names = ("output tokens/s", "TTFT p50", "TPOT p50", "end to end p50", "requests", "prompt tokens")
    return dict(zip(names, [*values, *counted], strict=True))


def _has(metric: Any) -> bool:
    return isinstance(metric, dict) and isinstance(metric.get("successful"), dict)


def measure(name: str, args: argparse.Namespace, address: str) -> Row:
    """Run a generator once.

    Raises:
        RuntimeError: it failed; the message names its log.
    """
    log = log_of(args, name.replace(" ", "-"))
    with tempfile.TemporaryDirectory() as folder:
        command, result = GENERATORS[name](args, address, Path(folder))
        # aiperf looks for a local tokenizer on the hub alone when it is told to be offline.
        environment = {**os.environ} if name == "aiperf" else {**os.environ, "HF_HUB_OFFLINE": "1"}
        with log.open("ab") as output:
            ended = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                timeout=300,
                check=False,
            )
        if ended.returncode or not result.is_file():
            raise RuntimeError(f"{name} ended with {ended.returncode}; see {log}")
        return figures(name, json.loads(result.read_text()))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generators", nargs="+", choices=GENERATORS, default=list(GENERATORS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--venvs", type=Path, default=ROOT / ".cache" / "peers", help="directory of their environments")
    parser.set_defaults(model=default_model_dir())
    add_server_options(parser, "load-generators", 8413)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    passes: dict[str, list[Row]] = {}
    with serving("crossdock", crossdock_command(args, "--admission", "queue"), args, log_of(args, "server")) as server:
        for repeat in range(args.repeats):
            for name in args.generators:
                others = OtherLoad(server.processes)
                row = measure(name, args, server.address)
                row["generator and others, CPU %"] = 100 * others.share()
                passes.setdefault(name, []).append(row)
                print(f"[{repeat + 1}/{args.repeats}] {name}: {row}", flush=True)
    results = {name: medians(rows) for name, rows in passes.items()}
    caption = f"{args.model.name}, bf16; {hardware()}; {today()}; medians of {args.repeats} passes; times in ms."
    write(args.output, f"{caption}\n\n{table(results, 'generator')}", {"date": today(), "passes": passes})


if __name__ == "__main__":
    main()
