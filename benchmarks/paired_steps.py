"""Are steps of this checkout slower than those of another one? Measured in turns, on the same machine at the same time.

    git worktree add ../before COMMIT && python benchmarks/paired_steps.py --other-checkout ../before     # 3 minutes

Each checkout has a process of its own, which loads the model and makes streams. Only one of them computes at a time: in
every round each shape of a step is taken by one and then by the other, and the next round begins with the other. So a
disturbance of the machine meets both. Prints the medians of both in ms, and the median over rounds of their ratio:
above 1, this checkout is faster. A third process can run this checkout a second time (`--same`), which shows how far
the ratio is from 1 by chance.
"""

import argparse
import json
import os
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from paired import Checkout, commit_of, started
from tables import cell, hardware, markdown, today, write

ROOT = Path(__file__).resolve().parents[1]
STREAMS = ((1, 100), (8, 100), (8, 700), (32, 300), (64, 100))  # streams, and tokens of each one's prompt
CHUNKS = (64, 512)  # prompt tokens, in a step without streams


# -- the process of a checkout ---------------------------------------------------------------------------------------


def serve(args: argparse.Namespace) -> None:
    """Answer questions from stdin with the seconds of steps, until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    from crossdock.workers.replica.config import EngineConfig, ReplicaSpec
    from crossdock.workers.replica.engine.engine_loader import load_engine

    settings = {"kv_cache_memory": "2GiB", "admission": "queue"}
    config = EngineConfig.model_validate(settings)
    engine = load_engine(ReplicaSpec(config.model_spec(args.model), config, os.cpu_count() or 1))
    for number, line in enumerate(sys.stdin):
        seconds = steps_of(engine, **json.loads(line), num_steps=args.steps, salt=str(number))
        print(json.dumps(seconds), file=answers, flush=True)


def steps_of(engine: Any, streams: int, tokens: int, num_steps: int, salt: str) -> list[float]:
    """Return the seconds of `num_steps` steps: decodes of so many streams, or chunks where there are none.

    Prompts of streams are cached after the first time. Those of chunks have the `salt`, so that they are computed.
    """
    try:
        from crossdock.workers.schedule.submission import SamplingParams, Submission
    except ImportError:  # of a checkout from before that file
        from crossdock.workers.schedule.request import SamplingParams, Submission  # type: ignore[attr-defined, no-redef, assignment]

    names = [f"{number}" for number in range(streams or num_steps)]
    most = num_steps + 1 + streams if streams else 1
    params = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)
    seconds = list[float]()
    for name in names:
        prompt = [(int(name) * 131 + position * 7) % 40_000 + 100 for position in range(tokens)]
        engine.add(Submission(name, prompt, params, cache_salt="" if streams else salt + name))
        if not streams:
            seconds.append(engine.step().seconds)
    waiting = set(names if streams else ())
    while waiting:  # nothing but what an engine has had in all commits
        waiting -= {delta.request_id for delta in engine.step().deltas if delta.token_ids}
    if streams:
        seconds = [engine.step().seconds for _ in range(num_steps)]
    for name in names:
        engine.abort(name)
    return seconds


# -- the comparison --------------------------------------------------------------------------------------------------


def compare(sides: list[Checkout], rounds: int) -> dict[str, list[list[float]]]:
    """Return the median seconds of each shape by round and side."""
    shapes = {f"{streams} streams after {tokens} tokens": (streams, tokens) for streams, tokens in STREAMS}
    shapes |= {f"a chunk of {tokens} tokens": (0, tokens) for tokens in CHUNKS}
    found: dict[str, list[list[float]]] = {name: [] for name in shapes}
    for number in range(rounds + 1):
        for name, (streams, tokens) in shapes.items():
            medians = [0.0] * len(sides)
            for turn in range(len(sides)):
                side = (turn + number) % len(sides)
                medians[side] = statistics.median(sides[side].ask({"streams": streams, "tokens": tokens}))
            if number:  # the first round has first calls
                found[name].append(medians)
        print(f"round {number} of {rounds}; load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    return found


def report(found: dict[str, list[list[float]]], names: list[str]) -> str:
    """Return the table: ms of each side, and how many times as fast the first one is."""
    heads = [f"{name} / {names[0]}" for name in names[1:]]
    lines = [["step", *(f"{name}, ms" for name in names), *heads]]
    for shape, rounds in found.items():
        ms = [1e3 * statistics.median(medians) for medians in zip(*rounds, strict=True)]
        ratios = [
            statistics.median([medians[side] / medians[0] for medians in rounds]) for side in range(1, len(names))
        ]
        lines.append([shape, *map(cell, ms), *(f"{ratio:.3f}" for ratio in ratios)])
    every = [
        statistics.geometric_mean([medians[side] / medians[0] for rounds in found.values() for medians in rounds])
        for side in range(1, len(names))
    ]
    lines.append(["all (geometric mean)", *("" for _ in names), *(f"{ratio:.3f}" for ratio in every)])
    return markdown(lines)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other-checkout", type=Path, help="directory of the commit to compare with")
    parser.add_argument("--same", action="store_true", help="run this checkout a second time as well")
    parser.add_argument("--model", help="directory or hub name (default: the embedded model)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=12, help="of one shape in one turn (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=ROOT / ".cache" / "paired-steps" / "results")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.serve and args.other_checkout is None:
        parser.error("--other-checkout is missing")
    return args


def main() -> None:
    args = parse_args()
    if args.serve:
        serve(args)
        return
    checkouts = {f"{commit_of(ROOT)} (this)": ROOT, commit_of(args.other_checkout): args.other_checkout}
    if args.same:
        checkouts["this again"] = ROOT
    command = [__file__, "--serve", "--steps", str(args.steps), *(["--model", args.model] if args.model else [])]
    with ExitStack() as stack:
        sides = [stack.enter_context(started(path, command)) for path in checkouts.values()]
        found = compare(sides, args.rounds)
    text = f"{args.model or 'default model'}; {hardware()}; {today()}; medians of {args.rounds} rounds.\n\n"
    text += report(found, list(checkouts))
    write(args.output, text, {"date": today(), "hardware": hardware(), "checkouts": list(checkouts), "seconds": found})


if __name__ == "__main__":
    main()
