"""Prefill on one replica, decode on others, in separate processes: the same tokens, whichever replica is lost when."""

import json
import re
import signal
from collections.abc import Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from transformers import AutoModelForCausalLM, PreTrainedModel

from crossdock.workers.replica.engine.engine import Engine
from tests.cluster.deploy.test_manifests import expressions
from tests.cluster.serve.pools import served_pools as pools
from tests.cluster.serve.pools.served_pools import CHUNK, Stream, assert_greedy, expected, processes, prompt, scrape
from tests.waiting import eventually


@pytest.fixture(scope="module")
def url(ray_cluster: None, small_model_dir: Path) -> Iterator[str]:
    with pools.deployment(small_model_dir) as address:
        yield address


@pytest.fixture(scope="module")
def local(small_model_dir: Path) -> Engine:
    return pools.local_engine(small_model_dir)


@pytest.fixture(scope="module")
def oracle(small_model_dir: Path) -> PreTrainedModel:
    module: PreTrainedModel = AutoModelForCausalLM.from_pretrained(small_model_dir, dtype=torch.float32)
    return module.eval()


@pytest.fixture(autouse=True)
def _wait_until_whole(url: str) -> None:
    pools.wait_until_whole(url)


def test_greedy_tokens_equal_those_of_one_engine(url: str, local: Engine) -> None:
    """Prompts of 1 to 1,200 tokens, half of them twice, so that both pools find cached pages."""
    lengths = [1, 15, 16, 17, 40, 100, 255, 256, 257, 300, 500, 700, 1200]
    prompts = [prompt(number, length) for number, length in enumerate(lengths)]
    wanted = expected(local, prompts)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda tokens: Stream(url, tokens).result(), prompts)) == wanted
        assert list(threads.map(lambda tokens: Stream(url, tokens).result(), prompts[::2])) == wanted[::2]
    replicas = pools.everyone()
    assert len(replicas) == 1 + pools.DECODES
    assert all(pools.sample_of(url, "crossdock_output_tokens_total", name) > 0 for name in replicas)


def test_sampled_tokens_equal_those_of_one_engine(url: str, local: Engine) -> None:
    prompts = [prompt(number, 300) for number in range(6)]
    params = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "repetition_penalty": 1.1}
    assert [Stream(url, tokens, **params).result() for tokens in prompts] == expected(local, prompts, **params)


def test_scrape_has_vllm_metrics_that_its_dashboards_query(url: str) -> None:
    """Each of vLLM's metrics has samples with the labels that queries use, or the operations guide says why not."""
    for number in range(3):
        assert Stream(url, prompt(number, 600)).result()
    theirs = json.loads((Path(__file__).parent / "vllm_dashboards.json").read_text())
    guide = (Path(__file__).parents[4] / "docs/operations.md").read_text()
    _, _, absent_part = guide.partition("| absent | reason |\n")
    rows = absent_part.partition("\n\n")[0].splitlines()
    absent = {name for row in rows for name in re.findall(r"`(vllm:\w+)`", row.split("|")[1])}
    text = scrape(url)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {*theirs["metrics"]} - {*families} - absent == set()
    assert absent & {*families} == set()
    assert {name for name in families if name.startswith("vllm:")} - {*theirs["metrics"]} == set()
    samples = {sample.name: sample for family in families.values() for sample in family.samples}
    for dashboard, queries in theirs["dashboards"].items():
        for name, labels in queries.items():
            if name not in samples:
                assert re.sub("_(total|bucket|sum|count)$", "", name) in absent, f"{dashboard}: {name}"
            else:
                assert {*labels} <= {*samples[name].labels}, f"{dashboard}: {name}"
    assert {sample.labels["replica"] for sample in families["vllm:num_requests_running"].samples} == {*pools.everyone()}


def test_scrape_has_all_metrics_of_dashboard_and_alerts(url: str) -> None:
    """Every metric and label in Grafana's dashboard and Prometheus' rules, after a few requests over both pools."""
    for number in range(3):
        assert Stream(url, prompt(number, 600)).result()
    families = list(text_string_to_metric_families(scrape(url)))
    labels = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    # A family without a sample yet (nothing was refused) still has its name; counters' samples end in _total.
    known = {*labels, *(family.name for family in families), *(f"{family.name}_total" for family in families)}
    histograms = {family.name for family in families if family.type == "histogram"}
    known |= {f"{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")}
    asked = list(expressions("alerts.yaml")) + list(expressions("grafana-dashboard.json"))
    names = {name for expression in asked for name in re.findall(r"\bcrossdock_\w+", expression)}
    assert len(names) > 30
    assert names - known == set()
    for expression in asked:
        for name, matchers in re.findall(r"\b(crossdock_\w+)\{([^}]*)\}", expression):
            wanted = set(re.findall(r"(\w+)[=!]", matchers)) - {"service"}  # the scrape's configuration adds that one
            assert wanted <= labels.get(name, wanted), f"{name} has no {wanted - labels[name]}: {expression}"
    scraped = {name for name in labels if name.startswith("crossdock_") and not name.endswith("_created")}
    shown = {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in names}
    missing = {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in scraped} - shown
    assert missing <= {  # in no panel: `crossdock top` shows them, or another panel shows the same better
        "crossdock_cpu_kernels",
        "crossdock_drafts_total",
        "crossdock_draft_tokens_accepted_at_total",
        "crossdock_promise_beyond_seconds",
        "crossdock_weight_version",
        "crossdock_start_seconds",
        "crossdock_step_cost_seconds",
        "crossdock_step_interval_share",
        "crossdock_step_outliers_total",
        "crossdock_time_to_first_token_seconds",
        "crossdock_requests_refused_total",
        "crossdock_kv_cache_info",
        "crossdock_sleep_level",
        "crossdock_step_tokens",
        "crossdock_prefill_tokens",
        "crossdock_request_phase_seconds",
        "crossdock_ingress_requests_ended_total",
        "crossdock_ingress_request_seconds",
        "crossdock_ingress_time_per_output_token_seconds",
        "crossdock_ingress_prompt_tokens",
        "crossdock_ingress_output_tokens",
        "crossdock_ingress_max_tokens",
    }


def has_some_of_prompt(url: str, name: str, replicas: Container[str]) -> bool:
    """Return whether one of the replicas has computed or received some of a request's prompt."""
    return any(one["replica"] in replicas and one["num_computed_tokens"] for one in pools.timelines(url, name))


@pytest.mark.parametrize("stage", ["at once", "during the transfer", "decoding"])
def test_client_that_leaves_frees_all_pages(url: str, stage: str) -> None:
    decodes = processes("decode")
    for number in range(2):
        body = {"model": "smol", "prompt": prompt(100 + number, 3000), "max_tokens": 500, "stream": True}
        name = f"leaving-{number}"
        with httpx.stream(
            "POST",
            f"{url}/v1/completions",
            json=body | {"ignore_eos": True},
            headers={"X-Request-Id": name},
            timeout=240,
        ) as answer:
            if stage == "decoding":
                lines = answer.iter_lines()
                for _ in range(6):
                    next(lines)
            elif stage == "during the transfer":
                eventually(partial(has_some_of_prompt, url, name, decodes))
    pools.wait_until_whole(url)


def test_killed_ingress_leaves_no_request_and_no_page_behind(url: str) -> None:
    """Its replicas hear nothing of it any more: some of its streams decode, others wait for pages."""
    (ingress,) = processes("ingress").values()
    asked = {"model": "smol", "max_tokens": 200, "stream": True, "ignore_eos": True}
    with ExitStack() as open_streams:
        for number in range(6):
            body = asked | {"prompt": prompt(300 + number, 900)}
            stream = httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=240)
            answer = open_streams.enter_context(stream)
            if number < 2:
                next(answer.iter_lines())
        ingress.kill()
    pools.wait_until_whole(url)


def test_prefill_replica_killed_during_a_transfer_leaves_its_work_to_decode(url: str, local: Engine) -> None:
    """The next attempt computes the prompt on a decode replica. The one that expected the pages may begin too, before
    it hears of that."""
    decodes = list(processes("decode"))
    before = pools.prompt_tokens(url, decodes)
    (victim,) = processes("prefill").values()
    stream, _ = pools.shipping_stream(url, stops=victim)
    victim.kill()
    assert [stream.result()] == expected(local, [stream.prompt])
    after = pools.prompt_tokens(url, decodes)
    assert 0 < sum(after.values()) - sum(before.values()) <= len(stream.prompt) + 2 * CHUNK, stream.timelines()


def has_ended_or_has(stream: Stream, num_tokens: int) -> bool:
    return len(stream.tokens) >= num_tokens or not stream.is_alive()


def test_decode_replica_killed_in_mid_stream_leaves_its_stream_to_another(url: str, oracle: PreTrainedModel) -> None:
    """The other one starts from the pages that prefill still has; no token is repeated or changed. On a busy machine a
    stream may end before its replica is killed: then another stream is tried."""
    for _ in range(5):
        pools.wait_until_whole(url)
        replicas = pools.everyone()
        before = pools.prompt_tokens(url, replicas)
        decodes = processes("decode")
        stream, replica = pools.shipping_stream(url, 400)
        eventually(partial(has_ended_or_has, stream, 20))
        decodes[replica].kill()
        if was_caught := len(stream.tokens) < 400:
            break
    assert was_caught, "all streams ended before their replicas were killed"
    assert_greedy(oracle, stream.prompt, stream.result(), 400)
    left = [name for name in replicas if name != replica]
    after = pools.prompt_tokens(url, left)
    computed = sum(after[name] - before[name] for name in left)
    timelines = json.dumps(stream.timelines(), indent=1)
    assert computed < len(stream.prompt) + 400 + 2 * CHUNK, timelines  # the prompt is not computed twice


def test_hung_prefill_replica_is_abandoned_after_the_deadline(url: str, local: Engine) -> None:
    """SIGSTOP: no process knows that it will not continue. After the deadline decode computes the rest itself. When the
    hung one wakes up, its late writes hit quarantined pages."""
    (victim,) = processes("prefill").values()
    stream, _ = pools.shipping_stream(url, stops=victim)
    try:
        assert [stream.result()] == expected(local, [stream.prompt])
        assert sum(pools.samples(url, 'crossdock_pages{state="quarantined"').values()) > 0
    finally:
        victim.send_signal(signal.SIGCONT)


def has_taken_role(handle: Any, name: str, role: str) -> bool:
    """Assign a role to a replica; False while the handle does not know its replicas."""
    try:
        handle.options(session_id=name).assign_role.remote(role).result()
    except RuntimeError:
        return False
    return True


def test_role_assigned_to_a_running_replica_changes_its_work_but_no_token(url: str, local: Engine) -> None:
    """A decode replica computes prompts for the other one, then decodes again."""
    prompts = [prompt(80 + number, 250) for number in range(8)]
    wanted = expected(local, prompts)
    name = min(processes("decode"))
    handle = serve.get_deployment_handle("decode", pools.APP)
    handle._init()
    sent = 'crossdock_transfers_total{direction="sent",outcome="shipped"'
    for role, does_send in (("prefill", True), ("decode", False)):
        eventually(partial(has_taken_role, handle, name, role))
        before = pools.samples(url, sent).get(name, 0.0)
        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(lambda tokens: Stream(url, tokens).result(), prompts)) == wanted
        assert (pools.samples(url, sent).get(name, 0.0) > before) is does_send


def test_replicas_that_drain_end_their_work_and_get_no_other(url: str, local: Engine, oracle: PreTrainedModel) -> None:
    """No stream of a decode replica is moved or computed twice. A prefill replica ships the prompts that it has begun;
    prompts that come meanwhile are computed where they are decoded. The deployment ends without the two."""
    prompts = [prompt(70 + number, 600) for number in range(4)]
    placed_again = pools.metric(url, "crossdock_ingress_placed_again_total")
    streams = [Stream(url, tokens, 250) for tokens in prompts]
    eventually(lambda: all(stream.tokens for stream in streams))
    pools.scale("decode", 1)
    late = Stream(url, prompts[0], 250)
    for asked, stream in zip([*prompts, prompts[0]], [*streams, late], strict=True):
        assert_greedy(oracle, asked, stream.result(), 250)
    assert pools.metric(url, "crossdock_ingress_placed_again_total") == placed_again

    decodes = list(processes("decode"))
    before = pools.prompt_tokens(url, decodes)
    stream, _ = pools.shipping_stream(url)
    pools.scale("prefill", 0)
    result = stream.result()
    assert pools.prompt_tokens(url, decodes) == before
    later = prompt(67, 300)
    assert [result, Stream(url, later).result()] == expected(local, [stream.prompt, later])
    pools.wait_until_whole(url, 1)
