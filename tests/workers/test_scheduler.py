"""The scheduling rule: budget kept, pages balanced, everything ends, whatever happens in whatever order."""

import hashlib
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from crossdock.workers.pages import PagePool
from crossdock.workers.request import FinishReason, Request, SamplingParams, Status, TokenDelta
from crossdock.workers.scheduler import Batch, Sampled, Scheduler, SchedulerConfig

EOS = 0


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
    tokens = {p.request.id: Sampled(next_token(p.request.token_ids)) for p in batch.scheduled if p.samples}
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
    assert it.update(batch, {"a": Sampled(5)}, 0.0) == []
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
        for last in it.update(batch, {"a": Sampled(script[len(output)])}, 0.0):
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


# -- any history ---------------------------------------------------------------------------------------------------


class AnyHistory(RuleBasedStateMachine):
    """Add, step and abort in any order, on a pool small enough to preempt, with shared prefixes and salts."""

    @initialize(
        pages=st.integers(10, 30),
        budget=st.integers(12, 40),
        seqs=st.integers(1, 8),
        threshold=st.sampled_from([0, 4, 9]),
        caching=st.booleans(),
        chunked=st.booleans(),
    )
    def start(self, pages: int, budget: int, seqs: int, threshold: int, caching: bool, chunked: bool) -> None:
        self.it = scheduler(
            num_pages=pages,
            max_model_len=40,
            caching=caching,
            max_num_batched_tokens=budget if chunked else max(budget, 40),
            max_num_seqs=min(seqs, budget - 4),
            long_prefill_token_threshold=threshold,
            enable_chunked_prefill=chunked,
        )
        self.live: dict[str, Request] = {}
        self.count = 0

    @rule(
        prefix=st.sampled_from([[], [1] * 8, [1] * 8 + [2] * 8, [3] * 20]),
        tail=st.lists(st.integers(1, 49), min_size=1, max_size=19),
        max_tokens=st.integers(0, 25),
        salt=st.sampled_from(["", "tenant"]),
        ignore_eos=st.booleans(),
    )
    def add(self, prefix: list[int], tail: list[int], max_tokens: int, salt: str, ignore_eos: bool) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
        new = Request(f"r{self.count}", (prefix + tail)[:39], params, cache_salt=salt)
        self.count += 1
        self.it.add(new)
        self.live[new.id] = new

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        assert self.it.abort(name) is self.live.pop(name)
        assert not self.it.pages.pages_of(name)

    @rule(steps=st.integers(1, 6))
    def run_steps(self, steps: int) -> None:
        for _ in range(steps):
            self.one_step()

    def one_step(self) -> None:
        batch = self.it.schedule(0.0)
        assert batch.num_tokens <= self.it.config.max_num_batched_tokens
        assert len(self.it.running) <= self.it.config.max_num_seqs
        names = [part.request.id for part in batch.scheduled]
        assert len(names) == len(set(names))
        assert bool(batch) == bool(self.live), "there is work, so a step must do some"
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
            threshold = self.it.config.long_prefill_token_threshold
            assert not threshold or not self.it.config.enable_chunked_prefill or part.num_tokens <= threshold
        tokens = {p.request.id: Sampled(next_token(p.request.token_ids)) for p in batch.scheduled if p.samples}
        for delta in self.it.update(batch, tokens, 0.0):
            if delta.finish_reason is not None:
                done = self.live.pop(delta.request_id)
                expected = reference_output(done.prompt_token_ids, done.sampling, 40)
                assert done.token_ids[done.num_prompt_tokens :] == expected

    @invariant()
    def pages_balance(self) -> None:
        if not hasattr(self, "it"):
            return
        counts = self.it.pages.counts()
        assert counts.free + counts.owned + counts.cached + counts.quarantined == counts.total
        held = {page for each in self.it.running for page in self.it.pages.pages_of(each.id)}
        assert counts.owned == len(held)
        for each in self.it.waiting:
            assert not self.it.pages.pages_of(each.id)
        for each in self.live.values():
            assert each.status in (Status.WAITING, Status.RUNNING)

    def teardown(self) -> None:
        if not hasattr(self, "it"):
            return
        limit = 10_000
        while self.live:
            self.one_step()
            limit -= 1
            assert limit, "not everything ends"
        assert self.it.pages.counts().owned == 0
        assert not self.it.has_work


AnyHistory.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyHistory = AnyHistory.TestCase


@pytest.mark.soak
def test_any_history_at_length() -> None:
    run_state_machine_as_test(AnyHistory, settings=settings(max_examples=5000, stateful_step_count=100, deadline=None))
