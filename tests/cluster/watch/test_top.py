"""`crossdock top` over a scripted deployment, and over one that cannot always be reached."""

import json
import signal
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from rich.console import Console

from crossdock.cluster.dispatch.ingress_metrics import merge_metrics
from crossdock.cluster.watch import scrape
from crossdock.cluster.watch.top import Readings
from tests.cluster.ports import server_of
from tests.cluster.watch.terminal import Pty, run

REPLICA = "mixed#7"


class Deployment:
    """The metrics of one replica, under the names that `crossdock top` reads."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.steps = self._counter(scrape.STEPS, "kind")
        self.step_seconds = self._histogram(scrape.STEP_SECONDS, (0.01, 0.02, 0.1, 0.5), "kind")
        self.step_error = self._gauge(scrape.STEP_ERROR, "quantile")
        self.chunks = self._histogram(scrape.CHUNK_TOKENS, (64, 128, 256))
        self.prompt_tokens = self._counter(scrape.PROMPT_TOKENS)
        self.output_tokens = self._counter(scrape.OUTPUT_TOKENS)
        self.cached_tokens = self._counter(scrape.CACHED_TOKENS, "source")
        self.pages = self._gauge(scrape.PAGES, "state")
        self.preemptions = self._counter(scrape.PREEMPTIONS)
        self.encoded, self.found = self._counter(scrape.ITEMS_ENCODED), self._counter(scrape.ITEM_HITS)
        self.encoder_seconds = self._histogram(scrape.ENCODER_SECONDS, (0.1, 1))
        self.drafted, self.accepted = self._counter(scrape.DRAFT_TOKENS), self._counter(scrape.ACCEPTED_TOKENS)
        self.requests = self._gauge(scrape.REQUESTS, "status", "slo_class")
        self.backlog = self._gauge(scrape.BACKLOG_SECONDS, "slo_class")
        self.uncached = self._gauge(scrape.UNCACHED_WAITING, "slo_class")
        self.refused = self._counter(scrape.REFUSED, "slo_class")
        self.slo_ttft = self._counter(scrape.SLO_TTFT, "slo_class", "outcome")
        self.slo_tpot = self._counter(scrape.SLO_TPOT, "slo_class", "outcome")
        self.ttft = self._histogram(scrape.TTFT_SECONDS, (0.1, 1, 10), "slo_class")
        self.gap = self._histogram(scrape.GAP_SECONDS, (0.02, 0.04, 0.08), "slo_class")
        for state, count in (("free", 500), ("owned", 300), ("cached", 200), ("quarantined", 0)):
            self.pages.labels(state).set(count)
        for source in ("pool", "host", "files", "replica"):
            self.cached_tokens.labels(source)
        self.kernels = self._gauge(scrape.CPU_KERNELS, "kernels")
        self.kernels.labels("own below 8 rows, onednn from there").set(1)
        self.charged = self._counter(scrape.CHARGED_SECONDS, "tenant", "slo_class")
        self.beyond = self._gauge(scrape.BEYOND, "slo_class")
        self.in_flight: list[dict[str, Any]] | None = None

    def text(self) -> str:
        return merge_metrics({REPLICA: generate_latest(self.registry).decode()}, "replica")

    def work(self) -> None:
        """Add two seconds of work to the metrics."""
        for kind, count, seconds in (("decodes", 20, 0.015), ("mixed", 4, 0.3)):
            self.steps.labels(kind).inc(count)
            for _ in range(count):
                self.step_seconds.labels(kind).observe(seconds)
        self.charged.labels("own", "standard").inc(0.5)
        self.charged.labels("flood", "standard").inc(1.5)
        self.prompt_tokens.inc(2400)
        self.output_tokens.inc(90)
        self.chunks.observe(128)
        self.step_error.labels("0.5").set(0.08)
        self.step_error.labels("0.9").set(0.17)
        self.requests.labels("running", "interactive").set(2)
        self.requests.labels("waiting", "batch").set(12)
        self.backlog.labels("batch").set(41.5)
        self.uncached.labels("batch").set(98_304)
        self.refused.labels("interactive").inc(3)
        self.slo_ttft.labels("interactive", "met").inc(9)
        self.slo_ttft.labels("interactive", "missed").inc(1)
        self.slo_tpot.labels("interactive", "met").inc(4)
        self.ttft.labels("interactive").observe(0.05)
        self.gap.labels("interactive").observe(0.03)
        self.ttft.labels("batch").observe(8)

    def _counter(self, name: str, *labels: str) -> Counter:
        return Counter(name.removesuffix("_total"), name, labels, registry=self.registry)

    def _gauge(self, name: str, *labels: str) -> Gauge:
        return Gauge(name, name, labels, registry=self.registry)

    def _histogram(self, name: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, name, labels, buckets=buckets, registry=self.registry)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def shown(readings: Readings, height: int = 50, width: int = 130) -> str:
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(readings.frame(height))
    return capture.get()


def watching(text: str, status: int = 200, in_flight: object = None) -> tuple[Readings, dict[str, Any], Clock]:
    """Return readings of a server, the mapping of its answers, and the clock."""
    served: dict[str, Any] = {"text": text, "status": status, "in_flight": in_flight, "pools": None}

    def answer(request: httpx.Request) -> httpx.Response:
        if served["status"] == 0:
            raise httpx.ConnectError("Connection refused")
        if request.url.path == "/v1/requests":
            known = served["in_flight"] is not None
            return httpx.Response(200, json={"data": served["in_flight"]}) if known else httpx.Response(404)
        if request.url.path == "/v1/replicas":
            pools = served["pools"]
            return httpx.Response(200, json={"data": pools}) if pools is not None else httpx.Response(404)
        return httpx.Response(served["status"], text=served["text"])

    clock = Clock()
    http = httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer))
    return Readings(http, clock), served, clock


def flight(name: str, slo_class: str, state: str, computed: int, prompt: int, **others: Any) -> dict[str, Any]:
    """Return a record of /v1/requests."""
    tokens = {"num_computed_tokens": computed, "num_prompt_tokens": prompt, "num_output_tokens": 0}
    return {"id": name, "slo_class": slo_class, "state": state, **tokens, "waiting_s": 0.0, **others}


def row(screen: str, start: str) -> str:
    line = next(line for line in screen.splitlines() if line.strip("│ ").startswith(start))
    return " ".join(line.strip("│ ").split())


def test_frame_names_the_pool_of_a_replica_where_the_server_lists_it() -> None:
    readings, served, _ = watching(Deployment().text())
    readings.poll()
    assert f"─ {REPLICA} ─" in shown(readings)
    served["pools"] = [{"replica": REPLICA, "pool": "decode"}]
    readings.poll()
    assert f"─ {REPLICA} · decode ─" in shown(readings)


@pytest.mark.parametrize("count", [16, 64])
def test_frame_of_many_replicas_has_requests_first_and_fits_the_screen(count: int) -> None:
    """A row for each replica where there is room, else for each pool."""
    names = [f"replica{number:02}" for number in range(count)]
    deployment = Deployment()
    text = generate_latest(deployment.registry).decode()
    flights = [flight(f"r-{number}", "batch", "prefilling", 100, 1000 + number) for number in range(90)]
    readings, served, clock = watching(merge_metrics(dict.fromkeys(names, text), "replica"), in_flight=flights)
    served["pools"] = [{"replica": name, "pool": "prefill" if name < "replica04" else "decode"} for name in names]
    readings.poll()
    clock.now += 2
    deployment.work()
    text = generate_latest(deployment.registry).decode()
    served["text"] = merge_metrics(dict.fromkeys(names, text), "replica")
    readings.poll()
    screen = shown(readings, height=50)
    lines = screen.splitlines()
    assert len(lines) <= 50
    title = next(number for number, line in enumerate(lines) if line.startswith("replica "))
    assert "r-89" in "\n".join(lines[:title]), "the longest prompt is above the replicas"
    rows = lines[title + 1 :]
    if count == 16:
        assert [line.split()[:2] for line in rows[:16]] == [
            [name, "decode" if name >= "replica04" else "prefill"] for name in [*names[4:], *names[:4]]
        ]
        steps = float(rows[0].split()[2])
    else:
        assert [" ".join(line.split()[:3]) for line in rows[:2]] == ["60 replicas decode", "4 replicas prefill"]
        steps = float(rows[1].split()[3]) / 4
    of_one = readings._scrapes[-1].since(readings._scrapes[0]).rate(scrape.STEPS, replica=names[0])
    assert of_one == pytest.approx(steps, abs=0.1)


def test_frame_after_two_readings_shows_the_difference() -> None:
    deployment = Deployment()
    readings, served, clock = watching(deployment.text())
    readings.poll()
    assert "reading" in shown(readings)
    deployment.work()
    served["text"], clock.now = deployment.text(), clock.now + 2
    readings.poll()
    screen = shown(readings)
    assert "the last 2.0 s" in screen
    assert REPLICA in screen
    assert row(screen, "steps/s").startswith("steps/s decodes 10 · chunks - · mixed 2 ")
    assert "predicted ±8% p50 · ±17% p90" in screen
    assert row(screen, "kernels") == "kernels own below 8 rows, onednn from there"
    assert "tokens/s prefill 1,200 · decode 45 · cached 0" in row(screen, "tokens/s")
    assert row(screen, "running") == "running interactive 2 waiting batch 12 backlog batch 41.5 s"
    assert "used 300 · cached 200 · free 500 preempted 0" in row(screen, "KV pages")
    assert screen.count("█") == 9
    #                        class       TTFT p50, p99, met  gap p50, p99, TPOT met  refused, tokens waiting
    assert row(screen, "interactive") == "interactive 50 ms 99 ms 90% 30 ms 40 ms 100% 3 -"
    assert row(screen, "time of tenants") == "time of tenants flood 75% (1.5 s) · own 25% (0.5 s)"
    assert row(screen, "batch") == "batch 5.5 s 9.9 s - - - - - 98,304"


def test_frame_shows_where_cached_tokens_came_from_once_some_were_not_in_the_pool() -> None:
    deployment = Deployment()
    deployment.cached_tokens.labels("pool").inc(500)
    readings, served, clock = watching(deployment.text())
    readings.poll()
    assert "tokens/s from" not in shown(readings)
    for source, tokens in (("pool", 300), ("host", 200), ("replica", 100)):
        deployment.cached_tokens.labels(source).inc(tokens)
    served["text"], clock.now = deployment.text(), clock.now + 2
    readings.poll()
    line = "cached tokens/s from pool 150 · host memory 100 · files 0 · other replicas 50"
    assert row(shown(readings), "cached") == line


def test_frame_marks_class_whose_promise_is_beyond_the_machine() -> None:
    deployment = Deployment()
    deployment.work()
    deployment.beyond.labels("interactive").set(0.0564)
    readings, _, _ = watching(deployment.text())
    readings.poll()
    assert "interactive (beyond: 56 ms a token)" in shown(readings)


def test_frame_has_rows_for_drafts_and_pictures_where_the_server_has_some() -> None:
    deployment = Deployment()
    readings, served, clock = watching(deployment.text())
    readings.poll()
    assert "drafts" not in shown(readings)
    assert "pictures" not in shown(readings)
    deployment.drafted.inc(60)
    deployment.accepted.inc(45)
    deployment.encoded.inc(10)
    deployment.found.inc(4)
    deployment.encoder_seconds.observe(0.5)
    served["text"], clock.now = deployment.text(), clock.now + 2
    readings.poll()
    screen = shown(readings)
    assert row(screen, "drafts") == "drafts tokens/s 30 · accepted 75%"
    assert "/s encoded 5 · found 2 · 25% of the time" in row(screen, "pictures")


def test_frame_leaves_out_work_older_than_the_window() -> None:
    deployment = Deployment()
    deployment.work()
    readings, served, clock = watching(deployment.text())
    for _ in range(9):
        readings.poll()
        clock.now += 1
    assert row(shown(readings), "steps/s").startswith("steps/s decodes 0 · chunks - · mixed 0 ")
    assert "the last 5.0 s" in shown(readings)
    assert row(shown(readings), "interactive").startswith("interactive - - - - ")
    deployment.prompt_tokens.inc(100)
    served["text"] = deployment.text()
    readings.poll()
    assert "prefill 20" in shown(readings)


def test_frame_without_a_metric_shows_a_dash() -> None:
    registry = CollectorRegistry()
    Gauge(scrape.PAGES, "Pages.", ["state"], registry=registry).labels("free").set(3)
    Gauge(scrape.REQUESTS, "Requests.", ["status"], registry=registry).labels("running").set(2)
    ttft = Histogram(scrape.TTFT_SECONDS, "TTFT.", buckets=(1, 2), registry=registry)
    readings, served, _ = watching(generate_latest(registry).decode())
    readings.poll()
    ttft.observe(0.5)
    served["text"] = generate_latest(registry).decode()
    readings.poll()
    screen = shown(readings)
    assert "predicted ±- p50" in screen
    assert row(screen, "running") == "running 2 waiting - backlog -"
    assert row(screen, "all").startswith("all 500 ms 990 ms - ")
    assert "requests in flight: -" in screen


def test_frame_lists_long_prefills_first_with_a_bar() -> None:
    flights = [
        flight("chat-1", "interactive", "decoding", 99, 70, num_output_tokens=30),
        flight("book-1", "batch", "prefilling", 4096, 16384),
        flight("note-1", "standard", "waiting", 0, 700, waiting_s=2.5),
    ]
    readings, served, _ = watching(Deployment().text(), in_flight=flights)
    readings.poll()
    screen = shown(readings)
    assert screen.index("book-1") < screen.index("note-1") < screen.index("chat-1")
    assert row(screen, "book-1").startswith("book-1 batch prefilling ━━━━━")
    assert row(screen, "book-1").endswith("4,096 16,384 0 0 ms")
    assert row(screen, "chat-1") == "chat-1 interactive decoding 99 70 30 0 ms"
    assert row(screen, "note-1").endswith("0 700 0 2.5 s")
    assert "and 2 more" not in screen
    served["in_flight"] = flights * 10
    readings.poll()
    assert "and 27 more" in shown(readings, height=10)
    served["in_flight"] = []
    readings.poll()
    assert "no requests in flight" in shown(readings)


def test_server_that_comes_back_is_read_from_the_start() -> None:
    deployment = Deployment()
    deployment.work()
    readings, served, clock = watching(deployment.text())
    readings.poll()
    served["status"] = 0
    readings.poll()
    clock.now += 7
    readings.poll()
    assert "unreachable for 7 s: Connection refused" in shown(readings)
    assert REPLICA not in shown(readings)
    served["status"], served["text"] = 200, Deployment().text()
    readings.poll()
    assert readings.lost is None
    assert "reading" in shown(readings)


@pytest.mark.parametrize(
    ("status", "text", "complaint"),
    [
        (404, "", "404 Not Found"),
        (200, "python_info 1\n", "no Crossdock replica"),
        (200, "<html>", "<html>"),
    ],
)
def test_server_without_crossdock_metrics_is_reported(status: int, text: str, complaint: str) -> None:
    readings, _, _ = watching(text, status)
    readings.poll()
    assert readings.lost is not None
    assert complaint in readings.lost


# --- the command


@pytest.fixture
def server() -> Iterator[tuple[Deployment, str]]:
    """A deployment, and the address at which it is served."""
    deployment = Deployment()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests = self.path == "/v1/requests"
            is_absent = self.path == "/v1/replicas" or (requests and deployment.in_flight is None)
            self.send_response(404 if is_absent else 200)
            self.end_headers()
            self.wfile.write((json.dumps({"data": deployment.in_flight}) if requests else deployment.text()).encode())
            deployment.work()

        def log_message(self, *_: object) -> None:
            pass

    with server_of(Handler) as url:
        yield deployment, url


def test_top_once_prints_one_frame(server: tuple[Deployment, str]) -> None:
    deployment, url = server
    deployment.in_flight = [flight("book", "batch", "prefilling", 10, 9000)]
    result = run("top", f"{url}/v1", "--once", "--interval", "0.1")
    assert result.exit_code == 0, result.output
    assert REPLICA in result.stdout
    assert "9,000" in result.stdout
    assert "decodes -" not in result.stdout


@pytest.mark.parametrize("address", [["http://127.0.0.1:9"], ["127.0.0.1:9/v1/"], ["--url", "http://127.0.0.1:9"]])
def test_top_once_without_a_server_exits_with_1(address: list[str]) -> None:
    result = run("top", *address, "--once", "--interval", "0.1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("top: cannot read http://127.0.0.1:9: ")


@pytest.mark.parametrize("key", ["q", "\x03"])
def test_top_at_a_terminal_stays_until_a_key_ends_it(server: tuple[Deployment, str], key: str) -> None:
    _, url = server
    terminal = Pty("top", url, "--interval", "0.1", lines=40)
    terminal.expect(REPLICA)
    terminal.expect("the last ")
    terminal.send(key)
    assert terminal.close() == 0


def test_tables_keep_their_keys_at_80_columns() -> None:
    deployment = Deployment()
    name = "req-0123456789abcdef"  # as long as an id is shown
    in_flight = [flight(name, "interactive", "prefilling", 4096, 131_072, num_output_tokens=100)]
    readings, served, clock = watching(deployment.text(), in_flight=in_flight)
    readings.poll()
    deployment.work()
    served["text"], clock.now = deployment.text(), clock.now + 2
    readings.poll()
    screen = shown(readings, width=80)
    assert row(screen, "interactive ").startswith("interactive ")
    assert row(screen, "batch ").startswith("batch ")
    assert "prefilling" in row(screen, name)
    assert row(screen, name).endswith("4,096 131,072 100 0 ms")


def test_top_without_a_server_ends_with_a_message() -> None:
    impatient = (
        "from crossdock.cluster import cli; from crossdock.cluster.watch import top; top._GIVE_UP_S = 0.2; cli.main()"
    )
    terminal = Pty("top", "http://127.0.0.1:9", "--interval", "0.1", program=(sys.executable, "-c", impatient))
    terminal.expect("trying again")
    terminal.expect("http://127.0.0.1:9 has not answered for")
    assert terminal.close() == 1


@pytest.mark.parametrize("gets_hangup", [True, False])
def test_top_ends_with_its_terminal(server: tuple[Deployment, str], gets_hangup: bool) -> None:
    _, url = server
    terminal = Pty("top", url, "--interval", "0.1", lines=40, gets_hangup=gets_hangup)
    terminal.expect(REPLICA)
    assert terminal.vanish() in (0, 128 + signal.SIGHUP)


def test_top_restores_the_terminal_at_sigterm(server: tuple[Deployment, str]) -> None:
    _, url = server
    terminal = Pty("top", url, lines=40)
    terminal.expect(REPLICA)
    assert not terminal.echoes()
    terminal.process.terminate()
    assert terminal.process.wait(240) == 128 + signal.SIGTERM
    assert terminal.echoes()
    terminal.close()
