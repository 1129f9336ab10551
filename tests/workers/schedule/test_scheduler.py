"""The scheduling rule: budget kept, pages balanced, everything ends, whatever happens in whatever order."""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from crossdock.workers.schedule.batch import Batch, SampledToken
from crossdock.workers.schedule.chunking import IDLE
from crossdock.workers.schedule.config import SchedulerConfig
from crossdock.workers.schedule.cost import StepCost
from crossdock.workers.schedule.pages import PagePool
from crossdock.workers.schedule.request import (
    FinishReason,
    Leg,
    Overloaded,
    Request,
    SamplingParams,
    Status,
    TokenDelta,
)
from crossdock.workers.schedule.scheduler import Scheduler
from crossdock.workers.schedule.slo import SloClass

EOS = 0
COST = StepCost(base=1e-3, per_prefill_token=1e-3, per_attended=1e-7, per_decode=5e-4, per_context=1e-6)
SLOW_ATTENTION = COST.model_copy(update={"per_attended": 1e-6})
CLASSES = (
    SloClass(name="interactive", ttft_s=0.4, tpot_s=0.004, decode_share=0.25),
    SloClass(name="standard", ttft_s=0.5, tpot_s=0.02),
    SloClass(name="batch", ttft_s=5.0, tpot_s=0.5),
)


def next_token(token_ids: list[int], vocab: int = 50) -> int:
    """Stands in for the model: a token that depends on all before it, sometimes EOS."""
    return hashlib.blake2b(str(token_ids).encode(), digest_size=4).digest()[0] % vocab


def reference_output(prompt: list[int], params: SamplingParams, max_model_len: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) - len(prompt) < params.max_tokens and len(tokens) < max_model_len:
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS and not params.ignore_eos:
            break
    return tokens[len(prompt) :]


def scheduler(num_pages: int = 64, max_model_len: int = 100, caching: bool = True, **config: Any) -> Scheduler:
    settings = {"max_num_batched_tokens": 32, "max_num_seqs": 8, "page_size": 4} | config
    pool = PagePool(num_pages, settings["page_size"], caching)
    return Scheduler(SchedulerConfig(**settings), pool, max_model_len, {EOS})


def request(name: str, prompt: list[int], max_tokens: int = 8, **params: Any) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params))


def step(scheduler: Scheduler) -> tuple[Batch, list[TokenDelta]]:
    batch = scheduler.schedule(0.0)
    tokens = {p.request.id: SampledToken(next_token(p.request.token_ids)) for p in batch.scheduled if p.samples}
    return batch, scheduler.update(batch, tokens, 0.0)


def run(scheduler: Scheduler, limit: int = 10_000) -> list[Batch]:
    batches = []
    while scheduler.has_work:
        batches.append(step(scheduler)[0])
        assert len(batches) < limit, "no end in sight"
    return batches


def chunks(batches: list[Batch], name: str) -> list[int]:
    return [part.num_tokens for batch in batches for part in batch.scheduled if part.request.id == name]


# -- single properties ---------------------------------------------------------------------------------------------


def test_decodes_go_first_and_the_chunk_takes_the_rest() -> None:
    it = scheduler(max_num_batched_tokens=32, num_pages=200, max_model_len=400)
    for i in range(3):
        it.add(request(f"d{i}", [1, 2, i], max_tokens=50))
    step(it)
    it.add(request("long", list(range(1, 101))))
    batch, _ = step(it)
    assert [(p.request.id, p.num_tokens) for p in batch.scheduled] == [("d0", 1), ("d1", 1), ("d2", 1), ("long", 28)]
    assert batch.num_decodes == 3


def test_chunk_ends_are_page_aligned_but_the_last() -> None:
    it = scheduler(max_num_batched_tokens=23, num_pages=100, max_model_len=400, max_num_seqs=4)
    it.add(request("a", list(range(1, 66)), max_tokens=1))
    assert chunks(run(it), "a") == [20, 20, 20, 5]


def test_threshold_bounds_one_prompt_and_leaves_room_for_others() -> None:
    it = scheduler(max_num_batched_tokens=32, long_prefill_token_threshold=16)
    it.add(request("long", list(range(1, 49)), max_tokens=1))
    it.add(request("short", [7] * 10, max_tokens=1))
    batch, _ = step(it)
    assert [(p.request.id, p.num_tokens) for p in batch.scheduled] == [("long", 16), ("short", 10)]


def test_without_chunking_a_prompt_is_one_step() -> None:
    it = scheduler(max_num_batched_tokens=100, enable_chunked_prefill=False)
    it.add(request("a", list(range(1, 91)), max_tokens=1))
    it.add(request("b", list(range(1, 51)), max_tokens=1, prompt_logprobs=0))  # prompt_logprobs: computes all
    batches = run(it)
    assert chunks(batches, "a") == [90]
    assert chunks(batches, "b") == [50]
    assert len(batches) == 2


def test_prompts_of_running_requests_are_sharable() -> None:
    it = scheduler(max_num_batched_tokens=24, num_pages=100, max_model_len=200)
    prompt = list(range(1, 61))
    it.add(request("a", prompt, max_tokens=20))
    for _ in range(2):
        step(it)
    second = request("b", prompt, max_tokens=2)
    it.add(second)
    step(it)
    assert it.get("a").num_output_tokens > 0  # type: ignore[union-attr]
    assert second.num_cached_tokens == 48
    run(it)


def test_pages_for_the_whole_prompt_are_reserved_before_its_first_chunk() -> None:
    it = scheduler(num_pages=25, max_model_len=100)
    it.add(request("a", list(range(1, 81)), max_tokens=4))
    it.add(request("b", list(range(101, 141)), max_tokens=4))
    step(it)
    assert len(it.pages.pages_of("a")) == 20
    assert not it.pages.pages_of("b")  # its ten pages are not there: it does not start
    run(it)


def test_preempted_by_recompute_and_same_output() -> None:
    it = scheduler(num_pages=12, max_model_len=40)
    prompts = {name: [ord(name)] * 9 for name in "abcd"}
    requests = {name: request(name, prompt, max_tokens=20) for name, prompt in prompts.items()}
    for each in requests.values():
        it.add(each)
    run(it)
    assert it.num_preemptions > 0
    for name, prompt in prompts.items():
        expected = reference_output(prompt, requests[name].sampling, 40)
        assert requests[name].token_ids[9:] == expected


def test_abort_in_every_state_frees_everything() -> None:
    """Seven chunks in, decoding, or still waiting: one release."""
    it = scheduler(max_num_batched_tokens=16, max_num_seqs=2, num_pages=100, max_model_len=200, caching=False)
    it.add(request("deep", list(range(1, 181))))
    for _ in range(7):
        step(it)
    it.add(request("waiting", [1, 2, 3]))
    assert it.get("deep").num_computed_tokens == 7 * 16  # type: ignore[union-attr]
    assert it.abort("waiting") is not None
    aborted = it.abort("deep")
    assert aborted is not None
    assert aborted.finish_reason is FinishReason.ABORT
    assert it.abort("deep") is None
    assert it.pages.counts().free == 100
    assert not it.has_work


def test_aborted_while_its_step_runs() -> None:
    it = scheduler()
    it.add(request("a", [1, 2, 3]))
    batch = it.schedule(0.0)
    it.abort("a")
    assert it.update(batch, {"a": SampledToken(5)}, 0.0) == []
    assert it.pages.counts().owned == 0


@pytest.mark.parametrize(
    ("params", "tokens", "reason"),
    [
        ({"max_tokens": 3}, 3, FinishReason.LENGTH),
        ({"max_tokens": 0}, 0, FinishReason.LENGTH),
        ({"max_tokens": 50, "stop_token_ids": (7,)}, 5, FinishReason.STOP),
        ({"max_tokens": 50}, 7, FinishReason.STOP),
        ({"max_tokens": 50, "min_tokens": 8, "stop_token_ids": (7,)}, 9, FinishReason.STOP),
        ({"max_tokens": 50, "ignore_eos": True}, 10, FinishReason.LENGTH),
    ],
)
def test_ends(params: dict[str, Any], tokens: int, reason: FinishReason) -> None:
    it = scheduler(max_model_len=20)
    it.add(Request("a", [1] * 10, SamplingParams(**params)))
    output: list[int] = []
    script = [1, 2, 3, 4, 7, 6, EOS, 1, 7, 1, 1]
    last = None
    while it.has_work:
        batch = it.schedule(0.0)
        for last in it.update(batch, {"a": SampledToken(script[len(output)])}, 0.0):
            output += last.token_ids
    assert len(output) == tokens
    assert last is not None
    assert last.finish_reason is reason


def test_what_can_never_be_served_is_refused_by_name() -> None:
    it = scheduler(max_model_len=20)
    with pytest.raises(ValueError, match="prompt must have"):
        it.add(request("a", []))
    with pytest.raises(ValueError, match="prompt has 20 tokens; this model takes at most 19"):
        it.add(request("a", [1] * 20))
    it.add(request("a", [1] * 19))
    with pytest.raises(ValueError, match="request_id 'a'"):
        it.add(request("a", [1]))
    with pytest.raises(ValueError, match="max_model_len"):
        scheduler(num_pages=2, max_model_len=20)
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        scheduler(max_num_batched_tokens=8, max_num_seqs=8)
    with pytest.raises(ValueError, match="long_prefill_token_threshold"):
        scheduler(long_prefill_token_threshold=3)
    with pytest.raises(ValueError, match="enable_chunked_prefill"):
        scheduler(enable_chunked_prefill=False, max_model_len=40)


# -- classes, order, promises ----------------------------------------------------------------------------------------


class Simulation:
    """A scheduler on a clock that advances by what each step costs."""

    def __init__(self, **config: Any) -> None:
        settings = {
            "max_num_batched_tokens": 256,
            "max_num_seqs": 16,
            "page_size": 4,
            "num_pages": 4000,
            "max_model_len": 4000,
            "slo_classes": CLASSES,
            "admission": "queue",
        }
        self.it = scheduler(**(settings | config))
        self.it.cost = COST
        self.now = 0.0
        self.first_token: dict[str, float] = {}
        self.tokens: dict[str, list[float]] = {}
        self.batches: list[Batch] = []

    def add(self, name: str, num_tokens: int, slo_class: str = "standard", max_tokens: int = 1) -> Request:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        salt = name  # nothing is shared
        new = Request(name, [7] * num_tokens, params, salt, slo_class, arrival_time=self.now)
        self.it.add(new)
        return new

    def step(self) -> Batch:
        self.it.grant(self.now)
        batch = self.it.schedule(self.now)
        self.now += COST.seconds(batch.work)
        tokens = {p.request.id: SampledToken(next_token(p.request.token_ids)) for p in batch.scheduled if p.samples}
        for delta in self.it.update(batch, tokens, self.now):
            self.first_token.setdefault(delta.request_id, self.now)
            self.tokens.setdefault(delta.request_id, []).append(self.now)
        self.batches.append(batch)
        return batch

    def run(self) -> None:
        while self.it.has_work:
            self.step()


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    """Half of each step is its own, whatever is left of the long one; first come, first served computes that first."""

    def steps(**config: Any) -> int:
        them = Simulation(**config)
        them.add("long", 3000)
        them.step()
        them.add("short", 100)
        count = 0
        while "short" not in them.first_token:
            them.step()
            count += 1
        return count

    assert steps() <= 2
    assert steps(prefill_order="fcfs", chunk_policy="fixed") == 12


def test_the_steps_of_a_long_prompt_leave_streams_their_pace() -> None:
    """No gap of a stream exceeds what its class promises by more than the bank of a quarter, while a floor chunk
    fits into its slack at all."""
    them = Simulation()
    for number in range(4):
        them.add(f"s{number}", 20, "standard", max_tokens=300)
    for _ in range(5):
        them.step()
    them.add("long", 3000, "batch")
    them.run()
    for number in range(4):
        times = them.tokens[f"s{number}"]
        gaps = [after - before for before, after in pairwise(times)]
        assert max(gaps[5:]) <= 1.25 * CLASSES[1].tpot_s
    assert "slack" in them.batches[8].limit


def test_patient_streams_do_not_make_steps_long() -> None:
    """Whoever comes while a step runs waits for its end, also where the streams in it could wait for longer."""
    them = Simulation()
    them.add("stream", 20, "batch", max_tokens=300)
    them.step()
    them.add("long", 3000, "batch")
    longest = max(COST.seconds(them.step().work) for _ in range(8))
    assert 0.05 < longest <= IDLE * CLASSES[0].ttft_s + 1e-9 < CLASSES[2].tpot_s


def test_long_prompts_of_less_urgent_classes_do_not_keep_an_urgent_one_out() -> None:
    """So many long prompts may be partly computed at once, but of them all only those of its class, or before it."""
    them = Simulation(max_long_partial_prefills=1)
    them.add("batch", 3000, "batch")
    them.step()
    them.add("standard", 2000, "standard")
    them.step()
    them.add("second", 2000, "standard")
    them.add("urgent", 1000, "interactive")  # long too, and takes several steps
    while "urgent" not in them.first_token:
        batch = them.step()
        assert [part.request.id for part in batch.scheduled][:1] == ["urgent"]
        assert them.it.get("second").num_computed_tokens == 0, "the limit holds in its class"
    them.run()
    order = sorted(them.first_token, key=lambda name: them.first_token[name])
    assert order == ["urgent", "standard", "second", "batch"]


@pytest.mark.parametrize("policy", ["adaptive", "fixed"])
@pytest.mark.parametrize("slo_class", [slo.name for slo in CLASSES])
@pytest.mark.parametrize("num_streams", [1, 8, 16])
def test_what_share_of_the_time_goes_into_prompts_is_predicted(num_streams: int, slo_class: str, policy: str) -> None:
    """Against what goes into them when it is played, beside standard streams that leave them room or none."""
    them = Simulation(chunk_policy=policy, max_num_seqs=32, min_chunk_tokens=4)
    for number in range(num_streams):
        them.add(f"s{number}", 100, "standard", max_tokens=200)
    while any(not it.is_decoding for it in them.it.requests()):
        them.step()
    for _ in range(8):  # they bank
        them.step()
    priority = [slo.name for slo in CLASSES].index(slo_class)
    predicted = them.it.prefill_share(priority)
    began, before = them.now, them.it.prefilled_seconds
    them.add("prompt", 3000, slo_class)
    for _ in range(10):
        them.step()
    assert predicted == pytest.approx((them.it.prefilled_seconds - before) / (them.now - began), abs=0.08)


def test_a_step_ends_when_a_stream_from_elsewhere_may_be_here() -> None:
    """Its prompt is computed by another replica, meanwhile this one computes a prompt of its own."""
    them = Simulation()
    them.add("long", 3000, "batch")
    idle = COST.seconds(them.step().work)
    them.it.add(pair_request("a", 60, Leg.RECEIVE))
    for committed in (0, 32, 56):
        if committed:
            them.it.commit("a", committed)
        left = COST.prefill_seconds(committed, 60, 256) + CLASSES[1].tpot_s
        batch = them.step()
        assert them.it.get("a").num_computed_tokens == committed
        assert left / 2 < COST.seconds(batch.work) <= left < idle
        assert "slack" in batch.limit


def test_classes_are_strict_tiers() -> None:
    them = Simulation(max_num_batched_tokens=64, short_lane_share=0.0)
    for name in ("batch", "standard", "interactive"):
        for number in range(3):
            them.add(f"{name} {number}", 60, name)
    them.run()
    order = sorted(them.first_token, key=lambda name: (them.first_token[name], name))
    assert [name.split()[0] for name in order] == ["interactive"] * 3 + ["standard"] * 3 + ["batch"] * 3


def test_who_slows_down_first_when_pages_run_short() -> None:
    """Batch loses its pages, then standard; the interactive streams are never preempted."""
    them = Simulation(num_pages=64, max_model_len=200, max_num_seqs=8, starvation_s=1000.0)
    requests = {}
    for name in ("batch", "standard", "interactive"):
        requests[name] = them.add(name, 40, name, max_tokens=100)
        for _ in range(3):
            them.step()
    assert all(it.status is Status.RUNNING for it in requests.values())
    late = them.add("interactive 2", 120, "interactive", max_tokens=4)  # needs 30 of the 64 pages at once
    them.step()
    assert late.status is Status.RUNNING
    assert requests["batch"].status is Status.WAITING
    them.run()
    assert requests["batch"].num_preemptions >= 1
    assert requests["batch"].num_preemptions >= requests["standard"].num_preemptions
    assert requests["interactive"].num_preemptions == late.num_preemptions == 0


def test_who_slows_down_first_when_time_runs_short() -> None:
    """Batch streams skip steps so that an interactive one keeps its pace; none of them stops for good."""
    them = Simulation(max_num_seqs=48)
    for number in range(30):
        them.add(f"b{number}", 4, "batch", max_tokens=40)
    for _ in range(3):
        them.step()
    them.add("i", 4, "interactive", max_tokens=60)
    them.run()
    times = them.tokens["i"]
    gaps = [after - before for before, after in pairwise(times)]
    assert sorted(gaps)[len(gaps) // 2] <= 1.25 * CLASSES[0].tpot_s
    assert any(batch.num_skipped for batch in them.batches)
    for number in range(30):
        times = them.tokens[f"b{number}"]
        assert len(times) == 40
        assert max(after - before for before, after in pairwise(times)) <= CLASSES[2].tpot_s


@pytest.mark.parametrize("length", [100, 2000])
def test_nobody_starves(length: int) -> None:
    """Under more interactive work than the replica can do, for ever, a batch prompt has its first token within
    `starvation_s` or its own promise, whichever is later, plus its own time, plus that of whoever had starved before
    it; here nobody had."""
    them = Simulation(starvation_s=2.0, max_num_seqs=64)
    victim = them.add("victim", length, "batch")
    alone = COST.prefill_seconds(0, length, 256)
    arrivals = 0
    while "victim" not in them.first_token:
        while arrivals * 0.05 <= them.now:  # 100 tokens each 50 ms: twice what a millisecond a token allows
            them.add(f"i{arrivals}", 100, "interactive")
            arrivals += 1
        them.step()
        assert them.now < 60
    assert victim.arrival_time == 0.0
    bound = max(2.0, them.it.config.slo_classes[2].ttft_deadline(alone))
    assert bound <= them.first_token["victim"] <= bound + 2 * alone + 0.5


def test_partial_prefills_are_bounded() -> None:
    them = Simulation(max_num_batched_tokens=64, max_num_partial_prefills=3, max_long_partial_prefills=1)
    for number in range(6):
        them.add(f"long {number}", 1000)
        them.add(f"short {number}", 100)
    while them.it.has_work:
        them.step()
        partial = [it for it in them.it.running if not it.is_decoding]
        assert len(partial) <= 3
        assert sum(it.id.startswith("long") and it.num_uncached_tokens > 160 for it in partial) <= 1


def test_late_is_refused_with_the_seconds_to_wait() -> None:
    them = Simulation(admission="reject")
    them.add("first", 3000, "batch")
    them.add("second", 30, "interactive")  # goes before: not late
    for number in range(2):
        them.add(f"third {number}", 150, "standard")
    with pytest.raises(Overloaded, match=r"'standard' promises 0\.\d s") as refused:
        them.add("fourth", 200, "standard")
    assert 0 < refused.value.retry_after < 1
    them.add("fourth", 200, "batch")
    waited = them.now + refused.value.retry_after
    while them.now < waited:
        them.step()
    them.add("fifth", 200, "standard")  # what was promised: now it would be taken
    them.run()


def test_unknown_class_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="slo_class 'gold' is not served here; there are interactive, standard, batch"):
        Simulation().add("a", 3, "gold")


def test_a_batch_prompt_makes_no_interactive_stream_late() -> None:
    """Deep in its context even a page takes longer than an interactive token may: it waits for a gap between streams,
    and gets its floor once it starves."""
    them = Simulation(starvation_s=8.0)
    them.it.cost = SLOW_ATTENTION
    them.add("long", 3000, "batch")
    while not (long := them.it.get("long")) or long.num_computed_tokens < 2000:
        them.step()
    them.add("i", 4, "interactive", max_tokens=100)
    while "i" not in them.tokens or len(them.tokens["i"]) < 20:
        batch = them.step()
        if batch.num_decodes:
            assert not any(part.request.id == "long" for part in batch.scheduled)
    them.run()
    assert "long" in them.first_token


def test_the_same_history_gives_the_same_steps() -> None:
    def history() -> list[str]:
        them = Simulation(num_pages=400, max_model_len=1500)
        for number in range(40):
            them.add(f"r{number}", 1 + 37 * number % 900, CLASSES[number % 3].name, max_tokens=1 + number % 30)
            them.step()
        them.run()
        return [
            f"{batch.limit} {[(p.request.id, p.start, p.num_tokens, p.reason) for p in batch.scheduled]}"
            for batch in them.batches
        ]

    assert history() == history()


def test_chunks_and_decodes_alternate_where_they_do_not_mix() -> None:
    """SGLang without --enable-mixed-chunk."""
    them = Simulation(mixed_chunks=False, chunk_policy="fixed", max_num_batched_tokens=64)
    them.add("stream", 10, max_tokens=50)
    them.step()
    them.add("long", 256)
    kinds = ["decodes" if batch.num_decodes else "chunk" for batch in (them.step() for _ in range(8))]
    assert kinds == ["chunk", "decodes"] * 4


def test_max_prefill_tokens_bounds_a_step() -> None:
    them = Simulation(max_prefill_tokens=32, chunk_policy="fixed")
    them.add("a", 100)
    them.run()
    assert [batch.num_tokens for batch in them.batches] == [32, 32, 32, 4]
    assert them.batches[0].limit == "max_prefill_tokens"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"min_chunk_tokens": 3}, "min_chunk_tokens"),
        ({"max_num_partial_prefills": 1}, "max_long_partial_prefills"),
        ({"default_slo_class": "gold"}, "default_slo_class"),
        ({"slo_classes": (CLASSES[0], CLASSES[0])}, "different names"),
        ({"slo_classes": (CLASSES[0].model_copy(update={"decode_share": 1.0}), *CLASSES[1:])}, "decode_share"),
    ],
)
def test_settings_that_cannot_be(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scheduler(**config)


# -- many equal steps at once ----------------------------------------------------------------------------------------


def decoding(*outputs: int, slo_classes: tuple[str, ...] = ("standard",), **config: Any) -> Simulation:
    """Streams that have just made their first token of so many."""
    sim = Simulation(**config)
    for number, max_tokens in enumerate(outputs):
        sim.add(f"r{number}", 8, slo_classes[number % len(slo_classes)], max_tokens)
    while any(not it.is_decoding for it in sim.it.requests()):
        sim.step()
    return sim


def test_steps_are_steady_up_to_the_first_end() -> None:
    sim = decoding(9, 5)
    assert sim.it.steady_steps(sim.it.schedule(sim.now)) == 4
    sim.add("late", 8)
    assert sim.it.steady_steps(sim.it.schedule(sim.now)) == 1, "a prompt is waiting"
    assert Simulation().it.steady_steps(Batch([], 0)) == 1


def test_steps_are_steady_while_there_are_pages() -> None:
    sim = decoding(900, 900, num_pages=12, max_model_len=48)  # 3 pages each, 6 left
    assert sim.it.steady_steps(sim.it.schedule(sim.now)) == 3 * 4 + 1


def test_steps_are_steady_while_nobody_is_skipped() -> None:
    """A step of two takes 1 ms + 2 x 0.5 ms + 1 us per token of context, of which there are two more in each; the most
    urgent promise is 4 ms."""
    sim = decoding(1500, 1500, slo_classes=("interactive", "batch"))
    context = sum(it.num_tokens for it in sim.it.running)
    steps = sim.it.steady_steps(sim.it.schedule(sim.now))
    assert steps == 1 + int((0.99 * 4e-3 - 2e-3 - context * 1e-6) / 2e-6) < 1400
    same = decoding(1500, 1500, slo_classes=("interactive",))
    assert same.it.steady_steps(same.it.schedule(same.now)) > 1400, "nobody is less urgent than another"


arrivals = st.tuples(
    st.floats(0, 0.3), st.integers(1, 60), st.integers(1, 50), st.sampled_from(["interactive", "standard", "batch"])
)


@given(
    st.lists(arrivals, min_size=1, max_size=12),
    st.integers(16, 60),
    st.sampled_from([{}, {"chunk_policy": "fixed"}, {"mixed_chunks": False}, {"prefill_order": "fcfs"}]),
)
def test_steps_taken_in_at_once_are_as_steps_in_turn(
    plan: list[tuple[float, int, int, str]], num_pages: int, config: dict[str, Any]
) -> None:
    """Whenever somebody comes, in the middle of a stretch too; in pools where streams are preempted."""

    def play(at_once: bool) -> tuple[list[object], list[float]]:
        sim = Simulation(num_pages=num_pages, max_model_len=64, max_num_seqs=6, max_num_batched_tokens=24, **config)
        coming, seen, ends = sorted(plan, reverse=True), [], []
        while coming or sim.it.has_work:
            if not sim.it.has_work:
                sim.now = max(sim.now, coming[-1][0])
            while coming and coming[-1][0] <= sim.now:
                _, prompt, output, slo_class = coming.pop()
                sim.add(f"r{len(coming)}", min(prompt, 60), slo_class, output)
            batch = sim.it.schedule(sim.now)
            steps = sim.it.steady_steps(batch) if at_once else 1
            stretch = [sim.now + COST.seconds(batch.work)]
            work = batch.work
            while len(stretch) < steps and not (coming and coming[-1][0] <= stretch[-1]):
                work = replace(work, context=work.context + work.decodes)
                stretch.append(stretch[-1] + COST.seconds(work))
            tokens = {part.request.id: [9] * (len(stretch) - 1) for part in batch.scheduled}
            batch = sim.it.advance(batch, tokens, stretch[:-1])
            sim.now = stretch[-1]
            ends += stretch
            sim.it.update(batch, dict.fromkeys((it.id for it in sim.it.requests()), SampledToken(9)), sim.now)
            if not at_once or len(ends) % 7 == 0 or steps > 1:
                state = [(it.id, it.num_tokens, it.num_computed_tokens, it.due, it.status) for it in sim.it.requests()]
                seen.append((sim.now, state, sim.it.pages.counts(), set(sim.it.pages._index)))
        return seen, ends

    in_turn, ends = play(at_once=False)
    at_once, same_ends = play(at_once=True)
    assert same_ends == ends
    assert all(state in in_turn for state in at_once)


# -- legs ------------------------------------------------------------------------------------------------------------


def pair_request(name: str, num_tokens: int, leg: Leg, max_tokens: int = 5, epoch: int = 1) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(name, [ord(name[0])] * num_tokens, params, leg=leg, epoch=epoch)


def test_a_sent_prompt_keeps_its_pages_until_they_are_read() -> None:
    it = scheduler()
    it.add(pair_request("a", 30, Leg.SEND))
    _, deltas = step(it)
    assert len(deltas[0].token_ids) == 1
    assert deltas[0].finish_reason is None
    assert it.get("a").status is Status.HELD  # type: ignore[union-attr]
    assert not it.has_work
    it.shipped("a")
    assert it.get("a") is None
    assert it.pages.counts().owned == 8, "the last writes may still read them"
    it.pages.release("a#1")
    assert it.pages.counts().owned == 0


def test_a_prompt_that_is_received_decodes_from_its_second_token() -> None:
    it = scheduler()
    it.add(pair_request("a", 30, Leg.RECEIVE))
    assert not it.has_work
    (granted,) = it.grant(0.0)
    assert granted.num_computed_tokens == 0
    assert len(it.pages.pages_of("a#1")) == 8
    it.commit("a", 16)
    assert not it.schedule(0.0)
    first = next_token([ord("a")] * 30)
    it.arrive("a", first, 0.0)
    deltas = []
    while it.has_work:
        deltas += step(it)[1]
    expected = reference_output([ord("a")] * 30, granted.sampling, 100)
    assert [first, *(token for delta in deltas for token in delta.token_ids)] == expected
    assert [delta.first for delta in deltas] == [1, 2, 3, 4]
    assert it.pages.counts().owned == it.pages.counts().quarantined == 0


def test_committed_pages_are_shared_while_the_rest_is_on_its_way() -> None:
    it = scheduler()
    it.add(pair_request("a", 30, Leg.RECEIVE))
    it.grant(0.0)
    it.commit("a", 16)
    it.add(Request("b", [ord("a")] * 30, SamplingParams(max_tokens=1)))
    batch, _ = step(it)
    assert (batch.scheduled[0].start, batch.scheduled[0].num_tokens) == (16, 14)


def test_what_had_arrived_is_not_computed_again() -> None:
    it = scheduler()
    it.add(pair_request("a", 30, Leg.RECEIVE))
    it.grant(0.0)
    it.commit("a", 16)
    it.take_over("a", 1.0)
    assert it.pages.counts().quarantined == 4
    batch, _ = step(it)
    assert (batch.scheduled[0].start, batch.scheduled[0].num_tokens) == (16, 14)
    run(it)
    assert it.pages.counts().quarantined == 4, "the lost writer is not known to have stopped"
    it.pages.end_quarantine("a#1")
    assert it.pages.counts().quarantined == 0


def test_an_aborted_arrival_is_quarantined() -> None:
    it = scheduler()
    it.add(pair_request("a", 30, Leg.RECEIVE))
    it.grant(0.0)
    it.commit("a", 8)
    it.abort("a")
    counts = it.pages.counts()
    assert (counts.quarantined, counts.owned, counts.cached) == (6, 0, 2)


def test_grants_wait_for_pages() -> None:
    it = scheduler(num_pages=26, max_model_len=100)
    it.add(pair_request("a", 60, Leg.RECEIVE))
    it.add(pair_request("b", 60, Leg.RECEIVE))
    assert [request.id for request in it.grant(0.0)] == ["a"]
    assert it.grant(0.0) == []
    it.arrive("a", 1, 0.0)
    run(it)
    assert [request.id for request in it.grant(0.0)] == ["b"]


def test_what_arrives_has_a_page_for_its_next_token() -> None:
    """Prompts that fill their pages: on arrival each needs one more, for which nobody must go."""
    it = scheduler(num_pages=7, max_model_len=20)
    for name in "abc":
        it.add(pair_request(name, 8, Leg.RECEIVE))
    assert [each.id for each in it.grant(0.0)] == ["a", "b"], "c's two pages would leave one for the two that come"
    for name in "ab":
        it.arrive(name, 5, 0.0)
    step(it)
    assert it.num_preemptions == 0


def test_grants_wait_for_places() -> None:
    it = scheduler(max_num_seqs=1)
    it.add(pair_request("a", 6, Leg.RECEIVE))
    it.add(pair_request("b", 6, Leg.RECEIVE))
    assert [request.id for request in it.grant(0.0)] == ["a"]
    it.add(request("local", [1, 2, 3]))
    assert not it.schedule(0.0)


def test_a_request_that_began_elsewhere_goes_on_where_it_was() -> None:
    prompt = [9] * 30
    expected = reference_output(prompt, SamplingParams(max_tokens=10, ignore_eos=True), 100)
    it = scheduler()
    it.add(Request("a", prompt, SamplingParams(max_tokens=10, ignore_eos=True), output_token_ids=expected[:4]))
    deltas = []
    while it.has_work:
        deltas += step(it)[1]
    assert [token for delta in deltas for token in delta.token_ids] == expected[4:]
    assert deltas[0].first == 4


# -- any history ---------------------------------------------------------------------------------------------------


class Flight(NamedTuple):
    """A step as a device gets it: from then on only what it finds comes back."""

    batch: Batch
    token_ids: list[list[int]]  # of each part; below 0: what the step before finds in that row
    pages: list[list[int]]


class AnyHistory(RuleBasedStateMachine):
    """Add, step and abort in any order, on a pool small enough to preempt, with shared prefixes and salts. The device
    knows only what lies in its pages, and writes to them as late as it may: when its step ends."""

    most_flights = 1

    @initialize(
        pages=st.integers(10, 30),
        budget=st.integers(12, 40),
        seqs=st.integers(1, 8),
        threshold=st.sampled_from([0, 4, 9]),
        caching=st.booleans(),
        chunked=st.booleans(),
        mixed=st.booleans(),
        policy=st.sampled_from(["adaptive", "fixed"]),
        order=st.sampled_from(["response_ratio", "fcfs"]),
        partial=st.sampled_from([(1, 1), (2, 1), (8, 2)]),
        lane=st.sampled_from([0.0, 0.5, 0.9]),
        admission=st.sampled_from(["queue", "reject"]),
    )
    def start(
        self,
        pages: int,
        budget: int,
        seqs: int,
        threshold: int,
        caching: bool,
        chunked: bool,
        mixed: bool,
        policy: str,
        order: str,
        partial: tuple[int, int],
        lane: float,
        admission: str,
    ) -> None:
        self.it = scheduler(
            num_pages=pages,
            max_model_len=40,
            caching=caching,
            max_num_batched_tokens=budget if chunked else max(budget, 40),
            max_num_seqs=min(seqs, budget - 4),
            long_prefill_token_threshold=threshold,
            enable_chunked_prefill=chunked,
            mixed_chunks=mixed,
            chunk_policy=policy,
            prefill_order=order,
            max_num_partial_prefills=partial[0],
            max_long_partial_prefills=partial[1],
            short_lane_share=lane,
            admission=admission,
            starvation_s=0.5,
            slo_classes=CLASSES,
        )
        self.it.cost = COST if policy == "adaptive" else None
        self.now = 0.0
        self.live: dict[str, Request] = {}
        self.being_read: set[str] = set()
        self.count = 0
        self.memory: dict[tuple[int, int], int] = {}  # by page and place in it
        self.flights: list[Flight] = []
        self.found: list[int] = []  # by the last step that ended
        self.late_rows: set[int] = set()  # of the next step that ends: what begins with them begins with something else
        self.late: set[str] = set()  # requests whose token the step in flight did not begin with

    @rule(
        prefix=st.sampled_from([[], [1] * 8, [1] * 8 + [2] * 8, [3] * 20]),
        tail=st.lists(st.integers(1, 49), min_size=1, max_size=19),
        max_tokens=st.integers(0, 25),
        salt=st.sampled_from(["", "tenant"]),
        ignore_eos=st.booleans(),
        slo_class=st.sampled_from(["interactive", "standard", "batch"]),
        leg=st.sampled_from([Leg.LOCAL, Leg.LOCAL, Leg.SEND, Leg.RECEIVE]),
    )
    def add(
        self,
        prefix: list[int],
        tail: list[int],
        max_tokens: int,
        salt: str,
        ignore_eos: bool,
        slo_class: str,
        leg: Leg,
    ) -> None:
        params = SamplingParams(max_tokens=max(max_tokens, leg is not Leg.LOCAL), ignore_eos=ignore_eos)
        name, prompt = f"r{self.count}", (prefix + tail)[:39]
        epoch = int(leg is not Leg.LOCAL)
        new = Request(name, prompt, params, salt, slo_class, leg=leg, epoch=epoch, arrival_time=self.now)
        self.count += 1
        with suppress(Overloaded):
            self.it.add(new)
            self.live[new.id] = new
        if new.id not in self.live:
            assert self.it.config.admission == "reject"
            assert self.live, "an idle replica refuses nobody"
            assert self.it.get(new.id) is None

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.land_with(name)
        if name not in self.live:
            return
        request = self.live.pop(name)
        assert self.it.abort(name) is request
        if request.leg is Leg.SEND:
            self.being_read.add(request.owner)
        else:
            assert not self.it.pages.pages_of(request.owner)

    @rule(data=st.data(), pages=st.integers(0, 10))
    def deliver(self, data: st.DataObject, pages: int) -> None:
        """Something happens to a request between two replicas: more of it arrives, or all; it has been read."""
        if not self.it.held:
            return
        request = data.draw(st.sampled_from(sorted(self.it.held, key=lambda it: it.id)))
        if request.leg is Leg.SEND:
            self.it.shipped(request.id)
            self.being_read.add(request.owner)
            del self.live[request.id]
        elif (end := request.num_computed_tokens + pages * self.it.pages.page_size) < request.num_tokens:
            start = request.num_computed_tokens
            self.write(self.it.pages.pages_of(request.owner), start, request.token_ids[start:end])
            self.it.commit(request.id, end)
        else:
            start = request.num_computed_tokens
            self.write(self.it.pages.pages_of(request.owner), start, request.token_ids[start:])
            token = next_token(request.token_ids)
            is_full = request.num_tokens + 1 >= self.it.max_model_len
            if token == EOS or request.sampling.max_tokens == 1 or is_full:  # the sender would have ended it
                self.it.abort(request.id)
                del self.live[request.id]
            else:
                self.it.arrive(request.id, token, self.now)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def lose_the_sender(self, data: st.DataObject) -> None:
        arriving = sorted(name for name, it in self.live.items() if it.leg is Leg.RECEIVE and it.num_output_tokens == 0)
        if arriving:
            self.it.take_over(data.draw(st.sampled_from(arriving)), self.now)

    @rule()
    def writers_and_readers_stop(self) -> None:
        for owner in self.being_read:
            self.it.pages.release(owner)
        self.being_read.clear()
        for number in range(self.count):
            self.it.pages.end_quarantine(f"r{number}#1")

    @rule(steps=st.integers(1, 6), late_rows=st.sets(st.integers(0, 5), max_size=2))
    def run_steps(self, steps: int, late_rows: set[int]) -> None:
        self.late_rows = late_rows
        for _ in range(steps):
            self.one_step()

    def one_step(self) -> None:
        while len(self.flights) < self.most_flights and self.begin():
            pass
        if self.flights:
            self.land()
        self.it.grant(self.now)

    def begin(self) -> bool:
        if not self.flights:
            batch = self.it.schedule(self.now)
            assert len(self.it.running) <= self.it.config.max_num_seqs
            if batch or not (self.it.held or self.being_read or self.it.pages.counts().quarantined):
                assert bool(batch) == self.it.has_work, "there is work, so a step must do some"
            return self.launch(batch)
        if self.it.lacks_pages or self.late:
            return False
        before = self.flights[-1].batch
        with self.it.foreseen(before, self.now + COST.seconds(before.work)):
            return self.launch(self.it.schedule(self.now))

    def launch(self, batch: Batch) -> bool:
        assert batch.num_tokens <= self.it.config.max_num_batched_tokens
        assert len(batch.scheduled) <= self.it.config.max_num_seqs
        names = [part.request.id for part in batch.scheduled]
        assert len(names) == len(set(names))
        for number, part in enumerate(batch.scheduled):
            each, end = part.request, part.start + part.num_tokens
            assert part.start == each.num_computed_tokens
            assert part.samples == (end == each.num_tokens and each.sampling.max_tokens > 0)
            assert len(part.pages) * self.it.pages.page_size >= each.num_tokens
            assert end == each.num_tokens or end % self.it.pages.page_size == 0
            if number < batch.num_decodes:  # a partially prefilled request is never decodable
                assert each.num_output_tokens > 0
                assert part.num_tokens == 1
                assert part.samples
                assert each.num_output_tokens < each.sampling.max_tokens, "it is known to have ended"
                assert each.num_tokens < 40
            assert part.reason
            threshold = self.it.config.long_prefill_token_threshold
            assert not threshold or not self.it.config.enable_chunked_prefill or part.num_tokens <= threshold
        if not self.it.config.mixed_chunks:
            assert batch.num_decodes in (0, len(batch.scheduled)), "chunks and decodes take turns"
        if batch:
            ids = [part.request.token_ids[part.start : part.start + part.num_tokens] for part in batch.scheduled]
            self.flights.append(Flight(batch, ids, [list(part.pages) for part in batch.scheduled]))
        return bool(batch)

    def land(self) -> None:
        batch, token_ids, pages = self.flights.pop(0)
        self.now += COST.seconds(batch.work)
        for part, ids, its in zip(batch.scheduled, token_ids, pages, strict=True):
            self.write(its, part.start, [self.found[~token] if token < 0 else token for token in ids])
        reads = [self.read(its, part.start + part.num_tokens) for part, its in zip(batch.scheduled, pages, strict=True)]
        sampling = [(part, read) for part, read in zip(batch.scheduled, reads, strict=True) if part.samples]
        self.found = [next_token(read) for _, read in sampling]
        names = [part.request.id for part, _ in sampling]
        said = {
            name: SampledToken(token) for name, token in zip(names, self.found, strict=True) if name not in self.late
        }
        self.found = [EOS if row in self.late_rows else token for row, token in enumerate(self.found)]
        self.late = {name for row, name in enumerate(names) if self.flights and row in self.late_rows}
        self.late_rows = set()
        for delta in self.it.update(batch, said, self.now):
            if delta.finish_reason is not None:
                done = self.live.pop(delta.request_id)
                if done.leg is Leg.SEND:
                    self.being_read.add(done.owner)
                expected = reference_output(done.prompt_token_ids, done.sampling, 40)
                assert done.token_ids[done.num_prompt_tokens :] == expected

    def land_with(self, name: str) -> None:
        """Before something happens to a request, whatever computes it ends."""
        if any(part.request.id == name for flight in self.flights for part in flight.batch.scheduled):
            while self.flights:
                self.land()

    def write(self, pages: Sequence[int], start: int, token_ids: Sequence[int]) -> None:
        for at, token in enumerate(token_ids, start):
            self.memory[pages[at // self.it.pages.page_size], at % self.it.pages.page_size] = token

    def read(self, pages: Sequence[int], end: int) -> list[int]:
        size = self.it.pages.page_size
        return [self.memory[pages[at // size], at % size] for at in range(end)]

    @invariant()
    def pages_balance(self) -> None:
        if not hasattr(self, "it"):
            return
        counts = self.it.pages.counts()
        assert counts.free + counts.owned + counts.cached + counts.quarantined == counts.total
        owners = {each.owner for each in [*self.it.running, *self.it.held]} | self.being_read
        owners |= {part.request.owner for flight in self.flights for part in flight.batch.scheduled}
        held = {page for owner in owners for page in self.it.pages.pages_of(owner)}
        assert counts.owned == len(held)
        for each in self.it.waiting:
            assert not self.it.pages.pages_of(each.owner)
        for each in self.live.values():
            assert each.status in (Status.WAITING, Status.RUNNING, Status.HELD)
        assert all(each.leg is not Leg.LOCAL for each in self.it.held)

    def teardown(self) -> None:
        if not hasattr(self, "it"):
            return
        limit = 10_000
        while self.live:
            self.one_step()
            self.writers_and_readers_stop()
            for name, each in list(self.live.items()):
                if each.status is Status.HELD and each.leg is Leg.SEND:
                    self.it.shipped(name)
                    self.being_read.add(each.owner)
                    del self.live[name]
                elif each.leg is Leg.RECEIVE and each.num_output_tokens == 0:
                    self.it.take_over(name, self.now)
            limit -= 1
            assert limit, "not everything ends"
        while self.flights:
            self.land()
        self.writers_and_readers_stop()
        assert self.it.pages.counts().owned == self.it.pages.counts().quarantined == 0
        assert not self.it.has_work


class AnyHistoryAhead(AnyHistory):
    """The same with each step begun before the tokens of the one before it are known."""

    most_flights = 2


for machine in (AnyHistory, AnyHistoryAhead):
    machine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyHistory = AnyHistory.TestCase
TestAnyHistoryAhead = AnyHistoryAhead.TestCase


@pytest.mark.soak
@pytest.mark.parametrize("machine", [AnyHistory, AnyHistoryAhead])
def test_any_history_at_length(machine: type[AnyHistory]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=5000, stateful_step_count=100, deadline=None))
