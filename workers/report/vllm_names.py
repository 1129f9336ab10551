"""vLLM's names for Crossdock's metrics, so that dashboards and autoscalers made for vLLM can read them.

One table says which of our families each name is made from. Nothing is counted twice: at each scrape, a name's samples
are sums over our samples, with our buckets. Names, types and labels are those of vLLM 0.32 (November 2026),
vllm/v1/metrics/loggers.py.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

ENGINE = "0"  # label `engine`: a replica is one engine. The label `replica` tells replicas apart


@dataclass(frozen=True, slots=True)
class Source:
    """The samples of one of our families that a name sums."""

    family: str
    only: tuple[str, tuple[str, ...]] | None = None  # a label, and its values that count; None: every sample
    labels: Mapping[str, str] = field(default_factory=dict)  # our label: vLLM's; the sum is over all other labels
    fixed: Mapping[str, str] = field(default_factory=dict)  # further labels of the result

    def takes(self, labels: Mapping[str, str]) -> bool:
        return self.only is None or labels.get(self.only[0]) in self.only[1]


@dataclass(frozen=True, slots=True)
class Name:
    """One of vLLM's metrics. A counter's samples end in `_total`, which `name` lacks."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    text: str
    sources: tuple[Source, ...]
    share_of: str | None = None  # a family: the result is a share of the sum of all its samples


def _gauge(name: str, text: str, *sources: Source, share_of: str | None = None) -> Name:
    return Name(name, "gauge", text, sources, share_of)


def _counter(name: str, text: str, *sources: Source) -> Name:
    return Name(name, "counter", text, sources)


def _histogram(name: str, text: str, family: str, phase: str | None = None) -> Name:
    return Name(name, "histogram", text, (Source(family, None if phase is None else ("phase", (phase,))),))


_ACTIVE = "crossdock_requests_active"
_PAGES = "crossdock_pages"
_INFO = "crossdock_kv_cache_info"
_SLEEP = "crossdock_sleep_level"
_COMPUTED = "crossdock_prompt_tokens"
_CACHED = "crossdock_cached_tokens"
_IN_POOL = ("source", ("pool",))
_ELSEWHERE = ("source", ("host", "files", "replica"))
_PHASES = "crossdock_request_phase_seconds"
_PAGE_LABELS = {
    "page_size": "block_size",
    "num_pages": "num_gpu_blocks",
    "kv_cache_dtype": "cache_dtype",
    "enable_prefix_caching": "enable_prefix_caching",
}

OF_REPLICAS = (
    _gauge("num_requests_running", "Requests that are computed.", Source(_ACTIVE, ("status", ("running",)))),
    _gauge("num_requests_waiting", "Requests that wait.", Source(_ACTIVE, ("status", ("waiting", "held")))),
    _gauge(
        "num_requests_waiting_by_reason",
        "Waiting requests: capacity: for pages or a slot in a step; deferred: for a transfer of KV pages.",
        Source(_ACTIVE, ("status", ("waiting",)), fixed={"reason": "capacity"}),
        Source(_ACTIVE, ("status", ("held",)), fixed={"reason": "deferred"}),
    ),
    _gauge(
        "engine_sleep_state",
        "1 for awake, or for the level of sleep. weights_offloaded: 1, pages; discard_all: 2, pages and weights.",
        Source(_SLEEP, ("level", ("0",)), fixed={"sleep_state": "awake"}),
        Source(_SLEEP, ("level", ("1",)), fixed={"sleep_state": "weights_offloaded"}),
        Source(_SLEEP, ("level", ("2",)), fixed={"sleep_state": "discard_all"}),
    ),
    _gauge(
        "kv_cache_usage_perc",
        "Share of the KV pages that requests hold, from 0 to 1.",
        Source(_PAGES, ("state", ("owned", "quarantined"))),
        share_of=_PAGES,
    ),
    _gauge("cache_config_info", "The KV pages of the replica.", Source(_INFO, labels=_PAGE_LABELS)),
    _counter("num_preemptions", "Requests preempted.", Source("crossdock_preemptions")),
    _counter("prompt_tokens", "Prompt tokens, computed or cached.", Source(_COMPUTED), Source(_CACHED)),
    _counter(
        "prompt_tokens_by_source",
        "Prompt tokens by source. external_kv_transfer: their pages lay in a tier or at another replica.",
        Source(_COMPUTED, fixed={"source": "local_compute"}),
        Source(_CACHED, _IN_POOL, fixed={"source": "local_cache_hit"}),
        Source(_CACHED, _ELSEWHERE, fixed={"source": "external_kv_transfer"}),
    ),
    _counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache.", Source(_CACHED)),
    _counter(
        "prompt_tokens_cached_by_source",
        "Cached prompt tokens by where their pages lay.",
        Source(_CACHED, _IN_POOL, fixed={"source": "device"}),
        Source(_CACHED, ("source", ("host",)), fixed={"source": "host"}),
        Source(_CACHED, ("source", ("files",)), fixed={"source": "disk"}),
        Source(_CACHED, ("source", ("replica",)), fixed={"source": "p2p"}),
    ),
    _counter("prefix_cache_queries", "Prompt tokens looked up in the pool.", Source(_COMPUTED), Source(_CACHED)),
    _counter("prefix_cache_hits", "Prompt tokens found in the pool.", Source(_CACHED, _IN_POOL)),
    _counter(
        "external_prefix_cache_queries",
        "Prompt tokens that the pool lacked.",
        Source(_COMPUTED),
        Source(_CACHED, _ELSEWHERE),
    ),
    _counter(
        "external_prefix_cache_hits",
        "Prompt tokens found in tiers and at other replicas.",
        Source(_CACHED, _ELSEWHERE),
    ),
    _counter("generation_tokens", "Tokens generated.", Source("crossdock_output_tokens")),
    _counter("spec_decode_num_drafts", "Drafts that steps verified.", Source("crossdock_drafts")),
    _counter("spec_decode_num_draft_tokens", "Drafted tokens.", Source("crossdock_draft_tokens")),
    _counter("spec_decode_num_accepted_tokens", "Accepted ones.", Source("crossdock_draft_tokens_accepted")),
    _counter(
        "spec_decode_num_accepted_tokens_per_pos",
        "Accepted drafted tokens by their place in a draft.",
        Source("crossdock_draft_tokens_accepted_at", labels={"position": "position"}),
    ),
    _histogram("iteration_tokens_total", "Tokens per step.", "crossdock_step_tokens"),
    _histogram("inter_token_latency_seconds", "Between two tokens of a stream.", "crossdock_inter_token_seconds"),
    _histogram("request_queue_time_seconds", "From arrival to the first chunk.", _PHASES, "queue"),
    _histogram("request_prefill_time_seconds", "From the first chunk to the first token.", _PHASES, "prefill"),
    _histogram("request_decode_time_seconds", "From the first token to the last.", _PHASES, "decode"),
    _histogram("request_inference_time_seconds", "From the first chunk to the last token.", _PHASES, "inference"),
    _histogram(
        "request_prefill_kv_computed_tokens",
        "Prompt tokens computed for a request, without cached ones.",
        "crossdock_prefill_tokens",
    ),
)
OF_INGRESSES = (
    _counter(
        "request_success",
        "Requests ended.",
        Source("crossdock_ingress_requests_ended", labels={"finish_reason": "finished_reason"}),
    ),
    _histogram(
        "time_to_first_token_seconds",
        "From submission to the first token.",
        "crossdock_ingress_time_to_first_token_seconds",
    ),
    _histogram("e2e_request_latency_seconds", "From submission to the end.", "crossdock_ingress_request_seconds"),
    _histogram(
        "request_time_per_output_token_seconds",
        "Mean gap between a request's tokens.",
        "crossdock_ingress_time_per_output_token_seconds",
    ),
    _histogram("request_prompt_tokens", "Prompt tokens of a request.", "crossdock_ingress_prompt_tokens"),
    _histogram("request_generation_tokens", "Tokens of an output.", "crossdock_ingress_output_tokens"),
    _histogram(
        "request_max_num_generation_tokens",
        "Tokens of an output: every choice is a request of its own.",
        "crossdock_ingress_output_tokens",
    ),
    _histogram("request_params_max_tokens", "Most tokens that a request may get.", "crossdock_ingress_max_tokens"),
)


def exposition(registry: Collector, names: Iterable[Name], model_name: str | None) -> str:
    """Return the text of a registry; with a `model_name` also under vLLM's names. Each collector is asked once."""
    collected = list(registry.collect())
    families = [_without_unread(family) for family in collected]
    if model_name is not None:
        families += vllm_families(names, collected, model_name)
    return generate_latest(_Collected(families)).decode()


def _without_unread(family: Metric) -> Metric:
    """Return a family without the times at which its series were made, and without histograms of labels that nothing
    was observed with: two thirds of all lines of a large fleet, which no dashboard reads.

    A histogram without labels stays at 0, so that each family has its first observation as an increase.
    """
    kept = [sample for sample in family.samples if not sample.name.endswith("_created")]
    if family.type == "histogram":
        empty = [
            sample.labels for sample in kept if sample.labels and sample.name.endswith("_count") and not sample.value
        ]
        kept = [sample for sample in kept if {k: v for k, v in sample.labels.items() if k != "le"} not in empty]
    if len(kept) == len(family.samples):
        return family
    found = Metric(family.name, family.documentation, family.type, family.unit)
    found.samples = kept
    return found


class _Collected(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def vllm_families(names: Iterable[Name], families: Iterable[Metric], model_name: str) -> Iterator[Metric]:
    """Yield the families that vLLM has under these names, made from ours.

    Args:
        names: `OF_REPLICAS` or `OF_INGRESSES`.
        families: all families of one registry, as it collects them; each source must be among them.
        model_name: value of the label `model_name`.
    """
    ours = {family.name: family for family in families}
    for each in names:
        found = Metric(f"vllm:{each.name}", each.text, each.kind)
        total = _total(ours[each.share_of]) if each.share_of is not None else 1.0
        for (suffix, labels), value in _sums(each, ours).items():
            found.add_sample(
                found.name + suffix, {"model_name": model_name, "engine": ENGINE, **dict(labels)}, value / (total or 1)
            )
        yield found


_Key = tuple[str, tuple[tuple[str, str], ...]]  # a sample's suffix, and its labels


def _sums(name: Name, ours: Mapping[str, Metric]) -> dict[_Key, float]:
    sums: dict[_Key, float] = defaultdict(float)
    for source in name.sources:
        family = ours[source.family]
        kept = {**source.labels, "le": "le"}
        for sample in family.samples:
            suffix = sample.name.removeprefix(family.name)
            if suffix == "_created" or not source.takes(sample.labels):
                continue
            labels = {kept[label]: value for label, value in sample.labels.items() if label in kept}
            sums[suffix, tuple((labels | dict(source.fixed)).items())] += sample.value
    return sums


def _total(family: Metric) -> float:
    return float(sum(sample.value for sample in family.samples))
