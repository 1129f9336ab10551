"""Measure what a flood of another tenant costs a tenant, on an emulated device: no model, no torch.

    python benchmarks/routing/tenants.py

Serves one replica whose steps take the predicted seconds of an 8B model on an L4, four times: for the tenant `own`
alone, alone at half the speed, beside `flood`, which sends twenty times as much, and beside it in order of arrival
(fcfs). Prints TTFT p50 and p99, goodput and number of requests of `own`, whose requests are the same each time.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for servers
from servers import add_server_options, crossdock_server

from crossdock.cluster.bench.run import BenchOptions, run_bench

OWN, FLOOD = "own", "flood"  # also their API keys
CASES = (  # name, device, other flags, tenants
    ("alone", "l4-8b", (), f"{OWN}=1"),
    ("alone, half the speed", "l4-8b*2", (), f"{OWN}=1"),
    ("beside the flood", "l4-8b", (), f"{OWN}=1,{FLOOD}=20"),
    ("beside the flood, fcfs", "l4-8b", ("--prefill-order", "fcfs"), f"{OWN}=1,{FLOOD}=20"),
)


def measure(args: argparse.Namespace, device: str, flags: tuple[str, ...], tenants: str, folder: Path) -> Any:
    """Return the figures of `own`."""
    config = folder / "config.yaml"
    keys: list[Any] = [{"key": name, "name": name} for name in (OWN, FLOOD)]
    config.write_text(yaml.safe_dump({"http": {"api_keys": [*keys, "any"]}}))
    own = ["--config", str(config), "--device", f"emulated:{device}", *flags]
    with crossdock_server(args, *own, key="any") as server:
        size = {"prompt_tokens": 600, "output_tokens": 60, "request_rate": 0.5, "duration": args.duration}
        options = BenchOptions(url=server.address, workload="chat", tenants=tenants, **size)
        return asyncio.run(run_bench(options)).summary["tenants"][OWN]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration", type=float, default=30.0, help="seconds in which requests are started")
    add_server_options(parser, "tenants", 31991)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, *case in CASES:
            found = measure(args, *case, Path(folder))
            ttft, good, count = found["ttft_ms"], found["goodput"]["share"], found["requests_ok"]
            print(
                f"{name}: TTFT p50 {ttft['p50']:.0f} ms, p99 {ttft['p99']:.0f} ms, good {good:.0%} of {count}",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
