"""Do chunks of equal time leave pipeline stages less idle than prompts computed whole, and lose no tokens?

    python benchmarks/chunks/stages.py                          # simulated on 2, 4 and 8 stages: 2 minutes

Prints the idle share of the stages' time and the tokens per second of each policy. The real scheduler runs in simulated
time. A step takes the seconds of a profile's costs, and each stage an equal share of these seconds. Costs: a preset,
or a JSON file of `crossdock tune --profile`. Requests are chats of 60 to 500 tokens in and 8 to 64 out; every sixth
prompt has 2,000 to 4,000 tokens. All requests are there from the beginning; `--open` of them per stage are in progress.
"""

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from played import POLICIES, Played, job, play
from tables import add_output_options, markdown, write

from crossdock.cluster.bench.workloads import Job
from crossdock.workers.report.presets import stored_profile

SETTINGS = {
    "prompts whole": POLICIES["whole"] | {"mixed_chunks": True},
    "chunks of 512 tokens": POLICIES["mixed"] | {"max_num_batched_tokens": 512},
    "chunks of equal time": POLICIES["adaptive"] | {"max_num_batched_tokens": 2048},
}
CHATS = 6  # of so many prompts one is long


def requests(count: int) -> list[Job]:
    """Return the load."""
    rng = random.Random(1)
    found = []
    for number in range(count):
        length = rng.randint(2000, 4000) if number % CHATS == CHATS - 1 else rng.randint(60, 500)
        found.append(job(number, length, rng.randint(8, 64)))
    return found


def run(args: argparse.Namespace, stages: int, setting: str) -> Played:
    """Return the run of a setting on so many stages."""
    profile = stored_profile(args.profile)
    shape = {"pipeline_parallel_size": stages, "interval_share": 1 / stages, "runs_ahead": False}
    engine = {**SETTINGS[setting], "max_num_seqs": args.open * stages}
    return play(profile.model_copy(update=shape), requests(args.requests), **engine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="l4-8b", help="preset, or JSON file of `crossdock tune --profile`")
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--open", type=int, default=6, help="requests in progress for each stage")
    parser.add_argument("--stages", type=int, nargs="*", default=[2, 4, 8])
    add_output_options(parser, "stages")
    args = parser.parse_args()
    runs = {name: [run(args, stages, name) for stages in args.stages] for name in SETTINGS}
    heads = [f"{stages} stages: {figure}" for stages in args.stages for figure in ("idle", "tokens/s", "gap p99 ms")]
    lines = [["policy", *heads]]
    data = {}
    for name, played in runs.items():
        figures = [(each.idle_share(), each.tokens_per_s, each.gap_p99()) for each in played]
        lines.append(
            [
                name,
                *(text for idle, rate, gap in figures for text in (f"{idle:.1%}", f"{rate:,.0f}", f"{gap * 1e3:,.0f}")),
            ]
        )
        data[name] = figures
    text = (
        f"Simulated with the costs of {args.profile}, {args.requests} requests, {args.open} in progress per stage.\n\n"
    )
    write(args, text + markdown(lines), data)


if __name__ == "__main__":
    main()
