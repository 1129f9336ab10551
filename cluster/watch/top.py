"""`crossdock top`: a deployment's recent activity in the terminal, read from /metrics and /v1/requests."""

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Annotated, Any, NoReturn

import httpx
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from crossdock.cluster.watch import scrape
from crossdock.cluster.watch.address import server_root
from crossdock.cluster.watch.scrape import Scrape
from crossdock.workers.schedule.request.slo import DEFAULT_CLASSES

_WINDOW = 5  # intervals that a frame covers: of one second's dozen steps p99 would be the slowest
_TIMEOUT_S = 5.0  # for a response; a busy ingress takes seconds
_ID = 20  # characters of a request's id, the last ones
_GIVE_UP_S = 120.0  # without an answer; so long may a small server take to start again
_BAR = 30  # cells of the KV bar
_PANELS = 2  # replicas that always have a panel of their own
_FLEET_LINES = 14  # of a screen of many replicas, beside its rows and its requests
_TENANTS = 6  # tenants shown: the ones charged most
_SOURCES = {"pool": "pool", "host": "host memory", "files": "files", "replica": "other replicas"}  # of cached tokens


def top(
    url: Annotated[str, typer.Argument(help="Address of the server, with or without /v1.")] = "http://127.0.0.1:8000",
    url_flag: Annotated[str | None, typer.Option("--url", help="The same, as `crossdock chat` has it.")] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two readings.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Read twice, one interval apart, print the difference, and exit.")
    ] = False,
    api_key: Annotated[
        str | None, typer.Option(help="Sent as bearer token.", envvar=["CROSSDOCK_API_KEY", "OPENAI_API_KEY"])
    ] = None,
) -> None:
    """Watch a server: steps, chunks, KV pages, SLO classes, and the requests in flight. q quits.

    Ends by itself after two minutes without an answer.
    """
    console = Console(highlight=False)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    base = server_root(url_flag or url)
    with (
        httpx.Client(base_url=base, headers=headers, timeout=_TIMEOUT_S) as http,
        contextlib.suppress(KeyboardInterrupt),
    ):
        readings = Readings(http)
        if once or not console.is_terminal:  # a pipe is for one reading
            readings.poll()
            time.sleep(interval)
            readings.poll()
            if readings.lost is not None:
                _end(f"cannot read {base}: {readings.lost}")
            console.print(readings.frame())
            return
        try:
            _watch(readings, console, interval)
        except OSError:
            if sys.stdout.isatty():
                raise
            return  # the terminal is gone
        if readings.lost_s > _GIVE_UP_S:
            _end(f"{base} has not answered for {readings.lost_s:.0f} s: {readings.lost}")


def _end(reason: str) -> NoReturn:
    Console(stderr=True).print(f"[red]top:[/red] {escape(reason)}", highlight=False)
    raise typer.Exit(1)


def _watch(readings: "Readings", console: Console, interval: float) -> None:
    """Show a frame per interval until q, the end of the terminal, SIGTERM, or `_GIVE_UP_S` without an answer."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that the terminal is left as it was
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with _key_presses() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while sys.stdout.isatty():
            readings.poll()
            if readings.lost_s > _GIVE_UP_S:
                return
            live.update(readings.frame(console.height), refresh=True)
            if pressed(interval) in ("q", None):
                return


@contextlib.contextmanager
def _key_presses() -> Iterator[Callable[[float], str | None]]:
    """Yield a function that waits for a key at most so many seconds.

    It returns the key, "" without one, and None once the terminal is gone. Without a keyboard it only waits.
    """

    def pressed(seconds: float) -> str | None:
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        if not ready:
            return ""
        try:
            return os.read(sys.stdin.fileno(), 1).decode("latin-1") or None
        except OSError:
            return None

    def wait(seconds: float) -> str:
        time.sleep(seconds)
        return ""

    if not sys.stdin.isatty():
        yield wait
        return
    saved = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield pressed
    finally:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, saved)


@dataclass(slots=True)
class Readings:
    """The recent readings of one server. They are dropped when the server cannot be reached."""

    http: httpx.Client
    clock: Callable[[], float] = time.monotonic  # seconds
    lost: str | None = None  # why the last reading failed
    _lost_at: float = 0.0
    _scrapes: deque[Scrape] = field(default_factory=lambda: deque(maxlen=_WINDOW + 1))
    _requests: Sequence[Mapping[str, Any]] | None = None  # None: the server does not list them
    _pools: Mapping[str, str] = field(default_factory=dict)  # by replica, where the server lists them

    def poll(self) -> None:
        """Read the server once. `lost` then has the reason if that failed, else None."""
        try:
            reading = self._scrape()
            if not self._pools.keys() >= reading.by(scrape.PAGES, "replica").keys():
                self._pools = self._pools_of_replicas()
            self._requests = self._in_flight()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            if self.lost is None:
                self._lost_at = self.clock()
            self.lost = str(error) or type(error).__name__
            self._scrapes.clear()
        else:
            self.lost = None
            self._scrapes.append(reading)

    @property
    def lost_s(self) -> float:
        """The seconds since the first of the last failed readings; 0 while the server answers."""
        return 0.0 if self.lost is None else self.clock() - self._lost_at

    def frame(self, height: int = 50) -> RenderableType:
        """Return the screen's content, of about `height` lines."""
        url = str(self.http.base_url).rstrip("/")
        if self.lost is not None:
            reason = f"unreachable for {self.lost_s:.0f} s: {self.lost}"
            return Group(_header(url, Text(reason, "bold red")), Text("trying again; q quits", "dim"))
        now = self._scrapes[-1]
        change = now.since(self._scrapes[0])
        covers = f"the last {change.seconds:.1f} s" if change.seconds else "reading …"
        pools = {name: self._pools.get(name, "") for name in now.by(scrape.PAGES, "replica")}
        order = sorted(pools, key=lambda name: (pools[name], name))
        if len(order) > _PANELS and 8 * len(order) + 12 > height:
            return self._fleet(url, covers, {name: pools[name] for name in order}, height)
        replicas = [_replica(name, pools[name], now, change) for name in order]
        left = max(height - 8 * len(replicas) - 12, 3)
        return Group(
            _header(url, Text(covers, "green")),
            *replicas,
            _classes(now, change),
            *_tenants(change),
            _flights(self._requests, left),
        )

    def _fleet(self, url: str, covers: str, pools: Mapping[str, str], height: int) -> RenderableType:
        """Return the screen of many replicas: requests first, then a row for each replica, or where these do not fit
        for each pool."""
        now = self._scrapes[-1]
        change = now.since(self._scrapes[0])
        rest = Group(_classes(now, change), *_tenants(change))
        left = height - _FLEET_LINES
        rows = {name: [name] for name in pools}
        if len(rows) > left:
            rows = {}
            for name, pool in pools.items():
                rows.setdefault(pool, []).append(name)
        flights = _flights(self._requests, max(left - len(rows), 3))
        return Group(_header(url, Text(covers, "green")), flights, _rows(rows, pools, now, change), rest)

    def _scrape(self) -> Scrape:
        response = self.http.get("/metrics")
        response.raise_for_status()
        reading = Scrape.parse(response.text, self.clock())
        if scrape.PAGES not in reading.samples:
            raise ValueError("its /metrics has no Crossdock replica, or none that is up")
        return reading

    def _pools_of_replicas(self) -> Mapping[str, str]:
        response = self.http.get("/v1/replicas")
        return {} if response.is_error else {each["replica"]: each["pool"] for each in response.json()["data"]}

    def _in_flight(self) -> Sequence[Mapping[str, Any]] | None:
        response = self.http.get("/v1/requests")
        if response.is_error:
            return None
        records: Sequence[Mapping[str, Any]] = response.json()["data"]
        return records


# -- the frame -------------------------------------------------------------------------------------------------------


def _header(url: str, state: Text) -> RenderableType:
    line = Table.grid(expand=True, padding=(0, 1))
    line.add_column()
    line.add_column(justify="right")
    line.add_row(Text.assemble(("crossdock top ", "bold"), url), state)
    return line


def _replica(replica: str, pool: str, now: Scrape, change: Scrape) -> RenderableType:
    which = {"replica": replica} if replica else {}

    def rates(name: str, label: str, *values: str) -> str:
        return " · ".join(f"{value} {_number(change.rate(name, **which, **{label: value}))}" for value in values)

    def step(quantile: float) -> str:
        return _seconds(change.quantile(scrape.STEP_SECONDS, quantile, **which))

    def off(quantile: str) -> str:
        return _percent(now.total(scrape.STEP_ERROR, **which, quantile=quantile))

    def requests(status: str) -> str:
        return _by_class(now.by(scrape.REQUESTS, "slo_class", **which, status=status))

    tokens = (
        f"prefill {_number(change.rate(scrape.PROMPT_TOKENS, **which))}"
        f" · decode {_number(change.rate(scrape.OUTPUT_TOKENS, **which))}"
        f" · cached {_number(change.rate(scrape.CACHED_TOKENS, **which))}"
    )
    backlog = _by_class(now.by(scrape.BACKLOG_SECONDS, "slo_class", **which), " s")
    rows = [
        ("steps/s", rates(scrape.STEPS, "kind", "decodes", "chunks", "mixed")),
        ("step time", f"{step(0.5)} p50 · {step(0.99)} p99 · predicted ±{off('0.5')} p50 · ±{off('0.9')} p90"),
        ("tokens/s", tokens),
        ("chunk", f"{_number(change.quantile(scrape.CHUNK_TOKENS, 0.5, **which))} tokens p50"),
        ("running", requests("running")),
        ("waiting", f"{requests('waiting')}   backlog {backlog}"),
    ]
    grid = Table.grid(padding=(0, 2))
    for (left, left_value), (right, right_value) in zip(rows[::2], rows[1::2], strict=True):
        grid.add_row(Text(left, "dim"), left_value, Text(right, "dim"), right_value)
    preempted = _number(now.total(scrape.PREEMPTIONS, **which))
    pages = now.by(scrape.PAGES, "state", **which)
    lines = [Text.assemble(("KV pages  ", "dim"), _pages(pages), f"   preempted {preempted}")]
    sources = now.by(scrape.CACHED_TOKENS, "source", **which)
    if sum(sources.values()) > sources.get("pool", 0.0):
        lines.append(Text.assemble(("cached    ", "dim"), _sources(change, which)))
    if now.total(scrape.DRAFT_TOKENS, **which):
        drafted, accepted = (change.total(name, **which) for name in (scrape.DRAFT_TOKENS, scrape.ACCEPTED_TOKENS))
        share = _percent((accepted or 0.0) / drafted if drafted else None)
        rate = _number(change.rate(scrape.DRAFT_TOKENS, **which))
        lines.append(Text.assemble(("drafts    ", "dim"), f"tokens/s {rate} · accepted {share}"))
    if now.total(scrape.ITEMS_ENCODED, **which) or now.total(scrape.ITEM_HITS, **which):
        encoded, found = (_number(change.rate(name, **which)) for name in (scrape.ITEMS_ENCODED, scrape.ITEM_HITS))
        share = _percent(change.rate(f"{scrape.ENCODER_SECONDS}_sum", **which))
        lines.append(
            Text.assemble(("pictures  ", "dim"), f"/s encoded {encoded} · found {found} · {share} of the time")
        )
    lines += [
        Text.assemble(("kernels   ", "dim"), kernels) for kernels in now.by(scrape.CPU_KERNELS, "kernels", **which)
    ]
    return Panel(
        Group(grid, *lines),
        title=escape(" · ".join(filter(None, (replica, pool)))) or "replica",
        title_align="left",
    )


def _sources(change: Scrape, which: Mapping[str, str]) -> str:
    """Return where the cached tokens came from: the pool, a tier below it, or another replica."""
    cached = change.by(scrape.CACHED_TOKENS, "source", **which)
    seconds = change.seconds or 1.0
    rates = [f"{text} {_number(round(cached.get(name, 0.0) / seconds, 1))}" for name, text in _SOURCES.items()]
    return "tokens/s from " + " · ".join(rates)


def _rows(rows: Mapping[str, Sequence[str]], pools: Mapping[str, str], now: Scrape, change: Scrape) -> RenderableType:
    """Return a table with a row for each replica or each pool. `rows`: the replicas of each row, by its title."""
    gained = {name: change.by(name, "replica") for name in (scrape.STEPS, scrape.PROMPT_TOKENS, scrape.OUTPUT_TOKENS)}
    counts = {status: now.by(scrape.REQUESTS, "replica", status=status) for status in ("running", "waiting")}
    states = {state: now.by(scrape.PAGES, "replica", state=state) for state in ("free", "owned", "cached")}
    slowest = {name: change.quantile(scrape.STEP_SECONDS, 0.99, replica=name) or 0.0 for name in pools}
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("replica", no_wrap=True)
    table.add_column("pool", no_wrap=True)
    for title in ("steps/s", "step p99", "prefill/s", "decode/s", "running", "waiting", "pages used", "cached"):
        table.add_column(title, justify="right", no_wrap=True)
    for title, names in rows.items():

        def total(values: Mapping[str, float], names: Sequence[str] = names) -> float:
            return sum(values.get(name, 0.0) for name in names)

        seconds = change.seconds or 1.0
        rates = [_number(round(total(values) / seconds, 1)) for values in gained.values()]
        owned, cached, free = (total(states[state]) for state in ("owned", "cached", "free"))
        whole = (owned + cached + free) or 1.0
        is_replica = title in pools
        table.add_row(
            escape(title) if is_replica else f"{len(names)} replicas",
            escape(pools[title] if is_replica else title),
            rates[0],
            _seconds(max(slowest[name] for name in names)),
            *rates[1:],
            *(_number(total(values)) for values in counts.values()),
            _percent(owned / whole),
            _percent(cached / whole),
        )
    return table


def _pages(pages: Mapping[str, float]) -> Text:
    used = pages.get("owned", 0) + pages.get("quarantined", 0)
    cached = pages.get("cached", 0)
    free = pages.get("free", 0)
    whole = max(used + cached + free, 1)
    ends = [round(_BAR * part / whole) for part in (used, used + cached, whole)]
    return Text.assemble(
        ("█" * ends[0], "red"),
        ("▒" * (ends[1] - ends[0]), "yellow"),
        ("░" * (ends[2] - ends[1]), "green"),
        f"  used {used:,.0f} · cached {cached:,.0f} · free {free:,.0f}",
    )


def _classes(now: Scrape, change: Scrape) -> RenderableType:
    listed = (
        scrape.REQUESTS,
        scrape.SLO_TTFT,
        scrape.REFUSED,
        f"{scrape.TTFT_SECONDS}_count",
        f"{scrape.GAP_SECONDS}_count",
    )

    def met(name: str, which: Mapping[str, str]) -> str:
        every = change.total(name, **which)
        return _percent((change.total(name, **which, outcome="met") or 0.0) / every if every else None)

    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("class", no_wrap=True)
    for title in ("TTFT p50", "p99", "met", "token gap p50", "p99", "TPOT met", "refused", "tokens waiting"):
        table.add_column(title, justify="right")
    for name in sorted({name for metric in listed for name in now.by(metric, "slo_class")}, key=_class_order):
        which = {"slo_class": name} if name else {}
        table.add_row(
            f"{name or 'all'}{_beyond(now, which)}",
            *(_seconds(change.quantile(scrape.TTFT_SECONDS, quantile, **which)) for quantile in (0.5, 0.99)),
            met(scrape.SLO_TTFT, which),
            *(_seconds(change.quantile(scrape.GAP_SECONDS, quantile, **which)) for quantile in (0.5, 0.99)),
            met(scrape.SLO_TPOT, which),
            _number(change.total(scrape.REFUSED, **which)),
            _number(now.total(scrape.UNCACHED_WAITING, **which)),
        )
    return table


def _tenants(change: Scrape) -> Iterator[RenderableType]:
    """Yield a line with the tenants that were charged most, and their shares; none where tenants are not told apart."""
    charged = change.by(scrape.CHARGED_SECONDS, "tenant")
    total = sum(charged.values())
    most = sorted(charged, key=lambda name: -charged[name])[:_TENANTS]
    if total:
        shares = (f"{escape(name)} {_percent(charged[name] / total)} ({charged[name]:.1f} s)" for name in most)
        yield Text.assemble(("time of tenants  ", "dim"), " · ".join(shares))


def _beyond(now: Scrape, which: Mapping[str, str]) -> str:
    """Return the mark of a class whose promise is beyond the machine; else nothing."""
    least = max(now.by(scrape.BEYOND, "replica", **which).values(), default=0.0) if which else 0.0
    return f" (beyond: {_seconds(least)} a token)" if least else ""


def _flights(requests: Sequence[Mapping[str, Any]] | None, rows: int) -> RenderableType:
    """Return a table of the requests in flight: those that prefill first, the longest of them on top."""
    if requests is None:
        return Text("requests in flight: -", "dim")
    if not requests:
        return Text("no requests in flight", "dim")
    table = Table(box=None, header_style="dim", padding=(0, 1, 0, 0))
    for title in ("request", "class", "state"):
        table.add_column(title, no_wrap=True)
    table.add_column("prefill", max_width=20)  # a bar: on a narrow terminal the only column that is cut
    for title in ("computed", "prompt", "output", "waiting"):
        table.add_column(title, justify="right", no_wrap=True)
    for request in sorted(requests, key=_flight_order)[:rows]:
        computed = request.get("num_computed_tokens", 0)
        prompt = request.get("num_prompt_tokens", 0)
        table.add_row(
            escape(str(request.get("request_id") or request.get("id", "-"))[-_ID:]),
            " · ".join(escape(f"{request[name]}") for name in ("slo_class", "model") if name in request) or "-",
            str(request.get("state", "-")),
            ProgressBar(prompt, computed) if _is_prefilling(request) else "",
            _number(computed),
            _number(prompt),
            _number(request.get("num_output_tokens")),
            _seconds(request.get("waiting_s")),
        )
    more = [Text(f"and {len(requests) - rows} more", "dim")] if len(requests) > rows else []
    return Group(table, *more)


def _flight_order(request: Mapping[str, Any]) -> tuple[bool, int]:
    return (not _is_prefilling(request), -request.get("num_prompt_tokens", 0))


def _is_prefilling(request: Mapping[str, Any]) -> bool:
    return request.get("state") == "prefilling"


def _class_order(name: str) -> tuple[int, str]:
    """Sort the default classes by priority, and other classes after them by name."""
    known = [slo.name for slo in DEFAULT_CLASSES]
    return (known.index(name) if name in known else len(known), name)


def _by_class(values: Mapping[str, float], unit: str = "") -> str:
    shown = (f"{name} {_number(values[name])}{unit}".lstrip() for name in sorted(values, key=_class_order))
    return " · ".join(shown) or "-"


def _number(value: float | None) -> str:
    if value is None or isnan(value):
        return "-"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s"


def _percent(share: float | None) -> str:
    return "-" if share is None or isnan(share) else f"{share:.0%}"
