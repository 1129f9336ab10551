"""A deployment's /metrics as data: totals, the change between two scrapes, and quantiles of histograms."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from prometheus_client.parser import text_string_to_metric_families

# Every name that this module, `crossdock top` and `crossdock bench` read. A name that a server lacks reads as None.
STEPS = "crossdock_steps_total"  # by kind
STEP_SECONDS = "crossdock_step_seconds"  # histogram, by kind
STEP_ERROR = "crossdock_step_relative_error"  # |predicted - actual| / actual, by quantile: "0.5" and "0.9"
CHUNK_TOKENS = "crossdock_chunk_tokens"  # histogram
PROMPT_TOKENS = "crossdock_prompt_tokens_total"  # computed
OUTPUT_TOKENS = "crossdock_output_tokens_total"
CACHED_TOKENS = "crossdock_cached_tokens_total"  # by source: pool, host, files, replica
DRAFT_TOKENS = "crossdock_draft_tokens_total"
ACCEPTED_TOKENS = "crossdock_draft_tokens_accepted_total"
ITEMS_ENCODED = "crossdock_items_encoded_total"  # pictures
ITEM_HITS = "crossdock_item_hits_total"  # pictures whose embeddings were in memory
ENCODER_SECONDS = "crossdock_encoder_seconds"  # histogram
PAGES = "crossdock_pages"  # by state
PREEMPTIONS = "crossdock_preemptions_total"
CPU_KERNELS = "crossdock_cpu_kernels"  # 1, by kernels: which compute the matrix products
REQUESTS = "crossdock_requests_active"  # by status and slo_class
UNCACHED_WAITING = "crossdock_uncached_tokens_waiting"  # by slo_class
BACKLOG_SECONDS = "crossdock_backlog_seconds"  # by slo_class
REFUSED = "crossdock_ingress_requests_refused_total"  # answers with 429, by slo_class
SLO_TTFT = "crossdock_slo_ttft_total"  # requests by slo_class and outcome: met or missed
SLO_TPOT = "crossdock_slo_tpot_total"  # likewise
BEYOND = "crossdock_promise_beyond_seconds"  # least seconds of a token, of a slo_class that promises less
TTFT_SECONDS = "crossdock_time_to_first_token_seconds"  # histogram, by slo_class
GAP_SECONDS = "crossdock_inter_token_seconds"  # histogram, by slo_class
CHARGED_SECONDS = "crossdock_charged_seconds_total"  # predicted, by tenant and slo_class

Series = frozenset[tuple[str, str]]  # the labels of one sample


@dataclass(frozen=True, slots=True)
class Scrape:
    """The samples of one exposition, or the differences of two."""

    seconds: float  # of a scrape: its time on the reader's clock; of a difference: the time between the two
    samples: Mapping[str, Mapping[Series, float]]  # by the sample's name

    @classmethod
    def parse(cls, text: str, seconds: float) -> "Scrape":
        """Read Prometheus's text format.

        Raises:
            ValueError: the text is in another format.
        """
        samples: dict[str, dict[Series, float]] = defaultdict(dict)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples[sample.name][frozenset(sample.labels.items())] = sample.value
        return cls(seconds, dict(samples))

    def since(self, before: "Scrape") -> "Scrape":
        """Return the increases since `before`. A counter that fell was restarted with its replica: all of it counts."""
        gains: dict[str, dict[Series, float]] = {}
        for name, values in self.samples.items():
            old = before.samples.get(name, {})
            gains[name] = {series: _gain(value, old.get(series, 0.0)) for series, value in values.items()}
        return Scrape(self.seconds - before.seconds, gains)

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum of the samples that have these labels; None if there are none."""
        wanted = labels.items()
        found = [value for series, value in self.samples.get(name, {}).items() if wanted <= series]
        return sum(found) if found else None

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Return that sum for every value of `label`; samples without the label are under the empty string."""
        sums: dict[str, float] = defaultdict(float)
        wanted = labels.items()
        for series, value in self.samples.get(name, {}).items():
            if wanted <= series:
                sums[dict(series).get(label, "")] += value
        return dict(sums)

    def rate(self, name: str, **labels: str) -> float | None:
        """Return the total per second of a difference."""
        total = self.total(name, **labels)
        return None if total is None or self.seconds <= 0 else total / self.seconds

    def quantile(self, name: str, quantile: float, **labels: str) -> float | None:
        """Return a quantile of a histogram as Prometheus's histogram_quantile does; None if nothing was observed.

        Within a bucket it is interpolated linearly; beyond the last bucket it is that bucket's limit.
        """
        buckets = sorted((float(limit), count) for limit, count in self.by(f"{name}_bucket", "le", **labels).items())
        if not buckets or not buckets[-1][1]:
            return None
        rank = quantile * buckets[-1][1]
        for (low, below), (high, count) in pairwise([(0.0, 0.0), *buckets]):
            if count >= rank and count > below:
                return low if high == inf else low + (high - low) * (rank - below) / (count - below)
        raise AssertionError("the last bucket counts everything")


def _gain(value: float, before: float) -> float:
    return value - before if value >= before else value
