"""Pictures encoded by one replica for another: tokens equal transformers', whatever happens to the one that encodes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ByteSize

from crossdock.kvtransfer.calls import CancelExpectCall, DockCall, GrantCall
from crossdock.workers.model.encoder_model import drop_decoder, wrap_encoder
from crossdock.workers.model.load import wrap_module
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.serving.observed import ObservedEngine
from crossdock.workers.schedule.pictures.encoding import ON_THEIR_WAY, EncoderTotals
from crossdock.workers.schedule.pictures.encoding_leg import encoding_leg
from crossdock.workers.schedule.submission import Leg, SamplingParams, Submission
from tests.sweeps import rest_in_soak, shared_out
from tests.waiting import until
from tests.workers.multimodal import (
    FAMILIES,
    NO_PLACEHOLDERS,
    PicturePrompt,
    build_multimodal,
    continuation,
    paged_multimodal,
    picture,
)
from tests.workers.replica.driven import hold
from tests.workers.replica.engines import engine_on
from tests.workers.replica.sides import NEEDS_NIXL, Side, ship

NUM_TOKENS = 5
PAGE_SIZE = 8


def submission(name: str, prompt: PicturePrompt, **fields: Any) -> Submission:
    sampling = SamplingParams(NUM_TOKENS, temperature=0.0, ignore_eos=True, logit_bias=NO_PLACEHOLDERS)
    return Submission(name, prompt.token_ids, sampling, items=prompt.items, request_id=name, **fields)


def engine_side(family: str, transport: str, deadline_s: float = 5.0, **config: Any) -> Side:
    """Return a replica that takes rows, in chunks of 24 tokens."""
    settings = {"max_num_batched_tokens": 24, "max_num_seqs": 8, "page_size": PAGE_SIZE} | config
    wanted = EngineConfig.model_validate({"kv_cache_memory": ByteSize(4 << 20)} | settings)
    engine = new_engine(paged_multimodal(family, takes_rows=True), wanted)
    return Side(transport, engine=engine, deadline_s=deadline_s)


def encoder_side(family: str, transport: str, deadline_s: float = 5.0) -> Side:
    """Return a replica that encodes, in chunks of eight rows."""
    module = build_multimodal(family)
    drop_decoder(module)
    config = EngineConfig(
        max_num_batched_tokens=16, max_num_seqs=8, page_size=PAGE_SIZE, kv_cache_memory=ByteSize(4 << 20)
    )
    return Side(transport, engine=new_engine(wrap_encoder(module), config), deadline_s=deadline_s)


class Trio:
    """A replica that encodes, one that computes prompts, and one that decodes: without processes and router."""

    def __init__(self, family: str, transport: str, deadline_s: float = 5.0, **config: Any) -> None:
        self.family = family
        self.encoder = encoder_side(family, transport, deadline_s)
        self.first, self.decode = (engine_side(family, transport, deadline_s, **config) for _ in range(2))

    @property
    def rows_peer(self) -> bytes:
        return self.first.landing.dock.blob

    async def encode(self, work: Submission) -> None:
        """Submit the encoding leg."""
        await self.encoder.thread.submit("test", replace(encoding_leg(work, PAGE_SIZE), peer=self.rows_peer))

    def here(self, work: Submission) -> Submission:
        """Return the leg of the first replica, which makes the tokens too."""
        return replace(work, encoder=self.encoder.blob)

    async def generate(self, work: Submission, *, is_decoded_elsewhere: bool = False) -> list[int]:
        """Return the tokens of a request whose pictures are encoded elsewhere."""
        encoding = asyncio.create_task(self.encode(work))
        if is_decoded_elsewhere:
            tokens = await ship(self.first, self.decode, self.here(work))
        else:
            tokens = await self.first.generate(self.here(work))
        await encoding
        return tokens

    def totals(self, side: Side) -> EncoderTotals:
        return side.engine.scheduler.encoding.totals

    @property
    def num_encoded(self) -> list[int]:
        """Items encoded by the encode replica, the first and the decode replica."""
        return [self.totals(side).num_encoded for side in (self.encoder, self.first, self.decode)]

    @property
    def lost(self) -> dict[str, int]:
        return dict(self.first.landing.rows.lost)


@asynccontextmanager
async def three(family: str, transport: str, **settings: Any) -> AsyncIterator[Trio]:
    """Yield three replicas, and check in the end that nothing is left of any transfer."""
    trio = Trio(family, transport, **settings)
    sides = trio.encoder, trio.first, trio.decode
    try:
        yield trio
        for side in sides:
            assert await side.is_clean()
    finally:
        for side in sides:
            await side.close()


def prompts(family: str) -> dict[str, PicturePrompt]:
    one, other, last = picture(family, 1, (2, 3)), picture(family, 2, (2, 3)), picture(family, 3)
    return {
        "one": PicturePrompt.of(5, one, 9, seed=1),
        "longer": PicturePrompt.of(5, one, 9, last, 4, seed=1),
        "other": PicturePrompt.of(5, other, 9, seed=1),
        "first": PicturePrompt.of(other, 3, one, last, 2, seed=2),
        "twice": PicturePrompt.of(9, last, 3, last, seed=4),
        "text": PicturePrompt.of(30, seed=3),
    }


@pytest.mark.parametrize(
    ("transport", "is_decoded_elsewhere"),
    [("tcp", True), pytest.param("nixl", False, marks=NEEDS_NIXL)],
    ids=["pair", "mixed"],
)
async def test_tokens_of_pictures_encoded_elsewhere_equal_transformers(
    transport: str, is_decoded_elsewhere: bool
) -> None:
    """One after the other, then all at once: only the encode replica encodes."""
    family = "qwen3_vl"
    module, works = build_multimodal(family), prompts(family)
    expected = {name: continuation(module, prompt, NUM_TOKENS) for name, prompt in works.items()}
    async with three(family, transport) as trio:
        for name, prompt in works.items():
            work = submission(name, prompt)
            if not prompt.items:
                assert await trio.first.generate(work) == expected[name]
                continue
            found = await trio.generate(work, is_decoded_elsewhere=is_decoded_elsewhere)
            assert found == expected[name]
        assert trio.num_encoded == [3, 0, 0]
        await trio.first.on_engine(trio.first.engine.pages.stock.clear_cache)
        again = [submission(f"{name} again", prompt) for name, prompt in works.items() if prompt.items]
        found_again = await asyncio.gather(
            *(trio.generate(work, is_decoded_elsewhere=is_decoded_elsewhere) for work in again)
        )
        assert found_again == [expected[work.id.removesuffix(" again")] for work in again]
        assert trio.num_encoded[1:] == [0, 0]
        assert not trio.lost


@pytest.mark.parametrize("family", rest_in_soak(FAMILIES, "smolvlm"))
async def test_rows_of_all_families_fit_their_prompts(family: str) -> None:
    module, work = build_multimodal(family), prompts(family)["first"]

    async with three(family, "tcp", async_scheduling=True) as trio:
        assert await trio.generate(submission("a", work)) == continuation(module, work, NUM_TOKENS)
        assert trio.num_encoded == [3, 0, 0]
        assert trio.totals(trio.first).num_copied == 3


async def test_rows_are_not_sent_for_pictures_that_the_prefix_cache_has() -> None:
    works = prompts("qwen2_vl")

    async with three("qwen2_vl", "tcp") as trio:
        await trio.generate(submission("a", works["one"]))
        before = trio.totals(trio.first).num_copied
        await trio.generate(submission("b", works["one"]))
        await trio.generate(submission("c", works["longer"]))
        assert trio.totals(trio.first).num_copied - before == 1, "the last picture of the longer prompt alone"
        assert trio.num_encoded[1] == 0


async def test_wait_for_a_picture_shows_in_the_timeline() -> None:
    prompt = PicturePrompt.of(20, picture("qwen2_vl", 1, (3, 3)), 9, seed=1)

    async with three("qwen2_vl", "tcp") as trio:
        work = submission("a", prompt)
        gate = await hold(trio.encoder.thread)
        encoding = asyncio.create_task(trio.encode(work))
        await trio.first.thread.submit("test", trio.here(work))
        while await trio.first.computed("a") < 16:
            await asyncio.sleep(0.001)
        assert await trio.first.thread.progress("a", 0) == ["running", 16, len(prompt.token_ids), 0, 0, 16]
        gate.set()
        await encoding
        await trio.first.rest("a")
        assert await trio.first.is_clean()  # the transfer's last message may come after the last token
        (timeline,) = await trio.first.thread.find_timelines("a", None)
        assert ON_THEIR_WAY in [chunk["limit"] for chunk in timeline["chunks"]]
        transfers = [(each["direction"], each["outcome"]) for each in timeline["transfers"]]
        assert transfers in ([("embeddings", "arrived")], [])  # [], if the last page, without rows, came too late
        text = await trio.first.thread.metrics_text()
        assert "crossdock_items_received_total 1.0" in text
        counted = 'crossdock_transfers_total{direction="embeddings",outcome="arrived"} 1.0' in text
        assert counted == bool(transfers)
        assert 'crossdock_items_lost_total{reason="failed"} 0.0' in text


@pytest.mark.parametrize("takes_rows", [False, True])
def test_engine_of_a_decoder_and_an_encoder_loaded_to_take_rows_has_landing_pages(takes_rows: bool) -> None:
    engine = engine_on(paged_multimodal("llava", takes_rows=takes_rows), num_pages=100)
    assert bool(engine.scheduler.encoding.arriving.num_pages) is takes_rows


_OF_TOKENS = (  # metrics of requests and their tokens, which the other replicas count
    "crossdock_prompt_tokens",
    "crossdock_cached_tokens",
    "crossdock_output_tokens",
    "crossdock_chunk_",
    "crossdock_step_tokens",
    "crossdock_step_prompt_tokens",
    "crossdock_prefill_",
    "crossdock_time_to_first_token",
    "crossdock_slo_",
    "crossdock_request_phase",
    "crossdock_requests_total",
    "crossdock_uncached_tokens_waiting",
    "crossdock_cancelled_kv_bytes",
)


def leg_of(name: str, seed: int) -> Submission:
    """Return the encoding leg of a prompt with one picture."""
    return encoding_leg(submission(name, PicturePrompt.of(picture("qwen3_vl", seed))), PAGE_SIZE)


async def test_rows_count_as_rows_and_under_our_names_alone() -> None:
    """Sums over all replicas would count each picture twice: as rows, and as placeholders."""
    async with three("qwen3_vl", "tcp") as trio:
        side, work = trio.encoder, leg_of("a", 1)
        await side.thread.submit("test", replace(work, peer=trio.rows_peer))
        assert (await side.next("a")).token_ids == [0]
        await side.thread.abort([(work.id, work.epoch)])
        text = await side.thread.metrics_text("model")
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#"]
        counted = {name: float(value) for name, value in lines}
        assert counted["crossdock_encoder_rows_total"] == work.items[0].num_rows
        assert counted["crossdock_cached_rows_total"] == 0
        of_tokens = {name: value for name, value in counted.items() if name.startswith(_OF_TOKENS)}
        assert not any(value for name, value in of_tokens.items() if "_created" not in name)
        assert "vllm:" not in text
        again = leg_of("b", 1)
        await side.thread.submit("test", replace(again, peer=trio.rows_peer))
        await side.next("b")
        await side.thread.abort([(again.id, again.epoch)])
        found = side.thread.metrics.registry.get_sample_value("crossdock_cached_rows_total")
        assert found == len(again.prompt_token_ids) - 1
        whole = ObservedEngine(engine_on(wrap_module(build_multimodal("qwen3_vl"))))
        assert "vllm:prompt_tokens_total" in await whole.metrics_text("model")


async def test_role_of_an_encode_replica_cannot_be_changed() -> None:
    async with three("qwen3_vl", "tcp") as trio:
        with pytest.raises(ValueError, match="to or from encode"):
            await trio.encoder.thread.assign_role("prefill")
        with pytest.raises(ValueError, match="to or from encode"):
            await trio.decode.thread.assign_role("encode")
        await trio.decode.thread.assign_role("prefill")


# -- losses of the encode replica ------------------------------------------------------------------------------------

LONG = PicturePrompt.of(5, picture("qwen2_vl", 1, (4, 4)), 40, picture("qwen2_vl", 2, (4, 5)), 9, seed=1)


def arrived(trio: Trio, work: Submission) -> int:
    return trio.first.landing.rows.num_arrived(f"{work.id}#{work.epoch}")


async def until_rows_arrive(trio: Trio, work: Submission, least: int = 1) -> None:
    """Wait until so many rows of a request have arrived. On a busy machine it may end before that is seen."""
    await until(lambda: arrived(trio, work) >= least or trio.first.engine.scheduler.table.get(work.id) is None)


async def before_the_leg(trio: Trio, work: Submission) -> None:
    """The encode replica never gets its leg."""


async def before_the_offer(trio: Trio, work: Submission) -> None:
    gate = await hold(trio.encoder.thread)
    encoding = asyncio.create_task(trio.encode(work))
    await until(lambda: trio.encoder.thread.num_posted > 0)
    asyncio.get_running_loop().call_later(0.3, gate.set)
    encoding.add_done_callback(lambda done: done.exception())


async def while_rows_arrive(trio: Trio, work: Submission) -> None:
    await trio.encode(work)
    await until_rows_arrive(trio, work)


async def after_the_first_picture(trio: Trio, work: Submission) -> None:
    await trio.encode(work)
    await until_rows_arrive(trio, work, 16)


MOMENTS = [before_the_leg, before_the_offer, while_rows_arrive, after_the_first_picture]


async def dead(trio: Trio, work: Submission) -> None:
    await trio.first.thread.peer_dead(trio.encoder.blob)


async def aborted(trio: Trio, work: Submission) -> None:
    await trio.encoder.thread.abort([(work.id, work.epoch)])


@pytest.mark.parametrize(("moment", "loss"), shared_out(2, MOMENTS, (dead, aborted)))
async def test_request_whose_encoder_is_lost_encodes_here(
    moment: Callable[[Trio, Submission], Awaitable[None]],
    loss: Callable[[Trio, Submission], Awaitable[None]],
) -> None:
    """The request ends with the same tokens, and another request of the same replica with pictures goes on."""
    module, other = build_multimodal("qwen2_vl"), prompts("qwen2_vl")["other"]

    async with three("qwen2_vl", "tcp", deadline_s=1.5) as trio:
        work = submission("a", LONG)
        await trio.first.thread.submit("test", trio.here(work))
        await moment(trio, work)
        await loss(trio, work)
        local = asyncio.create_task(trio.first.generate(submission("b", other)))
        assert await trio.first.rest("a") == continuation(module, LONG, NUM_TOKENS)
        assert await local == continuation(module, other, NUM_TOKENS)
        assert trio.num_encoded[1] + trio.totals(trio.first).num_copied == 3
        await trio.encoder.thread.abort([("a", 0)])


async def test_encoder_that_falls_silent_costs_a_deadline_and_no_token() -> None:
    module = build_multimodal("qwen2_vl")

    async with three("qwen2_vl", "tcp", deadline_s=1.0) as trio:
        work = submission("a", LONG)
        await trio.first.thread.submit("test", trio.here(work))
        await trio.encode(work)
        await until_rows_arrive(trio, work)
        gate = await hold(trio.encoder.thread)
        assert await trio.first.rest("a") == continuation(module, LONG, NUM_TOKENS)
        gate.set()


async def test_address_of_another_pool_is_ignored_and_the_request_encodes_here() -> None:
    module, prompt = build_multimodal("qwen2_vl"), prompts("qwen2_vl")["one"]

    async with three("qwen2_vl", "tcp") as trio:
        for name, address in (("a", trio.decode.blob), ("b", b"nonsense")):
            work = replace(submission(name, prompt), encoder=address)
            assert await trio.first.generate(work) == continuation(module, prompt, NUM_TOKENS)
        assert trio.num_encoded == [0, 1, 0]


async def test_dock_that_fails_at_the_call_of_one_request_costs_others_no_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first grant fails, and so does the first call that cancels."""
    family, failing = "qwen2_vl", list[type[DockCall]]()
    module, works = build_multimodal(family), [prompts(family)["one"], prompts(family)["other"], LONG]

    expected = [continuation(module, prompt, NUM_TOKENS) for prompt in works]
    async with three(family, "tcp", enable_prefix_caching=False) as trio:
        dock = trio.first.landing.dock

        call = dock.call

        def fail_once(made: DockCall) -> None:
            if failing and isinstance(made, failing[0]):
                failing.pop(0)
                raise ValueError(f"no {made}")
            call(made)

        monkeypatch.setattr(dock, "call", fail_once)
        failing.append(GrantCall)
        named = [submission(f"{number}", prompt) for number, prompt in enumerate(works)]
        assert await asyncio.gather(*(trio.generate(work) for work in named)) == expected
        assert trio.lost["failed"] in (1, 2)  # pictures of one request
        assert not failing
        failing.append(CancelExpectCall)
        unsent = [trio.here(submission(name, LONG)) for name in ("a", "b")]
        for work in unsent:
            await trio.first.thread.submit("test", work)
        await trio.first.thread.abort([(work.id, work.epoch) for work in unsent])
        assert await trio.generate(submission("c", works[0])) == expected[0]
        dock.call(CancelExpectCall("a", 0))  # the call that failed: else the dock expects these rows for ever
    assert not failing


async def test_lost_prefill_replica_leaves_the_pictures_to_the_decode_replica() -> None:
    """The decode replica of a pair expects no rows: it encodes from the tensors."""
    module = build_multimodal("qwen2_vl")

    async with three("qwen2_vl", "tcp") as trio:
        work = trio.here(submission("a", LONG))
        await trio.decode.thread.submit("test", replace(work, leg=Leg.RECEIVE, peer=trio.first.blob))
        await trio.decode.thread.peer_dead(trio.first.blob)
        assert await trio.decode.rest("a") == continuation(module, LONG, NUM_TOKENS)
        assert trio.num_encoded == [0, 0, 2]
