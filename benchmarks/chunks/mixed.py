"""Prompts without chunks, with chunks, and with chunks beside decodes: who waits how long, and how even is the load?

    python benchmarks/chunks/mixed.py            # simulated: a minute

Prints for each policy: TTFT of long and of short prompts, the gaps between tokens of running requests, and the share of
time that the matrix products of the tokens take, over all and in windows of half a second (10th to 90th percentile; a
step counts in the window in which it ends). The real scheduler runs in simulated time on a preset's costs. Streams
decode all the time, a long prompt arrives every two seconds, and short ones every quarter of a second.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from played import POLICIES, job, play
from tables import add_output_options, markdown, write

from crossdock.cluster.bench.workloads import Job
from crossdock.workers.report.presets import preset

NAMES = {
    "whole": "not chunked: prompts whole, decodes in other steps",
    "alternating": "chunked: decodes in other steps",
    "mixed": "mixed: chunks beside decodes",
    "adaptive": "adaptive: chunks as the slack allows (default)",
}
WINDOW_S = 0.5


def requests(args: argparse.Namespace) -> list[Job]:
    """Return the load, in order of arrival."""
    step_s = 0.01  # of a decode, about: outputs that last as long as the load
    streams = [job(n, 512, int(args.seconds / step_s), role="stream") for n in range(args.streams)]
    every = args.long_every
    long = [job(n, args.long_tokens, 8, 1.0 + n * every, "long") for n in range(int(args.seconds / every))]
    short = [job(n, 256, 8, 1.0 + n * 0.25 + 0.1, "short") for n in range(int(args.seconds / 0.25))]
    return sorted([*streams, *long, *short], key=lambda each: each.due or 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="h100-8b", help="preset, as of `crossdock simulate`")
    parser.add_argument("--budget", type=int, default=4096, help="tokens of a step with chunks")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--long-tokens", type=int, default=16_384)
    parser.add_argument("--long-every", type=float, default=2.0, help="seconds")
    parser.add_argument("--seconds", type=float, default=12.0, help="in which prompts arrive")
    add_output_options(parser, "mixed")
    args = parser.parse_args()
    heads = [
        "long TTFT p50 ms",
        "short TTFT p50 / p99 ms",
        "gap p50 / p99 / longest ms",
        "products' share",
        "in windows",
    ]
    lines = [["policy", *heads]]
    for name, told in NAMES.items():
        engine = {**POLICIES[name], "max_num_batched_tokens": args.budget, "max_num_seqs": 128}
        played = play(preset(args.profile), requests(args), **engine)
        short, gaps = played.ttft("short"), played.gaps("stream")
        shares = played.product_shares(WINDOW_S)[2 : int(args.seconds / WINDOW_S)]
        cells = [
            f"{np.median(played.ttft('long')) * 1e3:,.0f}",
            " / ".join(f"{np.percentile(short, q) * 1e3:,.0f}" for q in (50, 99)),
            " / ".join(f"{np.percentile(gaps, q) * 1e3:,.1f}" for q in (50, 99, 100)),
            f"{np.mean(shares):.1%}",
            f"{np.percentile(shares, 10):.0%} to {np.percentile(shares, 90):.0%}",
        ]
        lines.append([told, *cells])
    load = (
        f"{args.streams} streams, prompts of {args.long_tokens:,} tokens every {args.long_every:g} s, 256 every 0.25 s"
    )
    write(args, f"Simulated, {args.profile}, budget {args.budget}: {load}.\n\n{markdown(lines)}", lines)


if __name__ == "__main__":
    main()
