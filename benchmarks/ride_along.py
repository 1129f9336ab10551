"""How many prompt tokens per second does a step lose when decodes ride along with its chunk?

    OMP_WAIT_POLICY=PASSIVE python benchmarks/ride_along.py       # four chunks, 0 to 16 decodes, seven rounds

Prints a row per size of chunk: prompt tokens/s of steps with the chunk alone and, for 1, 4, 8 and 16 decodes in the
same step, three shares:

- prompt tokens/s, relative to the chunk alone,
- all tokens/s, decodes included, likewise,
- seconds of the step, relative to the same work in two steps, one of the chunk and one of the decodes.

Every round measures all steps of a chunk size side by side, so that a load from elsewhere on the machine affects all
of them alike. A share is the median over the rounds, with the range of the first one in brackets. The chunk and each
stream have the same number of tokens before them.
"""

import argparse
import os
from statistics import median

from tables import hardware, markdown, today

from crossdock.workers.replica.calibrate import measure_step, warm_up
from crossdock.workers.replica.config import EngineConfig, ReplicaSpec
from crossdock.workers.replica.engine import Engine, load_engine


def seconds(engine: Engine, chunk: int, decodes: int, context: int) -> float:
    """Return the seconds of one step. `chunk` 0: decodes alone."""
    step = measure_step(engine, (context, chunk) if chunk else None, decodes, context, repeats=1)
    if step is None:
        raise ValueError(f"{chunk} tokens and {decodes} streams of {context} do not fit: raise --memory")
    return step[1][0]


def measure(engine: Engine, chunk: int, decodes: list[int], context: int, rounds: int) -> list[str]:
    """Return the cells of a chunk size's row: its tokens/s alone, then three shares for each number of decodes."""
    alone: list[float] = []
    beside: dict[int, list[float]] = {number: [] for number in decodes}
    streams: dict[int, list[float]] = {number: [] for number in decodes}
    for number in range(rounds + 1):
        once = seconds(engine, chunk, 0, context)
        mixed = {count: seconds(engine, chunk, count, context) for count in decodes}
        apart = {count: seconds(engine, 0, count, context) for count in decodes}
        if number:  # the first round is not counted
            alone.append(once)
            for count in decodes:
                beside[count].append(mixed[count])
                streams[count].append(apart[count])
    cells = [str(chunk), f"{chunk / median(alone):.0f}"]
    for count in decodes:
        prompt = [a / b for a, b in zip(alone, beside[count], strict=True)]
        every = (chunk + count) / chunk
        saved = [b / (a + s) for a, b, s in zip(alone, beside[count], streams[count], strict=True)]
        low, high = min(prompt), max(prompt)
        cells.append(
            f"{median(prompt):.1%} ({low:.0%} to {high:.0%}), {every * median(prompt):.1%}, {median(saved):.2f}x"
        )
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory or hub name; default: the embedded model")
    parser.add_argument("--chunks", default="64,256,512,1024", help="prompt tokens in a step")
    parser.add_argument("--decodes", default="1,4,8,16", help="streams in the same step")
    parser.add_argument("--context", type=int, default=512, help="tokens before the chunk and in each stream")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--memory", default="1GiB", help="for KV pages")
    arguments = parser.parse_args()

    config = EngineConfig.model_validate({"kv_cache_memory": arguments.memory, "max_num_batched_tokens": 4096})
    engine = load_engine(ReplicaSpec(config.model_spec(arguments.model), config, os.cpu_count() or 1))
    warm_up(engine)
    decodes = [int(count) for count in arguments.decodes.split(",")]
    heads = [f"{count} decodes: prompt tokens/s, all tokens/s, seconds / apart" for count in decodes]
    lines = [["chunk", "alone, tokens/s", *heads]]
    for chunk in arguments.chunks.split(","):
        lines.append(measure(engine, int(chunk), decodes, arguments.context, arguments.rounds))
        print(f"chunk {chunk}: load {os.getloadavg()[0]:.2f}", flush=True)
    print(f"\n{hardware()}; {today()}; context {arguments.context}, {arguments.rounds} rounds\n")
    print(markdown(lines))


if __name__ == "__main__":
    main()
