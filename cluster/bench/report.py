"""The report of a benchmark: a table for people, JSON for programs."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from crossdock.cluster.bench.run import BenchResult


def table(result: BenchResult) -> Table:
    """Return a two-column table; times in milliseconds."""
    summary = result.summary
    out = Table(title=f"{result.options.workload} on {result.model}", show_header=False, title_justify="left")
    out.add_column(style="bold", no_wrap=True)
    out.add_column(justify="right")
    _add_requests(out, summary)
    if "interference" in summary:
        _add_interference(out, summary["interference"])
    elif "short_vs_long" in summary:
        _add_short_vs_long(out, summary["short_vs_long"])
    else:
        _add_latencies(out, summary)
    if "goodput" in summary:
        out.add_section()
        out.add_row(*_goodput("goodput", summary["goodput"]))
    if "slo" in summary:
        add_classes(out, summary["slo"])
    add_tenants(out, summary.get("tenants", {}))
    if "server" in summary:
        _add_server(out, summary["server"])
    out.add_section()
    # A client that needs a good part of a core has measured itself as well as the server.
    style = "yellow" if result.client_cpu_share > 0.1 else "dim"
    out.add_row("client CPU", f"{result.client_cpu_share:.1%} of a core", style=style)
    for note in result.notes:
        out.add_row("note", escape(note), style="yellow")
    return out


def _add_requests(out: Table, summary: dict[str, Any]) -> None:
    failed = summary["requests_failed"]
    refused = summary["requests_refused"]
    counts = f"{summary['requests_ok']} / {failed}" + (f", {refused} refused (429)" if refused else "")
    out.add_row("requests ok / failed", counts, style="red" if failed else None)
    if failed:
        out.add_row("first error", escape(str(summary["first_error"])), style="red")
    if summary["short_outputs"]:
        out.add_row("outputs shorter than asked", str(summary["short_outputs"]), style="yellow")
    out.add_row("duration", f"{summary['duration_s']:.2f} s")
    out.add_row("output", f"{summary['output_tokens_per_s']:.1f} tok/s")


def _add_interference(out: Table, figures: dict[str, Any]) -> None:
    out.add_section()
    out.add_row("streams / long prompts", f"{figures['streams']} / {figures['long_prompts']}")
    out.add_row("gap, quiet        p50 / p99 / max", _spread(figures["quiet_gap_ms"]))
    out.add_row("gap, interfered   p50 / p99 / max", _spread(figures["interfered_gap_ms"]))
    out.add_row("stream output while prefilling", f"{figures['interfered_tokens_per_s']:.1f} tok/s")
    out.add_row("long prompt TTFT  p50 / p99 / max", _spread(figures["long_ttft_ms"]))
    out.add_row("long prompt speed", f"{figures['long_prompt_tokens_per_s']:.0f} tok/s")


def _add_short_vs_long(out: Table, figures: dict[str, Any]) -> None:
    out.add_section()
    out.add_row("short TTFT, quiet             p50 / p99 / max", _spread(figures["quiet_ttft_ms"]))
    out.add_row("short TTFT, while prefilling  p50 / p99 / max", _spread(figures["short_ttft_ms"]))
    out.add_row("short requests while prefilling", str(figures["short_ttft_ms"]["count"]))
    out.add_row("long prompt TTFT              p50 / p99 / max", _spread(figures["long_ttft_ms"]))
    out.add_row("long prompt speed", f"{figures['long_prompt_tokens_per_s']:.0f} tok/s")


def _add_latencies(out: Table, summary: dict[str, Any]) -> None:
    out.add_row("prompts", f"{summary['prompt_tokens_per_s']:.1f} tok/s")
    if summary["prefix_hit_rate"] is not None:
        out.add_row("prompt tokens from prefix caches", f"{summary['prefix_hit_rate']:.1%}")
    out.add_row("requests", f"{summary['requests_per_s']:.2f} /s")
    out.add_section()
    out.add_row("TTFT      p50 / p90 / p99", _spread(summary["ttft_ms"], "p50", "p90", "p99"))
    if summary["gap_ms"]["count"]:
        out.add_row("token gap p50 / p99 / max", _spread(summary["gap_ms"]))
        out.add_row("TPOT      p50 / p99", _spread(summary["tpot_ms"], "p50", "p99"))
    out.add_row("E2E       p50 / p90 / p99", _spread(summary["e2e_ms"], "p50", "p90", "p99"))


def add_classes(out: Table, slo: dict[str, Any]) -> None:
    """Add the rows of each SLO class, as `metrics.by_class` returns them."""
    for name, figures in slo["classes"].items():
        out.add_section()
        answers = (figures[f"requests_{how}"] for how in ("ok", "refused", "failed"))
        out.add_row(f"{escape(name)}: ok / refused / failed", " / ".join(map(str, answers)))
        if "goodput" in figures:
            out.add_row(*_goodput("  good", figures["goodput"]))
        out.add_row("  TTFT      p50 / p99", _spread(figures["ttft_ms"], "p50", "p99"))
        out.add_row("  token gap p50 / p99 / max", _spread(figures["gap_ms"]))
        out.add_row("  TPOT      p50 / p99", _spread(figures["tpot_ms"], "p50", "p99"))
    out.add_section()
    out.add_row(*_goodput("all classes: good", slo["goodput"]))
    # The server allows such a prompt twice the time it takes alone (SloClass.ttft_deadline), which no client can know.
    out.caption = "Good: within the TTFT and TPOT of the class, long prompts too."


def add_tenants(out: Table, tenants: dict[str, Any], kind: str = "tenant") -> None:
    """Add the rows of each tenant or model, as `metrics.by_tenant` returns them."""
    for name, figures in tenants.items():
        out.add_section()
        answers = (figures[f"requests_{how}"] for how in ("ok", "refused", "failed"))
        out.add_row(f"{kind} {escape(name)}: ok / refused / failed", " / ".join(map(str, answers)))
        out.add_row(*_goodput("  good", figures["goodput"]))
        out.add_row("  TTFT      p50 / p99", _spread(figures["ttft_ms"], "p50", "p99"))
        if "charged_s" in figures:
            out.add_row("  charged", f"{figures['charged_s']:.1f} s")


def _add_server(out: Table, server: dict[str, Any]) -> None:
    """Add the server's own figures: prediction errors, step times, speed and size of prefill chunks."""
    out.add_section()
    if "step_error_p50" in server and "step_error_p90" in server:
        errors = f"{server['step_error_p50']:.1%} / {server['step_error_p90']:.1%}"
        out.add_row("server: step prediction error p50 / p90", errors)
    if "step_s_p50" in server and "step_s_p99" in server:
        out.add_row("server: step p50 / p99", f"{server['step_s_p50'] * 1e3:.0f} / {server['step_s_p99'] * 1e3:.0f} ms")
    if "prefill_tokens_per_s" in server:
        chunk = f", chunks of {server['chunk_tokens_p50']:.0f} (p50)" if "chunk_tokens_p50" in server else ""
        out.add_row("server: prompts computed", f"{server['prefill_tokens_per_s']:.0f} tok/s{chunk}")


def _goodput(title: str, good: dict[str, Any]) -> tuple[str, str]:
    limits = " ".join(f"{key}:{limit:g}" for key, limit in good.get("limits_ms", {}).items())
    return f"{title} ({limits})" if limits else title, f"{good['share']:.1%}, {good['requests_per_s']:.2f} /s"


def _spread(spread: dict[str, Any], *names: str) -> str:
    if not spread["count"]:
        return "-"
    return " / ".join(f"{spread[name]:.1f}" for name in names or ("p50", "p99", "max")) + " ms"


def as_json(result: BenchResult) -> dict[str, Any]:
    """Return all but the API key and headers: one row per request, times in seconds from the start of the run."""
    options = {
        name: value
        for name, value in vars(result.options).items()
        if value is not None and name not in ("api_key", "headers", "interference", "mix", "agents")
    }
    if result.options.workload in ("interference", "short-vs-long"):
        options["interference"] = asdict(result.options.interference)
    elif result.options.workload == "mix":
        options["mix"] = asdict(result.options.mix)
    elif result.options.workload == "agents":
        options["agents"] = asdict(result.options.agents)
    return {
        "date": result.date,
        "model": result.model,
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in options.items()},
        "client_cpu_share": result.client_cpu_share,
        "notes": result.notes,
        "summary": result.summary,
        "requests": [
            {
                "role": sample.role,
                "service_tier": sample.service_tier,
                "tenant": sample.tenant,
                "refused": sample.refused,
                "sent": sample.sent - result.origin,
                "ttft": sample.ttft if sample.ok else None,
                "e2e": sample.e2e if sample.ok and not sample.stopped else None,
                "max_gap": float(sample.gaps.max()) if sample.ok and sample.gaps.size else None,
                "prompt_tokens": sample.prompt_tokens,
                "cached_tokens": sample.cached_tokens,
                "output_tokens": sample.output_tokens,
                "error": sample.error,
            }
            for sample in result.samples
        ],
    }
