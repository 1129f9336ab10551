"""Are steps of this checkout slower than those of another one? Measured in turns, on the same machine at the same time.

    git worktree add ../before COMMIT && python benchmarks/paired_steps.py --other-checkout ../before     # 3 minutes

Each checkout has a process of its own, which loads the model and makes streams. Only one of them computes at a time: in
every round each shape of a step is taken by one and then by the other, and the next round begins with the other. So a
disturbance of the machine meets both. Prints the medians of both in ms, and the median over rounds of their ratio:
above 1, this checkout is faster. A third process can run this checkout a second time (`--same`), which shows how far
the ratio is from 1 by chance.
"""

import argparse
import os
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

from paired import Checkout, answering, in_rounds, report
from tables import add_output_options, commit_of, hardware, today, write

ROOT = Path(__file__).resolve().parents[1]
STREAMS = ((1, 100), (8, 100), (8, 700), (32, 300), (64, 100))  # streams, and tokens of each one's prompt
CHUNKS = (64, 512)  # prompt tokens, in a step without streams


@cache
def _engine(model: str | None) -> Any:
    from crossdock.workers.replica.config import EngineConfig, ReplicaSpec
    from crossdock.workers.replica.engine.engine_loader import load_engine

    config = EngineConfig.model_validate({"kv_cache_memory": "2GiB", "admission": "queue"})
    return load_engine(ReplicaSpec(config.model_spec(model), config, os.cpu_count() or 1))


def median_step(model: str | None, streams: int, tokens: int, num_steps: int, salt: int) -> float:
    """Return the median seconds of so many steps: decodes of so many streams, or chunks where there are none.

    Prompts of streams are cached after the first time. Those of chunks have the `salt`, so that they are computed.
    """
    try:
        from crossdock.workers.schedule.request.submission import SamplingParams, Submission
    except ImportError:  # of a checkout from before that file
        from crossdock.workers.schedule.request.request import SamplingParams, Submission

    engine = _engine(model)
    names = [f"{number}" for number in range(streams or num_steps)]
    most = num_steps + 1 + streams if streams else 1
    params = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)
    seconds = list[float]()
    for name in names:
        prompt = [(int(name) * 131 + position * 7) % 40_000 + 100 for position in range(tokens)]
        engine.add(Submission(name, prompt, params, cache_salt="" if streams else f"{salt}/{tokens}/{name}"))
        if not streams:
            seconds.append(engine.step().seconds)
    waiting = set(names if streams else ())
    while waiting:  # nothing but what an engine has had in all commits
        waiting -= {delta.request_id for delta in engine.step().deltas if delta.token_ids}
    if streams:
        seconds = [engine.step().seconds for _ in range(num_steps)]
    for name in names:
        engine.abort(name)
    return median(seconds)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other-checkout", type=Path, required=True, help="directory of the commit to compare with")
    parser.add_argument("--same", action="store_true", help="run this checkout a second time as well")
    parser.add_argument("--model", help="directory or hub name (default: the embedded model)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=12, help="of one shape in one turn (default: %(default)s)")
    add_output_options(parser, "paired-steps")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    checkouts = {f"{commit_of(ROOT)} (this)": ROOT, commit_of(args.other_checkout): args.other_checkout}
    if args.same:
        checkouts["this again"] = ROOT
    shapes = {f"{streams} streams after {tokens} tokens": (streams, tokens) for streams, tokens in STREAMS}
    shapes |= {f"a chunk of {tokens} tokens": (0, tokens) for tokens in CHUNKS}

    def ask(shape: tuple[int, int], side: Checkout, number: int) -> float:
        return 1e3 * float(side.ask([args.model, *shape, args.steps, number]))

    with ExitStack() as stack:
        sides = [stack.enter_context(answering(path, Path(__file__), "median_step")) for path in checkouts.values()]
        found = in_rounds(sides, args.rounds, {name: partial(ask, shape) for name, shape in shapes.items()})
    text = f"{args.model or 'default model'}; {hardware()}; {today()}; medians of {args.rounds} rounds.\n\n"
    text += report(found, list(checkouts), "ms")
    write(args, text, {"date": today(), "hardware": hardware(), "checkouts": list(checkouts), "ms": found})


if __name__ == "__main__":
    main()
