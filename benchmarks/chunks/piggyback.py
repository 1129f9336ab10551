"""Measure the gain of decodes that ride along with chunks, against prompts computed first, in steps of their own.

    python benchmarks/chunks/piggyback.py            # simulated: a minute

Prints, for each ratio of prompt to output tokens, the gain of chunks with decodes ("mixed") over whole
prompts in steps without decodes ("whole"): decode throughput (the inverse of the seconds that a decoded token adds to
its step), tokens per second end to end, and on pipeline stages the idle share and the tokens per second. The real
scheduler runs in simulated time on a preset's costs. All requests are there from the beginning, `--open` in progress.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from played import POLICIES, Played, job, play
from tables import add_output_options, markdown, write

from crossdock.workers.report.presets import preset

SETTINGS = ("whole", "mixed")


def run(args: argparse.Namespace, setting: str, stages: int, output: int) -> Played:
    """Return the run of a setting on so many stages, with outputs of so many tokens."""
    shape = {"pipeline_parallel_size": stages, "interval_share": 1 / stages, "runs_ahead": False}
    profile = preset(args.profile).model_copy(update=shape)
    jobs = [job(number, args.prompt_tokens, output) for number in range(args.requests * stages)]
    return play(profile, jobs, **POLICIES[setting], max_num_batched_tokens=args.budget, max_num_seqs=args.open * stages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="l4-8b", help="preset, as of `crossdock simulate`")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument(
        "--ratios", type=int, nargs="*", default=[10, 25, 50, 100], help="prompt tokens by output tokens"
    )
    parser.add_argument("--requests", type=int, default=60, help="of each stage")
    parser.add_argument("--open", type=int, default=16, help="requests in progress for each stage")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--budget", type=int, default=512, help="tokens of a step with chunks and decodes")
    add_output_options(parser, "piggyback")
    args = parser.parse_args()
    lines = [["prompt : output", "decode throughput", "tokens/s", f"{args.stages} stages: idle", "tokens/s"]]
    for ratio in args.ratios:
        output = max(args.prompt_tokens // ratio, 2)
        whole, mixed = (run(args, name, 1, output) for name in SETTINGS)
        piped, piped_mixed = (run(args, name, args.stages, output) for name in SETTINGS)
        decode, decode_mixed = whole.decode_seconds() * 1e3, mixed.decode_seconds() * 1e3
        rate, rate_mixed = whole.tokens_per_s, mixed.tokens_per_s
        cells = (
            f"{decode:.2f} to {decode_mixed:.2f} ms a token: {decode / decode_mixed:.2f}x",
            f"{rate:,.0f} to {rate_mixed:,.0f}: {rate_mixed / rate:.2f}x",
            f"{piped.idle_share():.1%} to {piped_mixed.idle_share():.1%}",
            f"{piped.tokens_per_s:,.0f} to {piped_mixed.tokens_per_s:,.0f}: "
            f"{piped_mixed.tokens_per_s / piped.tokens_per_s:.2f}x",
        )
        lines.append([f"{ratio} : 1", *cells])
    load = f"prompts of {args.prompt_tokens} tokens, {args.open} in progress per stage"
    write(args, f"Simulated, {args.profile}, budget {args.budget}: {load}.\n\n{markdown(lines)}", lines)


if __name__ == "__main__":
    main()
