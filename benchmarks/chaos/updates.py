"""Do updates of weights under load mix versions while replicas are killed? Prints answers, updates and what is left.

    python benchmarks/chaos/updates.py --updates 25 --kills 5

Serves the embedded model twice with `--batch-invariant`, and replaces its weights by those of three folders in turn,
while eight clients ask greedy questions. Once two replicas have the newest weights, the process of one is killed
(SIGKILL) in the midst of its streams: just before the next update, or in turn in the midst of it. Ends with an error
where an answer names two versions, has other tokens than an earlier answer of equal weights, is an error, does not end
within `PATIENCE_S`, or where pages stay owned at the end.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from itertools import count
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for servers
from servers import RunningServer, add_server_options, command_line, crossdock_server, memory_mib

from crossdock.workers.model.weights.checkpoint import default_model_dir

CLIENTS, FOLDERS, PATIENCE_S = 8, 3, 120.0
REPLICA = "ray::ServeReplica:crossdock:mixed"  # title of a replica's process


def write_checkpoints(root: Path, model: Path, layers: int) -> None:
    """Write the folders 0 to 2: the model's first layers, one product of them scaled, so that answers differ."""
    from safetensors.torch import load_file, save_file

    for number in range(FOLDERS):
        shutil.copytree(model, root / str(number), symlinks=False)
        config = json.loads((root / str(number) / "config.json").read_text())
        (root / str(number) / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
        found = load_file(root / str(number) / "model.safetensors")
        numbers = {name: re.search(r"\.layers\.(\d+)\.", name) for name in found}
        tensors = {name: found[name] for name, is_of in numbers.items() if is_of is None or int(is_of[1]) < layers}
        tensors["model.layers.0.mlp.down_proj.weight"] *= 1 + number / 4
        save_file(tensors, root / str(number) / "model.safetensors", {"format": "pt"})


def replicas_of(server: RunningServer) -> list[int]:
    return [pid for pid in sorted(server.processes_now()) if command_line(pid) == REPLICA]


def memory_of(server: RunningServer) -> str:
    """Return the memory (PSS) of all processes, and that of each replica."""
    parts = ", ".join(f"{memory_mib({pid}):.0f}" for pid in replicas_of(server))
    return f"{memory_mib(server.processes_now()):.0f} MiB (replicas: {parts})"


async def load(http: httpx.AsyncClient, texts: dict[tuple[int, int], str], counts: Counter[str]) -> None:
    """Ask one question after the other until cancelled."""
    for number in count():
        question = number % 16
        body = {"prompt": f"Question {question}:", "max_tokens": 64, "temperature": 0, "ignore_eos": True}
        answer = await http.post("/v1/completions", json=body, timeout=PATIENCE_S)
        if answer.status_code != 200:
            raise ValueError(f"a request is answered {answer.status_code}: {answer.text}")
        [choice] = answer.json()["choices"]
        made_by = choice.get("weight_versions", [])
        if len(made_by) > 1:
            raise ValueError(f"an answer mixes versions: {made_by}")
        key = (int(made_by[0]["version"]) % FOLDERS if made_by else -1), question
        if texts.setdefault(key, choice["text"]) != choice["text"]:
            raise ValueError(f"weights of update {made_by} gave two answers to question {question}")
        counts["answers checked"] += 1


async def both_have(version: str, http: httpx.AsyncClient, clients: list[asyncio.Task[None]]) -> None:
    """Wait until two replicas have the newest weights: one that starts, or has older ones, could not take over."""
    until, line = time.monotonic() + PATIENCE_S, f'crossdock_weight_version{{version="{version}",'
    while (await http.get("/metrics")).text.count(line) < 2:
        raise_failure(clients)
        if time.monotonic() > until:
            raise ValueError(f"no second replica has the newest weights after {PATIENCE_S:.0f} s")
        await asyncio.sleep(0.25)


def raise_failure(clients: list[asyncio.Task[None]]) -> None:
    for client in clients:
        if client.done():
            client.result()


async def update(server: RunningServer, updates: int, kills: int) -> None:
    texts, counts, seconds = dict[tuple[int, int], str](), Counter[str](), list[float]()
    async with httpx.AsyncClient(base_url=server.address) as http:
        clients = [asyncio.create_task(load(http, texts, counts)) for _ in range(CLIENTS)]
        killed, version = 0, "default"
        for number in range(1, updates + 1):
            kills_one = number * kills // updates > killed
            if kills_one:
                await both_have(version, http, clients)
                victim = replicas_of(server)[0]
            if number == FOLDERS + 1:  # each folder was served once
                print(f"memory after {FOLDERS} updates: {memory_of(server)}", flush=True)
            version = str(number)
            began, body = time.monotonic(), {"model_path": str(number % FOLDERS), "weight_version": version}
            updating = asyncio.create_task(http.post("/update_weights_from_disk", json=body, timeout=PATIENCE_S))
            if kills_one:
                await asyncio.sleep(killed % 2 * min(seconds) / 2)
                os.kill(victim, signal.SIGKILL)
                killed += 1
            answer = await updating
            if answer.status_code != 200:
                raise ValueError(f"update {number} is answered {answer.status_code}: {answer.text}")
            seconds.append(time.monotonic() - began)
            if number % 10 == 0:
                print(f"{number} updates, {killed} replicas killed, {dict(counts)}", flush=True)
            before = counts["answers checked"]
            while counts["answers checked"] < before + CLIENTS:
                raise_failure(clients)
                await asyncio.sleep(0.05)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        until = time.monotonic() + PATIENCE_S
        while owned := re.findall(
            r'^crossdock_pages\{.*state="owned".*\} [1-9].*', (await http.get("/metrics")).text, re.M
        ):
            if time.monotonic() > until:
                raise ValueError(f"pages stay owned: {owned}")
            await asyncio.sleep(0.5)
    print(f"{updates} updates of {min(seconds):.1f} to {max(seconds):.1f} s, {killed} replicas killed: {dict(counts)}")
    print(f"no answer mixes versions; {len(texts)} texts by weights and question; no page is owned")
    print(f"memory at the end: {memory_of(server)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--layers", type=int, default=30, help="of the embedded model, from the first one on")
    add_server_options(parser, "updates", 31950)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoints(Path(folder), default_model_dir(), args.layers)
        args.model = Path(folder, "0")
        flags = ["--pools", "mixed=2", "--max-model-len", "1024", "--batch-invariant", "--enable-rollouts"]
        with crossdock_server(args, *flags, "--weights-folder", folder) as server:
            asyncio.run(update(server, args.updates, args.kills))


if __name__ == "__main__":
    main()
