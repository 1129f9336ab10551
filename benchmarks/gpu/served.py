"""Servers on one GPU: how long one takes to start, its tokens per second beside the engine's alone, and a pair of
replicas, each on half of the GPU, whose decode replica is killed while streams run.
"""

import argparse
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from gpu.cases import Bench, Case, Once, Section
from gpu.engines import Engines, generate
from gpu.models import random_module, write_tokenizer
from gpu.rows import Figures
from servers import RunningServer, command_line, serving

_BYTES = 257  # tokens: all bytes, and an end
_DECODE = "ray::ServeReplica:crossdock:decode"  # title of a replica's process


def write_model(bench: Bench, folder: Path) -> None:
    """Write a random model, and a tokenizer of bytes, as a directory that a server loads."""
    module = random_module(bench, next(iter(bench.sizes.served)))
    module.save_pretrained(folder)
    write_tokenizer(folder, _BYTES)


def served(bench: Bench) -> Iterator[Case]:
    """Yield the engine alone, a server of one replica, and a pair."""
    with tempfile.TemporaryDirectory() as folder:
        written = Once(lambda: write_model(bench, Path(folder)) or folder)
        yield Case("engine alone", partial(_alone, bench))
        yield Case("one replica", partial(_one, bench, written))
        yield Case("a pair, its decode replica killed", partial(_pair, bench, written))


def _prompts(bench: Bench) -> list[list[int]]:
    count, length, _ = bench.sizes.batch
    return [[(number * 31 + place * 7) % 200 for place in range(length)] for number in range(count)]


def _alone(bench: Bench) -> Figures:
    engines = Engines(bench, next(iter(bench.sizes.served)))
    engine = engines.engine(is_warm=not bench.sizes.is_dry)
    generate(engine, _prompts(bench), 2)
    rate = generate(engine, _prompts(bench), bench.sizes.batch[2])
    engines.free()
    return {"tokens_per_s": rate}


def _server(bench: Bench, folder: str, name: str, pools: Sequence[dict[str, Any]]) -> Any:
    """Start a server with these pools; its log is beside the rows."""
    device = {"num_gpus": 0} if bench.sizes.is_dry else {}
    memory = "64MiB" if bench.sizes.is_dry else "8GiB"
    config = {"pools": [{**pool, **device} for pool in pools], "engine": {"kv_cache_memory": memory}}
    file = Path(folder) / f"{name}.yaml"
    file.write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    program = "from crossdock.cluster.cli import main; main()"  # the kit has no scripts
    command = [sys.executable, "-c", program, "serve", folder, "--config", str(file), "--port", str(port)]
    log = bench.rows.path.with_suffix(f".{name}.log")
    return serving(name, command, argparse.Namespace(port=port, start_timeout=150.0), log)


def _complete(address: str, prompt: list[int], tokens: int) -> dict[str, Any]:
    """Return the answer to a prompt of token ids, greedy."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(f"{address}/v1/completions", json=body, timeout=150)
    answer.raise_for_status()
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def _all(server: RunningServer, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], float]:
    """Return the tokens of all prompts, in flight at once, and the seconds."""
    started = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda prompt: _complete(server.address, prompt, tokens)["token_ids"], prompts))
    return answers, time.perf_counter() - started


def _one(bench: Bench, written: Once) -> Figures:
    prompts, tokens = _prompts(bench), bench.sizes.batch[2]
    with _server(bench, str(written()), "one", [{"name": "mixed"}]) as server:
        _all(server, prompts, 2)
        answers, seconds = _all(server, prompts, tokens)
    rate = sum(map(len, answers)) / seconds
    alone = bench.rows.figures("servers", "engine alone").get("tokens_per_s", float("nan"))
    return {"start_s": server.start_s, "tokens_per_s": rate, "of_engine": rate / alone}


def _pair(bench: Bench, written: Once) -> Figures:
    """Kill the decode replica while it makes tokens: the answers must be those of an undisturbed run."""
    prompts, tokens = _prompts(bench)[:8], bench.sizes.batch[2]
    half = {} if bench.sizes.is_dry else {"num_gpus": 0.5}
    with _server(bench, str(written()), "pair", [{"name": name, **half} for name in ("prefill", "decode")]) as server:
        expected, seconds = _all(server, prompts, tokens)
        decode = [pid for pid in server.processes_now() if command_line(pid) == _DECODE]
        timer = threading.Timer(seconds / 2, lambda: [psutil.Process(pid).kill() for pid in decode])
        timer.start()
        answers, disturbed_s = _all(server, prompts, tokens)
        timer.join()
    differing = sum(one != other for one, other in zip(answers, expected, strict=True))
    return {
        "start_s": server.start_s,
        "killed": len(decode),
        "s": seconds,
        "s_with_kill": disturbed_s,
        "answers_that_differ": differing,
    }


SECTIONS = [Section("servers", 220.0, served)]
