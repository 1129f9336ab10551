"""Measure the first token of a prompt whose prefix lies in files that are as slow as computing.

    python benchmarks/models/cut_point.py

One engine of this process. Reading a page takes `--slow` times the seconds of computing a page. Compares computing the
whole prompt, waiting for the whole prefix, and computing from the beginning while loading from the end. Prints seconds
until the token and the tokens that were loaded. Exits with 1 where a token differs.
"""

import argparse
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

from pydantic import ByteSize

from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.weights.checkpoint import default_model_dir
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.calibrate import warm_up
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.tiers.file_tier import FileTier
from crossdock.workers.schedule.prefixes.loading import TierLoading
from crossdock.workers.schedule.submission import SamplingParams, Submission


def first_token(engine: Engine, name: str, prompt: list[int]) -> tuple[float, int, int]:
    """Return the seconds until a prompt's token, the token, and how many tokens were cached or loaded."""
    engine.add(Submission(name, prompt, SamplingParams(max_tokens=1, temperature=0.0)))
    started = time.monotonic()
    while engine.has_work:
        step = engine.step()
        if not step.batch:
            time.sleep(0.001)
        for delta in step.deltas:
            return time.monotonic() - started, delta.token_ids[0], delta.num_cached_tokens
    raise RuntimeError("the request has made no token")


def store(engine: Engine) -> None:
    """Write all cached pages to files. TimeoutError: not within a minute."""
    assert engine.tiers is not None
    deadline, before = time.monotonic() + 60, -1
    while (count := engine.tiers.tiers.tiers[0].num_stores) > before or not engine.tiers.is_idle:
        if time.monotonic() > deadline:
            raise TimeoutError("the pages are not written")
        before = count
        engine.tiers.offer(engine.pages.stock)
        time.sleep(0.05)
        engine.tiers.take_in(engine.scheduler.loading)


def main() -> int:
    """Measure, and print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt (default: %(default)s)")
    parser.add_argument("--slow", type=float, default=1.0, help="seconds to load / to compute (default: %(default)s)")
    args = parser.parse_args()
    model = load_model(ModelSpec(str(default_model_dir()), max_model_len=args.tokens + 64))
    prompt = [(977 * place * place + 31 * place) % 40_000 + 100 for place in range(args.tokens)]
    with tempfile.TemporaryDirectory() as folder:
        memory, files = ByteSize(1 << 30), f"{Path(folder)},4GiB"
        engine = new_engine(model, EngineConfig(kv_cache_memory=memory, kv_cache_files=files), weights="default")
        warm_up(engine)
        first_token(engine, "warm", prompt[::-1])
        computed = first_token(engine, "computed", prompt)
        store(engine)
        page_s, read = args.slow * computed[0] / (args.tokens // engine.config.page_size), FileTier.read

        def slow_read(*read_args: object) -> bool:
            time.sleep(page_s)
            return read(*read_args)  # type: ignore[arg-type]

        found = {"computed": computed}
        for way, patched in (
            ("waited for", patch.object(TierLoading, "_may_meet", lambda *_: False)),
            ("cut", nullcontext()),
        ):
            engine.pages.stock.clear_cache()
            engine.scheduler.loading.tiers.tiers[0].load_s = page_s
            with patched, patch.object(FileTier, "read", slow_read):
                found[way] = first_token(engine, way, prompt)
        assert engine.tiers is not None
        engine.tiers.close()
    for way, (seconds, token, num_cached) in found.items():
        print(f"{way:<12} {seconds:7.3f} s  {num_cached:6} tokens loaded  token {token}")
    return int(len({token for _, token, _ in found.values()}) > 1)


if __name__ == "__main__":
    sys.exit(main())
