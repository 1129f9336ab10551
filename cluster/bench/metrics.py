"""Figures from what a client saw of its requests: times to first token, gaps, throughput, goodput. Pure functions.

*TTFT*: from sending the request (before the connection is made) to its first token. *Gap*: time between two moments
at which tokens of one stream reached the client. Tokens that arrive together are one moment, so a server that sends
tokens in groups has long gaps, not many zeros. *TPOT*: time from first to last token over the tokens after the first
moment. *E2E*: from sending to the end of the response.
"""

from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from crossdock.cluster.bench.workloads import Role
from crossdock.workers.schedule.request.slo import DEFAULT_CLASS, DEFAULT_CLASSES

Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class Sample:
    """One request as the client saw it. Times are seconds on one monotonic clock."""

    role: Role
    asked_tokens: int
    prompt_tokens: int  # asked for; replaced by the server's own count where there is one
    sent: float = 0.0
    times: MutableSequence[float] = field(default_factory=list)  # moments at which tokens arrived
    counts: MutableSequence[int] = field(default_factory=list)  # tokens at each of these moments
    ended: float = 0.0
    usage_tokens: int | None = None  # the server's own count of output tokens
    cached_tokens: int | None = None  # of its prompt, found in a prefix cache; None: the server does not report it
    error: str | None = None
    stopped: bool = False  # closed by the client, on purpose
    service_tier: str | None = None  # the SLO class it asked for
    tenant: str | None = None  # who sent it
    model: str = ""  # of several that are simulated
    refused: bool = False  # answered 429: the server predicted that it would be late
    unreachable: bool = False  # no connection could be made

    @property
    def output_tokens(self) -> int:
        return sum(self.counts) if self.usage_tokens is None else self.usage_tokens

    @property
    def ok(self) -> bool:
        return self.error is None and bool(self.times)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def e2e(self) -> float:
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first moment; None when all tokens arrived at once."""
        later = self.output_tokens - self.counts[0]
        return (self.times[-1] - self.times[0]) / later if later > 0 and len(self.times) > 1 else None

    @property
    def gaps(self) -> Floats:
        return np.diff(np.asarray(self.times, dtype=np.float64))


def spread_ms(seconds: Iterable[float] | Floats) -> dict[str, float | int]:
    """Return percentiles in milliseconds and the count; of an empty series the count alone."""
    values = np.asarray(seconds if isinstance(seconds, np.ndarray) else list(seconds), dtype=np.float64) * 1000
    if not values.size:
        return {"count": 0}
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return {
        "count": int(values.size),
        "mean": float(values.mean()),
        "p50": float(p50),
        "p90": float(p90),
        "p99": float(p99),
        "max": float(values.max()),
    }


def _longest_gap(sample: Sample) -> float:
    gaps = sample.gaps
    return float(gaps.max()) if gaps.size else 0.0


_MEASURED: Mapping[str, Callable[[Sample], float]] = {
    "ttft": lambda sample: sample.ttft,
    "tpot": lambda sample: sample.tpot or 0.0,
    "gap": _longest_gap,
    "e2e": lambda sample: sample.e2e,
}
"""Seconds of a request that goodput may limit. Only the limited ones are computed: a simulation may have a million."""

GOODPUT_KEYS = tuple(_MEASURED)


def parse_goodput(specs: Sequence[str]) -> dict[str, float]:
    """Return limits in seconds from `ttft:500 tpot:50` (ms; separated by spaces or commas, or in several strings).

    `gap` limits the longest gap of a request, `e2e` its whole time.

    Raises:
        ValueError: names the part that is not KEY:MS.
    """
    limits: dict[str, float] = {}
    for item in " ".join(specs).replace(",", " ").split():
        key, _, value = item.partition(":")
        if key not in GOODPUT_KEYS:
            raise ValueError(f"goodput: {item!r} is not KEY:MS with KEY one of {', '.join(GOODPUT_KEYS)}")
        try:
            limits[key] = float(value) / 1000
        except ValueError:
            raise ValueError(f"goodput: {item!r} needs a number of milliseconds after the colon") from None
        if not limits[key] > 0:
            raise ValueError(f"goodput: {item!r} must be above 0 ms")
    return limits


Targets = dict[str, dict[str, float]]  # limits in seconds, by SLO class

DEFAULT_TARGETS: Targets = {slo.name: {"ttft": slo.ttft_s, "tpot": slo.tpot_s} for slo in DEFAULT_CLASSES}


def parse_targets(specs: Sequence[str], known: Targets = DEFAULT_TARGETS) -> Targets:
    """Return the `known` classes with what `interactive=ttft:500,tpot:50` (milliseconds) changes or adds.

    Raises:
        ValueError: names the spec that is not CLASS=KEY:MS,….
    """
    targets = {name: dict(limits) for name, limits in known.items()}
    for spec in specs:
        name, equals, limits = spec.partition("=")
        if not name or not equals:
            raise ValueError(f"slo: {spec!r} is not CLASS=KEY:MS,…, e.g. interactive=ttft:500,tpot:50")
        try:
            targets.setdefault(name.strip(), {}).update(parse_goodput([limits]))
        except ValueError as error:
            raise ValueError(f"slo: {spec!r}: {str(error).removeprefix('goodput: ')}") from None
    return targets


def meets(sample: Sample, limits: dict[str, float]) -> bool:
    """Return whether a request succeeded within every limit. A single token has no TPOT and no gap to miss."""
    return sample.ok and all(_MEASURED[key](sample) <= limit for key, limit in limits.items())


def summarize(samples: Sequence[Sample], duration: float, limits: dict[str, float] | None = None) -> dict[str, Any]:
    """Return the figures of requests that were offered over `duration` seconds.

    Failed and refused requests count as such and as not good, and in no other figure. A request that the
    client closed on purpose counts its tokens and gaps, but has no end-to-end time.
    """
    ok = [s for s in samples if s.ok]
    whole = [s for s in ok if not s.stopped]
    output_tokens = sum(s.output_tokens for s in ok)
    prompt_tokens = sum(s.prompt_tokens for s in ok)
    seconds = max(duration, 1e-9)
    summary: dict[str, Any] = {
        "requests_ok": len(ok),
        "requests_refused": sum(s.refused for s in samples),
        "requests_failed": sum(not s.ok and not s.refused for s in samples),
        "first_error": next((s.error or "no token arrived" for s in samples if not s.ok and not s.refused), None),
        "short_outputs": sum(s.output_tokens < s.asked_tokens for s in whole),
        "duration_s": duration,
        "requests_per_s": len(ok) / seconds,
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens / seconds,
        "prompt_tokens": prompt_tokens,
        "prompt_tokens_per_s": prompt_tokens / seconds,
        "prefix_hit_rate": hit_rate(samples),
        "ttft_ms": spread_ms(s.ttft for s in ok),
        "gap_ms": spread_ms(np.concatenate([s.gaps for s in ok]) if ok else []),
        "tpot_ms": spread_ms(s.tpot for s in ok if s.tpot is not None),
        "e2e_ms": spread_ms(s.e2e for s in whole),
    }
    if limits:
        good = sum(meets(s, limits) for s in samples)
        summary["goodput"] = _goodput(good, len(samples), seconds) | {
            "limits_ms": {key: limit * 1000 for key, limit in limits.items()},
        }
    return summary


def hit_rate(samples: Sequence[Sample]) -> float | None:
    """Return the share of prompt tokens that were in a prefix cache; None: the server does not report it."""
    counted = [s for s in samples if s.ok and s.cached_tokens is not None]
    tokens = sum(s.prompt_tokens for s in counted)
    return sum(s.cached_tokens or 0 for s in counted) / tokens if tokens else None


def by_class(samples: Sequence[Sample], duration: float, targets: Targets) -> dict[str, Any]:
    """Return the figures of each SLO class with its goodput under its own targets, and the goodput of all together.

    A prompt of any length has its class's plain targets. The server allows more time to a prompt that takes longer
    than `ttft` even alone, but a client cannot know how much.
    """
    tiers = {s.service_tier: None for s in samples if s.service_tier is not None}
    names = [*(name for name in targets if name in tiers), *(name for name in tiers if name not in targets)]
    classes = {}
    for name in names:
        of_class = [s for s in samples if s.service_tier == name]
        classes[name] = summarize(of_class, duration, targets.get(name))
    tiered = [s for s in samples if s.service_tier is not None]
    good = sum(meets(s, targets.get(s.service_tier or "", {})) for s in tiered)
    return {"classes": classes, "goodput": _goodput(good, len(tiered), max(duration, 1e-9))}


def by_tenant(
    samples: Sequence[Sample], duration: float, targets: Targets, field: Literal["tenant", "model"] = "tenant"
) -> dict[str, Any]:
    """Return the figures of each tenant or model, with its goodput under the targets of its requests' classes."""
    found = {}
    for name in sorted({getattr(s, field) for s in samples} - {None, ""}):
        own = [s for s in samples if getattr(s, field) == name]
        good = sum(meets(s, targets.get(s.service_tier or DEFAULT_CLASS, {})) for s in own)
        found[name] = summarize(own, duration) | {"goodput": _goodput(good, len(own), max(duration, 1e-9))}
    return found


def _goodput(good: int, offered: int, seconds: float) -> dict[str, Any]:
    return {"share": good / offered if offered else 0.0, "requests_per_s": good / seconds}


def gaps_within(sample: Sample, windows: Sequence[tuple[float, float]]) -> Floats:
    """Return the gaps whose middle lies in one of the windows.

    The middle decides, because either edge of a gap may miss the window by microseconds. A long prompt arrives during a
    step that does not compute it. Its first token leaves in the step that ends the last gap it caused.
    """
    times = np.asarray(sample.times, dtype=np.float64)
    middles = (times[1:] + times[:-1]) / 2
    inside = np.zeros(middles.shape, dtype=bool)
    for start, end in windows:
        inside |= (middles >= start) & (middles <= end)
    return np.diff(times)[inside]


def interference(samples: Sequence[Sample], quiet: tuple[float, float]) -> dict[str, Any]:
    """Return the gaps of established streams in the quiet window and while long prompts are prefilled.

    A long prompt is prefilled from its sending to its first token.
    """
    streams = [s for s in samples if s.role == "stream" and s.ok]
    long = [s for s in samples if s.role == "long" and s.ok]
    windows = [(s.sent, s.times[0]) for s in long]
    disturbed = [gaps_within(s, windows) for s in streams]
    calm = [gaps_within(s, [quiet]) for s in streams]
    prefilling = sum(end - start for start, end in windows)
    return {
        "streams": len(streams),
        "long_prompts": len(long),
        "quiet_gap_ms": spread_ms(np.concatenate(calm) if calm else []),
        "interfered_gap_ms": spread_ms(np.concatenate(disturbed) if disturbed else []),
        "interfered_tokens_per_s": _tokens_within(streams, windows) / max(prefilling, 1e-9),
        "long_ttft_ms": spread_ms(s.ttft for s in long),
        "long_prompt_tokens_per_s": sum(s.prompt_tokens for s in long) / max(prefilling, 1e-9),
    }


def short_vs_long(samples: Sequence[Sample], quiet: tuple[float, float]) -> dict[str, Any]:
    """Return the TTFT of short requests sent in the quiet window and of those sent while long prompts are prefilled.

    A long prompt is prefilled from its sending to its first token.
    """
    short = [s for s in samples if s.role == "short" and s.ok]
    long = [s for s in samples if s.role == "long" and s.ok]
    windows = [(s.sent, s.times[0]) for s in long]
    return {
        "long_prompts": len(long),
        "quiet_ttft_ms": spread_ms(s.ttft for s in short if quiet[0] <= s.sent <= quiet[1]),
        "short_ttft_ms": spread_ms(s.ttft for s in short if any(start <= s.sent <= end for start, end in windows)),
        "long_ttft_ms": spread_ms(s.ttft for s in long),
        "long_prompt_tokens_per_s": sum(s.prompt_tokens for s in long) / max(sum(s.ttft for s in long), 1e-9),
    }


def _tokens_within(samples: Sequence[Sample], windows: Sequence[tuple[float, float]]) -> int:
    return sum(
        count
        for s in samples
        for time, count in zip(s.times, s.counts, strict=True)
        if any(start <= time <= end for start, end in windows)
    )
