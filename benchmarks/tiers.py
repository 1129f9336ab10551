"""Measure a restart that finds a prompt in files: kill -9 all processes of a server, start it again, ask again.

    python benchmarks/tiers.py

Prints the seconds until the first token of a prompt of 4,096 tokens: computed, computed after the restart (another
prompt of that length), and loaded from files after the restart. Exits with 1 where the tokens differ, or where loading
takes more than a third of computing.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from servers import RunningServer, add_server_options, crossdock_server

from crossdock.workers.model.weights.checkpoint import default_model_dir

_MOST_SHARE = 1 / 3  # of the seconds of computing that loading may take


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to a prompt."""

    text: str
    num_cached: int  # tokens
    seconds: float  # until the only token


def main() -> None:
    """Parse the command line, measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="Hugging Face directory (default: the embedded model)")
    parser.add_argument("--tokens", type=int, default=4096, help="of each prompt (default: %(default)s)")
    add_server_options(parser, "tiers", 8231)
    args = parser.parse_args()
    args.model = args.model or default_model_dir()
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(measure(args, Path(folder)))


def measure(args: argparse.Namespace, folder: Path) -> int:
    """Return 0 where a restarted server answers with the same token within a third of the seconds of computing."""
    rng = random.Random(0)
    prompts = [[rng.randrange(100, 40_000) for _ in range(args.tokens)] for _ in range(2)]
    flags = "--kv-cache-files", f"{folder},4GiB"
    with crossdock_server(args, *flags) as server:
        computed = ask(server, prompts[0])
        wait_for_files(folder, args.tokens // 16 - 1)
        kill(server)
    with crossdock_server(args, *flags) as server:
        loaded, other = ask(server, prompts[0]), ask(server, prompts[1])
        kill(server)
    for name, answer in (("computed", computed), ("loaded", loaded), ("another, computed", other)):
        print(f"{name:<18} {answer.seconds:7.3f} s  {answer.num_cached:6} tokens cached  {answer.text!r}")
    share = loaded.seconds / min(computed.seconds, other.seconds)
    print(f"loading takes {share:.3f} of computing")
    return int(share > _MOST_SHARE or loaded.text != computed.text)


def ask(server: RunningServer, prompt: list[int]) -> Answer:
    """Ask for one token."""
    with httpx.Client(base_url=server.address, timeout=300) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        started = time.monotonic()
        response = client.post("/v1/completions", json=body).raise_for_status().json()
        seconds = time.monotonic() - started
    details = response["usage"].get("prompt_tokens_details") or {}
    return Answer(response["choices"][0]["text"], details.get("cached_tokens", 0), seconds)


def wait_for_files(folder: Path, num_files: int) -> None:
    """Wait until a server without work has stored its pages. TimeoutError: not within a minute."""
    deadline = time.monotonic() + 60
    while (found := sum(not path.name.startswith(".") for path in folder.glob("*/*/*"))) < num_files:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{found} of {num_files} pages are in {folder}")
        time.sleep(0.1)


def kill(server: RunningServer) -> None:
    """End all processes of a server at once, with SIGKILL."""
    for pid in server.processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
