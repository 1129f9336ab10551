"""How many prompt tokens per second does a step lose when decodes ride along with its chunk?

    OMP_WAIT_POLICY=PASSIVE python benchmarks/chunks/ride_along.py       # 3 chunks, 1 to 16 decodes: 3 minutes

Prints a row for each chunk and number of decodes in the same step: prompt tokens/s of the chunk alone and beside the
decodes, and three shares:

- prompt tokens/s, relative to the chunk alone; in brackets the same per second of CPU time, which processes that take
  turns on a core change less,
- all tokens/s, decodes included, relative to the chunk alone,
- seconds of the step, relative to the same work in two steps, one of the chunk and one of the decodes.

Every round measures all steps of a chunk size side by side. Figures are of the fastest of the rounds, since a load
from elsewhere on the machine only ever makes a step slower. The chunk and each stream have the same number of tokens
before them.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from math import inf
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tables import Row, add_output_options, table, write

from crossdock.workers.replica.config import EngineConfig, ReplicaSpec
from crossdock.workers.replica.engine.calibrate import measure_step, warm_up
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.engine.engine_loader import load_engine


def seconds(engine: Engine, chunk: int, decodes: int, context: int) -> tuple[float, float]:
    """Return the seconds of one step, and those of CPU time of all threads. `chunk` 0: decodes alone."""
    cpu = time.process_time()
    step = measure_step(engine, (context, chunk) if chunk else None, decodes, context, repeats=1)
    if step is None:
        raise ValueError(f"{chunk} tokens and {decodes} streams of {context} do not fit: raise --memory")
    return step[1][0], time.process_time() - cpu


def measure(
    engine: Engine, chunk: int, decodes: Sequence[int], context: int, rounds: int, most_s: float = inf
) -> dict[str, Row]:
    """Return the rows of a chunk size. After `most_s` seconds no further round begins, but for one that is counted."""
    until = time.monotonic() + most_s
    kinds = [(chunk, 0), *((size, count) for count in decodes for size in (chunk, 0))]
    times: dict[tuple[int, int], list[float]] = {kind: [] for kind in kinds}
    cpu: dict[tuple[int, int], list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds + 1):
        if number > 1 and time.monotonic() > until:
            break
        for kind in kinds:
            once, cpu_seconds = seconds(engine, *kind, context)
            if number:  # the first round is not counted
                times[kind].append(once)
                cpu[kind].append(cpu_seconds)
    alone = min(times[chunk, 0])
    rows: dict[str, Row] = {}
    for count in decodes:
        mixed, apart = min(times[chunk, count]), min(times[0, count])
        rows[f"{chunk} beside {count}"] = {
            "alone, prompt tok/s": chunk / alone,
            "beside, prompt tok/s": chunk / mixed,
            "share": alone / mixed,
            "(CPU)": min(cpu[chunk, 0]) / min(cpu[chunk, count]),
            "all tokens, share": alone / mixed * (chunk + count) / chunk,
            "seconds / apart": mixed / (alone + apart),
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory or hub name; default: the embedded model")
    parser.add_argument("--chunks", default="256,512,1024", help="prompt tokens in a step")
    parser.add_argument("--decodes", default="1,4,8,16", help="streams in the same step")
    parser.add_argument("--context", type=int, default=512, help="tokens before the chunk and in each stream")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=240, help="no further round begins after them")
    parser.add_argument("--memory", default="1GiB", help="for KV pages")
    add_output_options(parser, "ride-along")
    arguments = parser.parse_args()

    config = EngineConfig.model_validate({"kv_cache_memory": arguments.memory, "max_num_batched_tokens": 4096})
    engine = load_engine(ReplicaSpec(config.model_spec(arguments.model), config, os.cpu_count() or 1))
    warm_up(engine)
    decodes = [int(count) for count in arguments.decodes.split(",")]
    rows: dict[str, Row] = {}
    chunks = arguments.chunks.split(",")
    for chunk in chunks:
        most_s = arguments.seconds / len(chunks)
        rows |= measure(engine, int(chunk), decodes, arguments.context, arguments.rounds, most_s)
        print(f"chunk {chunk}: load {os.getloadavg()[0]:.2f}", flush=True)
    busy = f"load of the machine {os.getloadavg()[0]:.1f}"
    load = f"context {arguments.context}, fastest of up to {arguments.rounds} rounds, {busy}"
    write(arguments, f"{arguments.model or 'default model'}; {load}.\n\n{table(rows, 'chunk, decodes')}", rows)


if __name__ == "__main__":
    main()
