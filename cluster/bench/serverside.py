"""Figures that no client can see: from a Crossdock server's own /metrics, over a run."""

from typing import Any

from crossdock.cluster.watch import scrape
from crossdock.cluster.watch.scrape import Scrape


def figures(before: Scrape, after: Scrape) -> dict[str, Any]:
    """Return the figures of all replicas together, between two scrapes.

    The prediction error is the largest of any replica; each replica reports the error of its recent steps. A figure
    that the server does not report is left out.
    """
    change = after.since(before)
    errors = {q: after.by(scrape.STEP_ERROR, "replica", quantile=q) for q in ("0.5", "0.9")}
    found = {
        "steps": {kind: int(count) for kind, count in change.by(scrape.STEPS, "kind").items()},
        "step_s_p50": change.quantile(scrape.STEP_SECONDS, 0.5),
        "step_s_p99": change.quantile(scrape.STEP_SECONDS, 0.99),
        "step_error_p50": max(errors["0.5"].values(), default=None),
        "step_error_p90": max(errors["0.9"].values(), default=None),
        "chunk_tokens_p50": change.quantile(scrape.CHUNK_TOKENS, 0.5),
        "prefill_tokens_per_s": change.rate(scrape.PROMPT_TOKENS),
        "cached_tokens": change.total(scrape.CACHED_TOKENS),
        "preemptions": change.total(scrape.PREEMPTIONS),
    }
    return {name: value for name, value in found.items() if value is not None}
