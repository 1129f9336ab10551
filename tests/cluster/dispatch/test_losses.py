"""Requests over engines in this process, while replicas die, hang and forget."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ByteSize

from crossdock.cluster.dispatch.dispatcher import Dispatcher, ReplicaLost, Timeouts
from crossdock.router.fleet import RouterConfig
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.report.advertise import Message
from crossdock.workers.schedule.drafts.speculative_config import SpeculativeConfig
from crossdock.workers.schedule.request.request import TokenLogprobs
from crossdock.workers.schedule.request.submission import SamplingParams, Submission
from tests.cluster.dispatch.in_process import IN_TURN, Forgetful, Hung, InProcess, ready, serving, tokens
from tests.waiting import until
from tests.workers.architectures import build
from tests.workers.draft.eagle_reference import write_head
from tests.workers.draft.noted_heads import head_config, noting


async def test_request_of_dead_replica_goes_on_elsewhere_with_the_same_tokens() -> None:
    """None comes twice and none is changed, sampled ones too."""
    first, second = InProcess(), InProcess()
    async with serving(Dispatcher("tiny"), first=first) as dispatcher:
        params = SamplingParams(max_tokens=200, temperature=0.9, seed=5, ignore_eos=True, logprobs=0)
        wanted = [t async for d in dispatcher.generate(Submission("alone", [7] * 30, params)) for t in d.token_ids]
        dispatcher.join("second", second, second.profile)
        output: list[int] = []
        async for delta in dispatcher.generate(Submission("running", [7] * 30, params)):
            assert delta.first == len(output) or not delta.token_ids
            assert len(delta.logprobs or ()) == len(delta.token_ids)
            output += delta.token_ids
            if len(output) == 50:
                victim = first if dispatcher.fleet.num_booked("first") else second
                victim.is_killed = True
        assert output == wanted
        dispatcher.leave("first" if victim is first else "second")
        assert len(await tokens(dispatcher, "next")) == 20
        assert "crossdock_ingress_placed_again_total 1.0" in dispatcher.metrics.text()


async def test_running_request_waits_for_a_replica_of_its_own_weights() -> None:
    """The last one is killed in mid-stream, while another format's is up. A new one goes on, token for token."""
    replicas = {name: InProcess() for name in ("lost", "other", "new")}
    for name, replica in replicas.items():
        replica.profile = replica.profile.model_copy(update={"weights": "fp8" if name == "other" else "bf16"})
    async with serving(Dispatcher("tiny"), lost=replicas["lost"]) as dispatcher:
        wanted = await tokens(dispatcher, "alone", 100)
        output: list[int] = []
        params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
        async for delta in dispatcher.generate(Submission("r", [3 + i % 100 for i in range(30)], params)):
            output += delta.token_ids
            if len(output) == 50:
                dispatcher.join("other", replicas["other"], replicas["other"].profile)
                await ready(dispatcher, 2)
                replicas["lost"].is_killed = True
                await until(lambda: len(dispatcher.fleet) == 1)
                dispatcher.join("new", replicas["new"], replicas["new"].profile)
            elif len(output) > 50 and not delta.finish_reason:
                assert dispatcher.fleet.num_booked("other") == 0
        assert output == wanted


async def test_bad_words_and_listed_tokens_are_the_same_on_a_pair_and_after_a_loss() -> None:
    """The replica that goes on knows the output so far, in which a word may have begun."""
    first, prefill, decode = InProcess(), InProcess(role="prefill"), InProcess(role="decode")
    async with serving(Dispatcher("tiny", RouterConfig(shipping="always")), first=first) as dispatcher:

        async def output(params: SamplingParams, victim: InProcess | None = None) -> list[TokenLogprobs]:
            logprobs: list[TokenLogprobs] = []
            async for delta in dispatcher.generate(Submission("a", [7] * 30, params)):
                logprobs += delta.logprobs or ()
                if victim is not None and len(logprobs) >= 50:
                    victim.is_killed = True
            return logprobs

        free = SamplingParams(
            max_tokens=150, temperature=0.9, seed=5, ignore_eos=True, logprobs=0, logprob_token_ids=(9, 4)
        )
        ids = [one.token_id for one in await output(free)]
        words = ((ids[20],), (ids[54], ids[55]), (ids[98], ids[99], ids[100]))
        constrained = replace(free, bad_words=words)
        wanted = await output(constrained)
        found = [one.token_id for one in wanted]
        assert found != ids
        assert all(tuple(found[i : i + len(word)]) != word for word in words for i in range(150))
        assert all([token for token, _ in one.top] == [9, 4] for one in wanted)
        dispatcher.join("prefill", prefill, prefill.profile)
        dispatcher.join("decode", decode, decode.profile)
        await ready(dispatcher, 3)
        dispatcher.leave("first")
        again = await output(constrained)
        assert [one.token_id for one in again] == found, "on a pair"
        dispatcher.join("first", first, first.profile)
        await ready(dispatcher, 3)
        again = await output(constrained, decode)
        assert [one.token_id for one in again] == found, "after a loss"
        logprobs = [[logprob for _, logprob in one.top] for one in again]
        assert logprobs == [pytest.approx([logprob for _, logprob in one.top], abs=1e-3) for one in wanted]
        assert "crossdock_ingress_placed_again_total 1.0" in dispatcher.metrics.text()


async def test_tokens_with_a_head_in_pools_are_those_without_drafts_after_a_loss_too(tmp_path: Path) -> None:
    """The decode replica is killed in mid-stream, and a mixed one goes on. Each drafts from its first decode on."""
    plain = InProcess()
    config = EngineConfig(
        kv_cache_memory=ByteSize(4 << 20),
        admission="queue",
        speculative_config=SpeculativeConfig.model_validate(head_config(write_head(tmp_path, build("llama", {})))),
    )
    prefill, decode, other = InProcess(config, "prefill"), InProcess(config, "decode"), InProcess(config)
    async with serving(Dispatcher("tiny", RouterConfig(shipping="always")), plain=plain) as dispatcher:
        wanted = await tokens(dispatcher, "r", 150)
        notes = {
            each: noting(each.engine_thread.engine, {"r": wanted}, num_prompt={"r": 30}) for each in (decode, other)
        }
        dispatcher.join("prefill", prefill, prefill.profile)
        dispatcher.join("decode", decode, decode.profile)
        await ready(dispatcher, 3)
        dispatcher.leave("plain")
        output: list[int] = []
        params = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
        async for delta in dispatcher.generate(Submission("r", [3 + i % 100 for i in range(30)], params)):
            assert delta.first == len(output) or not delta.token_ids
            output += delta.token_ids
            if len(output) >= 50 and not decode.is_killed:
                dispatcher.join("other", other, other.profile)
                await ready(dispatcher, 3)
                decode.is_killed = True
        assert output == wanted
        assert "crossdock_ingress_placed_again_total 1.0" in dispatcher.metrics.text()
    for each, noted in notes.items():
        verification = each.engine_thread.engine.scheduler.verification
        assert verification is not None
        assert sum(verification.totals.num_accepted_at) > 10
        texts = [text for text, _ in noted.notes]
        assert all(text == [*[3 + i % 100 for i in range(30)], *wanted][: len(text)] for text in texts)
    assert len(notes[decode].notes[0][0]) == 31, "the prompt and its first token"


class Withholding(InProcess):
    """A prefill replica whose tokens do not come before `release`; when it is killed they never come."""

    def __init__(self) -> None:
        super().__init__(role="prefill")
        self.release = asyncio.Event()

    async def messages(self) -> AsyncIterator[Message]:
        async for message in super().messages():
            if any(delta.token_ids for delta in message.deltas):
                await self.release.wait()
                if self.is_killed:
                    raise ConnectionError("killed")
            yield message


@pytest.mark.parametrize("is_killed", [False, True])
async def test_first_token_that_comes_late_or_never_changes_no_output(is_killed: bool) -> None:
    """Prefill has shipped all, decode streams, and the first token is still on its way to the ingress, or is lost."""
    prefill, decode = Withholding(), InProcess(role="decode")
    async with serving(Dispatcher("tiny", RouterConfig(shipping="always")), d=decode) as dispatcher:
        wanted = await tokens(dispatcher, "alone")
        dispatcher.join("p", prefill, prefill.profile)
        await ready(dispatcher, 2)
        asking = asyncio.create_task(tokens(dispatcher, "r"))

        async def is_decoding() -> bool:
            return any(one["num_output_tokens"] >= 10 for one in await decode.engine_thread.live_requests(None))

        await until(is_decoding)
        prefill.is_killed = is_killed
        prefill.release.set()
        assert await asking == wanted
        assert f"crossdock_ingress_placed_again_total {float(is_killed)}" in dispatcher.metrics.text()


async def test_replica_that_does_not_take_a_request_leaves_it_to_another() -> None:
    class Broken(InProcess):
        async def submit(self, submission: Submission) -> int:
            raise ConnectionError("it has just died")

    async with serving(Dispatcher("tiny", IN_TURN), a=Broken(), b=InProcess()) as dispatcher:
        for name in ("one", "another"):
            assert len(await tokens(dispatcher, name)) == 20
        dispatcher.leave("b")
        with pytest.raises(ReplicaLost, match="a did not take the request"):
            await tokens(dispatcher, "no other replica")


@pytest.mark.parametrize("kind", [Forgetful, Hung])
async def test_request_of_silent_replica_is_placed_again(kind: type[InProcess]) -> None:
    async with serving(
        Dispatcher("tiny", IN_TURN, timeouts=Timeouts(patience_s=0.2, stuck_s=0.3)), a=kind(), b=InProcess()
    ) as dispatcher:
        outputs = [await asyncio.wait_for(tokens(dispatcher, f"{number}"), 240) for number in range(4)]
        assert all(output == outputs[0] for output in outputs)
        assert "crossdock_ingress_placed_again_total 0.0" not in dispatcher.metrics.text()
        assert not dispatcher.deadlines


async def test_every_request_has_a_deadline_while_replicas_come_and_go() -> None:
    """Replicas come, die, are drained, hang and forget while requests keep coming: each request in flight has a
    deadline soon, every one ends, and with the tokens it ends with where no replica fails."""
    rng = random.Random(5)
    timeouts = Timeouts(patience_s=0.3, stuck_s=1.0, rejoin_s=0.2)

    async def fail_or_heal(dispatcher: Dispatcher, up: dict[str, InProcess], name: str) -> None:
        """Something happens; two replicas stay that can serve."""
        sound = [each for each, replica in up.items() if type(replica) is InProcess and not replica.is_killed]
        event = rng.choice(["die", "drain", "hang", "forget"])
        if event in ("hang", "forget"):
            up[name] = Hung() if event == "hang" else Forgetful()
            dispatcher.join(name, up[name], up[name].profile)
        elif len(sound) > 2:
            victim = rng.choice(sound)
            if event == "die":
                up[victim].is_killed = True
            dispatcher.leave(victim)
            del up[victim]
        else:
            up[name] = InProcess()
            dispatcher.join(name, up[name], up[name].profile)
        for bad in [each for each, replica in up.items() if type(replica) is not InProcess][:-1]:
            dispatcher.leave(bad)
            del up[bad]

    dispatcher = Dispatcher("tiny", timeouts=timeouts, most_placements=99)  # chance may hit one request every time
    up = {name: InProcess() for name in ("first", "second")}
    in_flight: set[str] = set()
    num_ended = 0

    async def client(number: int) -> None:
        nonlocal num_ended
        for turn in range(8):
            name = f"{number} {turn}"
            in_flight.add(name)
            try:
                assert await tokens(dispatcher, name, 40) == wanted, name
            finally:
                in_flight.discard(name)
            num_ended += 1

    async with serving(dispatcher, **up):
        wanted = await tokens(dispatcher, "wanted", 40)
        clients = [asyncio.create_task(client(number)) for number in range(6)]
        num_events = 0
        while not all(task.done() for task in clients):
            await asyncio.sleep(0.02)
            now, deadlines = dispatcher.clock.now(), dispatcher.deadlines
            for name in in_flight:
                assert deadlines[name] - now < 10.5, name  # armed, and not for later than a silent replica's
                assert deadlines[name] > now - 10.0, name  # and not over without a consequence
            if num_ended > 3 * num_events:  # as often for each request on a slow machine as on a fast one
                num_events += 1
                await fail_or_heal(dispatcher, up, f"r{num_events}")
        await asyncio.gather(*clients)
        assert not dispatcher.deadlines
        assert num_events > 10


async def test_death_of_the_last_replica_fails_its_requests() -> None:
    client = InProcess()
    async with serving(Dispatcher("tiny", timeouts=Timeouts(answer_s=0.1)), one=client) as dispatcher:
        running = asyncio.create_task(tokens(dispatcher, "running", 200))
        await asyncio.sleep(0.02)
        client.is_killed = True
        with pytest.raises(ReplicaLost, match="no replica is up"):
            await running
        dispatcher.leave("one")
