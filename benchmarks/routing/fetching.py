"""Predict the seconds to the first token of a prompt whose prefix is on another replica, at several rates of its link.

    python benchmarks/routing/fetching.py

Prints them computed, fetched, and cut: computed from its beginning while it is fetched from its end.
"""

from itertools import product

from rich.console import Console
from rich.table import Table

from crossdock.router.fleet import Fleet
from crossdock.router.placement import HANDOVER_S, Query
from crossdock.workers.report.advertise import LiveProfile, PageChanges, Prompts
from crossdock.workers.report.presets import preset
from crossdock.workers.schedule.memory.prefix_index import hash_pages

PRESETS = ("h100-8b", "h100-70b")
LENGTHS = (2048, 8192, 49_152)  # tokens of a prefix
RATES = (1.25e9, 12.5e9, 50e9)  # bytes a second of a link


def one_prompt(name: str, tokens: int, rate: float) -> tuple[float, float, float]:
    """Return the predicted seconds to the first token of a prompt: computed, fetched, and cut.

    Its prefix of `tokens` tokens is on another replica, which is busy for 20 s and sends `rate` bytes a second.
    Cut, the replica computes all the time; fetched, it computes the last 32 tokens."""
    profile = preset(name).model_copy(update={"peer": b"a dock", "compatibility": "one", "bytes_per_second": rate})
    router, hashes = Fleet(), hash_pages(range(tokens + 32), profile.page_size)
    places = {"places": (64,) * len(profile.slo_classes), "free_pages": (20_000,) * len(profile.slo_classes)}
    for replica, prompts in (("holder", (Prompts(0, 6, 4, 400_000, 20.0),)), ("other", ())):
        router.join(replica, profile, 0.0)
        router.hear(replica, LiveProfile("first", 1, (), prompts, **places), 0.0)
    router.hear_pages("holder", PageChanges("first", 1, hashes[: tokens // profile.page_size]))
    computed = router.choose(Query("prompt", tokens + 32, hashes), 0.0).alternatives["compute"]
    rest = profile.cost.chunk_step_seconds(tokens, 32)
    travel = tokens / profile.page_size * profile.page_bytes / rate
    wait, saved = HANDOVER_S + travel, computed - rest
    return computed, rest + wait, rest + saved * wait / (saved + travel)


def main() -> None:
    """Print the table."""
    out = Table("replica", "tokens", "GB/s", "computed, ms", "fetched", "cut", title="One prompt")
    for name, tokens, rate in product(PRESETS, LENGTHS, RATES):
        seconds = one_prompt(name, tokens, rate)
        out.add_row(name, f"{tokens:,}", f"{rate / 1e9:.4g}", *(f"{1000 * each:.0f}" for each in seconds))
    Console(width=120).print(out)


if __name__ == "__main__":
    main()
