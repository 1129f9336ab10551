"""The report of a sweep: tables for people, JSON for programs, and the recommended configuration."""

import datetime
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import yaml
from pydantic import BaseModel
from rich.box import SIMPLE_HEAD
from rich.table import Table

from crossdock.cluster.bench.plot import Series, plot
from crossdock.cluster.config import ClusterConfig, PoolConfig
from crossdock.cluster.tune.advice import Advice
from crossdock.cluster.tune.curves import NEAR_BEST, Cell, Curves, relative_errors
from crossdock.workers.report.capacity import STREAM_CONTEXT, most_streams
from crossdock.workers.report.profile import SchedulingProfile


@dataclass(frozen=True, slots=True)
class Findings:
    """The results of one run of `crossdock tune`."""

    device: str
    config: ClusterConfig
    pool: PoolConfig  # of the configuration: the one whose replica was measured
    tpot_s: float
    curves: Curves
    advice: Advice
    profile: SchedulingProfile  # as a replica advertises it when it has started
    dropped: Sequence[Cell]  # cells that did not fit into the KV pool or the model's length
    is_interrupted: bool = False  # the curves lack the largest numbers of streams

    @property
    def prompt(self) -> int:
        """The tokens of the prompt whose time to first token is shown: the longest context or chunk."""
        return max(max(cell.context, cell.chunk) for cell in self.curves.cells)


def advice(found: Findings) -> list[str]:
    """Return three sentences: what the replica carries, which settings follow, and what a long prompt then costs."""
    made = found.advice
    pace = f"a token every {found.tpot_s * 1e3:g} ms"
    context = min(STREAM_CONTEXT, found.profile.max_model_len)
    settings = f"max_num_batched_tokens {made.max_num_batched_tokens}"
    if made.min_chunk_tokens:
        settings += f" and min_chunk_tokens {made.min_chunk_tokens}"
    if not made.attainable:
        return [
            "This replica computes prompts alone, so that no stream waits for its chunks.",
            f"Set {settings}: larger chunks gain less than 10 %.",
            f"It computes up to {found.curves.best_rate:.0f} prompt tokens a second.",
        ]
    carried = most_streams(found.profile, found.tpot_s, context)
    beside = max((row.decodes for row in made.attainable if row.chunk), default=0)
    longest = max(cell.context for cell in found.curves.cells)
    row = next(row for row in made.attainable if row.decodes == made.streams)
    ttft = found.curves.ttft(found.prompt, made.min_chunk_tokens, made.streams)
    if made.is_attainable and ttft is not None:
        last = f"A prompt of {found.prompt} tokens then has its first token after {_short(ttft)} s beside "
        last += f"{_streams(made.streams)} that keep the pace."
    elif made.is_attainable:
        last = f"Beside {_streams(made.streams)} that keep the pace, prompts are computed at {row.rate:.0f} tokens/s."
    else:
        last = f"Beside {_streams(made.streams)} of {longest} tokens a prompt slows them to "
        last += f"{row.tpot_s * 1e3:.0f} ms a token: ask for that (--tpot), or give prompts replicas of their own."
    return [
        f"With no prompt beside them, {_streams(carried)} of {context} tokens get {pace}, as `crossdock serve` says "
        f"at its start; with a chunk in every step, {_streams(beside)} of {longest} tokens, of the numbers measured.",
        f"Set {settings}: larger chunks than {made.ceiling_chunk} tokens gain less than 10 %.",
        last,
    ]


def stalls(curves: Curves) -> Table:
    """Return a table of the longest step over all contexts and the prefill rate: rows are chunks, columns streams."""
    contexts = sorted({cell.context for cell in curves.cells})
    caption = f"100 % are {curves.best_rate:.0f} tokens/s; contexts of {', '.join(map(str, contexts))} tokens"
    if len(curves.measured) < len(curves.cells):
        caption += "; ~ is interpolated"
    if any("≤" in _head(curves, decodes) for decodes in curves.decodes):
        caption += "; ≤: only contexts up to this size fit"

    def cell(chunk: int, decodes: int) -> str:
        stall = curves.stall(chunk, decodes)
        efficiency = curves.efficiency(chunk, decodes) if chunk else None
        if stall is None:
            return _EMPTY
        mark = "" if curves.is_measured(chunk, decodes) else "~"
        return f"{mark}{_short(stall * 1e3)}" + (f" {efficiency:4.0%}" if efficiency is not None else "")

    title = "Worst stall in ms; prefill tokens/s, % of the best; by streams"
    return _by_chunk(title, caption, curves, cell, with_decodes_alone=True)


def trade_off(found: Findings) -> Table:
    """Return a table of the time to first token of one prompt and the TPOT of the streams beside it."""
    curves = found.curves

    def cell(chunk: int, decodes: int) -> str:
        ttft = curves.ttft(found.prompt, chunk, decodes)
        tpot = curves.tpot(chunk, decodes)
        return _EMPTY if ttft is None or tpot is None else f"{_short(ttft)} {_short(tpot * 1e3):>5}"

    title = f"TTFT in s of {found.prompt} tokens; TPOT in ms; by streams"
    return _by_chunk(title, None, curves, cell)


def plotted(found: Findings) -> str:
    """Return the plot of `trade_off`: a line for each number of streams, a point for each chunk.

    Raises:
        ValueError: no chunk was measured beside streams.
    """
    series = list[Series]()
    for decodes in filter(None, found.curves.decodes):
        own = [point for point in _points(found) if point["decodes"] == decodes]
        points = [(point["ttft_s"], point["tpot_s"] * 1e3) for point in own]
        series.append(Series(_streams(decodes), points, [f"{point['chunk']}" for point in own], is_line=True))
    subtitle = (
        f"crossdock tune, {datetime.date.today().isoformat()}: {found.device}; numbers at points are chunk tokens"
    )
    return plot(f"{found.config.model.name}: a prompt of {found.prompt} tokens beside streams", subtitle, series)


def _short(value: float) -> str:
    """Return three digits, or all digits of a larger number."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


_EMPTY = "–"  # noqa: RUF001  # the en dash of an empty table cell


def _by_chunk(
    title: str,
    caption: str | None,
    curves: Curves,
    cell: Callable[[int, int], str],
    *,
    with_decodes_alone: bool = False,
) -> Table:
    """Return a table with a row for each chunk and a column for each number of streams.

    `with_decodes_alone`: also a row without a chunk, and a column without streams. Where the table is too wide for the
    terminal, cells take two lines, and the column of the chunks stays.
    """
    out = Table(
        title=title,
        caption=caption,
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title_justify="left",
        caption_justify="left",
    )
    out.add_column("chunk", justify="right", style="bold", no_wrap=True)
    columns = [decodes for decodes in curves.decodes if decodes or with_decodes_alone]
    for decodes in columns:
        out.add_column(_head(curves, decodes), justify="right")
    for chunk in (*((0,) if with_decodes_alone else ()), *curves.chunks):
        out.add_row(str(chunk) if chunk else "none", *(cell(chunk, decodes) for decodes in columns))
    return out


def _head(curves: Curves, decodes: int) -> str:
    """Return the head of a column, with its longest context where the longest of all did not fit beside the streams."""
    longest = max(cell.context for cell in curves.cells if cell.decodes == decodes)
    name = str(decodes) if decodes else "none"
    return name if longest == max(cell.context for cell in curves.cells) else f"{name} ≤{longest}"


def _streams(decodes: int) -> str:
    return f"{decodes or 'no'} stream{'s' * (decodes > 1)}"


def promises(found: Findings) -> Table:
    """Return a table of the target that each number of streams can meet while prompts prefill."""
    out = Table(title=f"Target: a token every {found.tpot_s * 1e3:g} ms", box=SIMPLE_HEAD, title_justify="left")
    for name in ("streams", "step without chunk", "attainable tpot", "largest chunk", "prompt tokens/s"):
        out.add_column(name, justify="right", no_wrap=name == "streams")
    for row in found.advice.attainable:
        alone = f"{row.alone_s * 1e3:.1f} ms" if row.alone_s is not None else _EMPTY
        largest = (str(row.chunk), f"{row.rate:.0f}") if row.chunk else ("not attainable", "")
        style = "bold" if row.decodes == found.advice.streams else None
        out.add_row(str(row.decodes), alone, f"{row.tpot_s * 1e3:.1f} ms", *largest, style=style)
    return out


def shipped_pages(found: Findings) -> Table:
    """Return a table of the KV pages that each chunk leaves, and how fast they must travel to another replica."""
    link = found.profile.bytes_per_second
    out = Table(title="KV pages of a chunk without streams, for pools that ship", box=SIMPLE_HEAD, title_justify="left")
    for name in ("chunk", "MiB", "MB/s, to travel during the next chunk", f"share of its step at {link / 1e9:g} GB/s"):
        out.add_column(name, justify="right", no_wrap=name == "chunk")
    for row in _pages(found):
        rate = row["bytes_per_second"]
        out.add_row(
            str(row["chunk"]), _short(row["kv_bytes"] / 2**20), _short(rate / 1e6), f"{_short(100 * rate / link)} %"
        )
    return out


def _pages(found: Findings) -> list[dict[str, float]]:
    """Return the bytes of KV pages of each chunk, and per second while chunks of this size follow each other."""
    size = found.profile.token_bytes
    return [
        {"chunk": chunk, "kv_bytes": chunk * size, "bytes_per_second": rate * size}
        for chunk in found.curves.chunks
        if (rate := found.curves.rate(chunk, 0)) is not None
    ]


def sentences(found: Findings) -> list[str]:
    """Return the conclusions of the tables in words."""
    advice = found.advice
    fit = found.curves.fit()
    knee = found.curves.knee(0)
    fixed = max(fit.base, fit.least_with_chunk)
    half = int(fit.tokens_within(2 * fixed, 0))
    ninety = int(fit.tokens_within(fixed / (1 - NEAR_BEST), 0))
    lines = [
        f"The GEMMs are compute-bound from chunks of {knee} tokens: the smallest within 10 % of the best tokens/s. On "
        f"the fitted curve a chunk of {half} tokens takes twice its fixed cost, and one of {ninety} is within "
        f"10 %.",
        f"max_num_batched_tokens {advice.max_num_batched_tokens}: beside {_streams(advice.ceiling_decodes)} chunks of "
        f"more than {advice.ceiling_chunk} tokens gain less than 10 %.",
    ]
    if not advice.streams:
        lines.append("min_chunk_tokens needs no setting: no stream runs beside the chunks of a prefill replica.")
    elif advice.is_attainable:
        lines += [
            f"min_chunk_tokens {advice.min_chunk_tokens}: with this chunk in every step {_streams(advice.streams)} "
            f"can meet the target.",
            f"With chunk_policy fixed, set max_num_batched_tokens {advice.fixed_tokens} for the same effect.",
        ]
    else:
        lines.append(
            f"min_chunk_tokens {advice.min_chunk_tokens}: one page. {_streams(advice.streams)} cannot meet the target "
            f"while a prompt prefills; the table shows the attainable tpot."
        )
    if found.curves.depth > 1:
        lines.append(
            f"All this is for one step. The pipeline has {found.curves.depth} in flight, each with its share of the "
            f"streams; while there is enough to do, a step ends after {found.curves.interval_share:.0%} of the "
            f"seconds that it takes."
        )
    lines.append(
        f"A token takes {found.profile.token_bytes} bytes of KV pages"
        + (", all ranks together." if found.pool.num_ranks > 1 else ".")
    )
    own = _quantiles(found.curves.held_out_errors())
    started = _quantiles(_errors_at_start(found))
    lines.append(
        f"StepCost predicts these steps with a median error of {own[0]:.1%}, p90 {own[1]:.1%} (each fifth of the steps "
        f"from the other four); as fitted when a replica starts: {started[0]:.1%}, p90 {started[1]:.1%}."
    )
    if found.dropped:
        kinds = sorted({(cell.decodes, cell.context) for cell in found.dropped})
        listed = ", ".join(f"{_streams(decodes)} at {context} tokens" for decodes, context in kinds)
        lines.append(f"Not all measured, because KV pages or max_model_len do not suffice: {listed}.")
    return lines


def as_json(found: Findings) -> dict[str, Any]:
    """Return every measured cell and all figures computed from them; times in seconds."""
    own = _quantiles(found.curves.held_out_errors())
    started = _quantiles(_errors_at_start(found))
    return {
        "date": datetime.date.today().isoformat(),
        "device": found.device,
        "model": found.config.model.name,
        "pool": {
            "name": found.pool.name,
            "role": found.pool.role,
            "tensor_parallel_size": found.pool.tensor_parallel_size,
            "pipeline_parallel_size": found.pool.pipeline_parallel_size,
        },
        "interval_share": found.curves.interval_share,
        "kv_bytes_per_token": found.profile.token_bytes,
        "kv_pages_of_chunks": _pages(found),
        "tpot_s": found.tpot_s,
        "advice": asdict(found.advice),
        "knee_chunk": found.curves.knee(0),
        "best_prefill_tokens_per_s": found.curves.best_rate,
        "step_cost": {
            "this_sweep": asdict(found.curves.fit()),
            "held_out_error": {"p50": own[0], "p90": own[1]},
            "at_start": asdict(found.profile.cost),
            "at_start_error": {"p50": started[0], "p90": started[1]},
        },
        "trade_off": {"prompt_tokens": found.prompt, "points": _points(found)},
        "is_interrupted": found.is_interrupted,
        "cells": [asdict(cell) for cell in found.curves.cells],
    }


def _points(found: Findings) -> list[dict[str, float]]:
    """Return the points of `trade_off`, by number of streams and then by chunk; times in seconds."""
    curves = found.curves
    return [
        {"decodes": decodes, "chunk": chunk, "ttft_s": ttft, "tpot_s": tpot}
        for decodes in curves.decodes
        for chunk in curves.chunks
        if decodes
        and (ttft := curves.ttft(found.prompt, chunk, decodes)) is not None
        and (tpot := curves.tpot(chunk, decodes)) is not None
    ]


def _errors_at_start(found: Findings) -> list[float]:
    return relative_errors(found.profile.cost, found.curves.measured)


def _quantiles(errors: Sequence[float]) -> tuple[float, float]:
    return float(np.quantile(errors, 0.5)), float(np.quantile(errors, 0.9))


def profile(found: Findings) -> str:
    """Return the profile of a replica on this machine, as JSON for `crossdock simulate`."""
    return found.profile.model_copy(update={"cost": found.curves.fit()}).model_dump_json(indent=1) + "\n"


def snippet(found: Findings) -> str:
    """Return YAML for `crossdock serve --config`: the cluster's configuration with the new settings of the pool.

    Sections `http` and `deploy` are left out: the first may have API keys.
    """
    advice = found.advice
    config = found.config
    settings = {"max_num_batched_tokens": advice.max_num_batched_tokens}
    if advice.min_chunk_tokens:
        settings["min_chunk_tokens"] = advice.min_chunk_tokens
    data: dict[str, Any] = {section: _changed(getattr(config, section)) for section in ("model", "engine")}
    if len(config.pools) > 1:
        data["pools"] = [_pool(config, pool, settings if pool.name == found.pool.name else {}) for pool in config.pools]
    else:
        data["engine"] = _changed(found.pool.engine or config.engine) | settings
        if shape := _changed(found.pool, {"engine"}):
            data["pools"] = [{"name": found.pool.name} | shape]
    data |= {section: _changed(getattr(config, section)) for section in ("router", "scaling", "transfer")}
    body = yaml.safe_dump({section: values for section, values in data.items() if values}, sort_keys=False)
    head = [f"crossdock tune, {datetime.date.today().isoformat()}: {config.model.name} on {found.device}"]
    if len(config.pools) > 1:
        head.append(f"Tuned: pool {found.pool.name}.")
    if found.is_interrupted:
        head.append(f"Interrupted: measured beside at most {_streams(found.curves.decodes[-1])}.")
    head += [
        f"Asked for: {_streams(row.decodes)} in a step, a token every {found.tpot_s:g} s. "
        f"Attainable tpot_s: {row.tpot_s:.3g}" + ("." if advice.is_attainable else ": the target is not.")
        for row in advice.attainable
        if row.decodes == advice.streams
    ]
    return "".join(f"# {line}\n" for line in head) + body


def _pool(config: ClusterConfig, pool: PoolConfig, settings: dict[str, int]) -> dict[str, Any]:
    """Return a pool's settings. Its engine's are those that differ from the cluster's, and `settings`."""
    cluster = config.engine.model_dump(mode="json")
    own = (pool.engine or config.engine).model_dump(mode="json")
    engine = {name: value for name, value in own.items() if value != cluster[name]} | settings
    return {"name": pool.name} | _changed(pool, {"engine"}) | ({"engine": engine} if engine else {})


def _changed(section: BaseModel, exclude: Collection[str] = ()) -> dict[str, Any]:
    return section.model_dump(mode="json", exclude_defaults=True, exclude=set(exclude))
