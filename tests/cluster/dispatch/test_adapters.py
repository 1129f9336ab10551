"""Requests with adapters over engines in this process: on pairs, after a loss, and while adapters come and go."""

import asyncio
import shutil
from pathlib import Path

import pytest
from pydantic import ByteSize

from crossdock.cluster.dispatch.dispatcher import Dispatcher, ReplicaLost
from crossdock.router.fleet import RouterConfig
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.report.profile import Role
from crossdock.workers.schedule.request.submission import Adapter, InvalidField, SamplingParams, Submission
from tests.cluster.dispatch.in_process import InProcess, serving
from tests.waiting import until
from tests.workers.architectures import build
from tests.workers.lora_oracle import Tuned, tuned

PROMPT = [3 + i % 100 for i in range(30)]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Tuned]:
    folder = tmp_path_factory.mktemp("adapters")
    return [tuned(build("llama", {}), folder / f"{number}", number) for number in range(4)]


def replica(role: Role = "mixed", max_loras: int = 2) -> InProcess:
    memory = ByteSize(4 << 20)
    return InProcess(
        EngineConfig(kv_cache_memory=memory, enable_lora=True, max_loras=max_loras, admission="queue"), role
    )


def work(name: str, adapter: Adapter | None, num_tokens: int = 40) -> Submission:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, min_tokens=num_tokens)
    return Submission(name, PROMPT, params, adapter=adapter)


async def tokens(dispatcher: Dispatcher, submission: Submission) -> list[int]:
    return [token async for delta in dispatcher.generate(submission) for token in delta.token_ids]


async def test_stream_goes_on_with_its_adapter_after_its_replica_is_lost(adapters: list[Tuned]) -> None:
    first, second = replica(), replica()
    async with serving(Dispatcher("tiny"), first=first, second=second) as dispatcher:
        output: list[int] = []
        async for delta in dispatcher.generate(work("r", adapters[0].adapter)):
            output += delta.token_ids
            if len(output) == 15:
                victim = first if dispatcher.fleet.num_booked("first") else second
                victim.is_killed = True
        assert output == adapters[0].greedy(PROMPT, 40)
        assert "crossdock_ingress_placed_again_total 1.0" in dispatcher.metrics.text()


async def test_adapter_is_compared_with_the_model_of_the_replicas(tmp_path: Path, adapters: list[Tuned]) -> None:
    wider = tuned(build("llama", {"hidden_size": 96}), tmp_path / "wider", 1)
    dispatcher = Dispatcher("tiny")
    with pytest.raises(ReplicaLost):
        await dispatcher.check_adapter(adapters[0].adapter.path)
    async with serving(dispatcher, first=replica(), second=replica()):
        await dispatcher.check_adapter(adapters[0].adapter.path)
        with pytest.raises(ValueError, match="this model's has 64 and 48"):
            await dispatcher.check_adapter(wider.adapter.path)
        with pytest.raises(ValueError, match="has no file adapter_config"):
            await dispatcher.check_adapter(str(tmp_path / "gone"))


async def test_request_whose_adapter_fails_later_gets_the_reason_as_its_own_fault(tmp_path: Path) -> None:
    """The files were right when the adapter got its name. Requests beside it do not notice."""
    one, changed, gone = (tuned(build("llama", {}), tmp_path / f"{number}", number) for number in range(3))
    with (tmp_path / "1" / "adapter_model.safetensors").open("r+b") as weights:
        weights.seek(-4, 2)
        weights.write(b"abcd")
    shutil.rmtree(tmp_path / "2")
    async with serving(Dispatcher("tiny"), first=replica()) as dispatcher:
        beside = asyncio.create_task(tokens(dispatcher, work("beside", one.adapter)))
        for name, adapter in (("changed", changed.adapter), ("gone", gone.adapter)):
            with pytest.raises(InvalidField, match="cannot be loaded") as error:
                await tokens(dispatcher, work(name, adapter))
            assert error.value.field == "model"
        assert await beside == one.greedy(PROMPT, 40)


async def test_both_replicas_of_a_pair_have_the_adapter(adapters: list[Tuned]) -> None:
    prefill, decode = replica("prefill"), replica("decode")
    config = RouterConfig(shipping="always")
    async with serving(Dispatcher("tiny", config), prefill=prefill, decode=decode) as dispatcher:
        works = [work(f"{number}", one.adapter, 12) for number, one in enumerate(adapters * 2)]
        found = await asyncio.gather(*(tokens(dispatcher, each) for each in works))
        assert found == [one.greedy(PROMPT, 12) for one in adapters * 2]
        loaded = [len(each.engine_thread.engine.scheduler.table.loaded_adapters) for each in (prefill, decode)]
        assert loaded == [2, 2]
        await until(lambda: all(not each.engine_thread.engine.scheduler.table.requests() for each in (prefill, decode)))


async def test_pair_with_one_slot_each_does_not_wait_in_a_circle(adapters: list[Tuned]) -> None:
    """Prompts may come to the two replicas in unlike orders: the decode replica loads for those that are computed."""
    prefill, decode = replica("prefill", max_loras=1), replica("decode", max_loras=1)
    dispatcher = Dispatcher("tiny", RouterConfig(shipping="always"))
    async with serving(dispatcher, prefill=prefill, decode=decode):
        works = [work(f"{number}", one.adapter, 6) for number, one in enumerate(adapters * 4)]
        found = await asyncio.wait_for(asyncio.gather(*(tokens(dispatcher, each) for each in works)), 240)
        assert found == [one.greedy(PROMPT, 6) for one in adapters * 4]
        assert "crossdock_ingress_placed_again_total 0.0" in dispatcher.metrics.text(), "none was stuck"


async def test_adapters_that_come_and_go_all_the_time_change_no_token(adapters: list[Tuned]) -> None:
    """One slot and four adapters: each request but the first waits for a load. A replica dies in the middle."""
    first, second = replica(max_loras=1), replica(max_loras=1)
    async with serving(Dispatcher("tiny"), first=first, second=second) as dispatcher:
        chosen = [adapters[number] if number < 4 else None for number in [0, 1, 2, 3, 4] * 4]
        works = [work(f"{number}", one and one.adapter, 16) for number, one in enumerate(chosen)]
        running = [asyncio.create_task(tokens(dispatcher, each)) for each in works]
        await until(lambda: sum(task.done() for task in running) >= 5)
        first.is_killed = True
        found = await asyncio.gather(*running)
        wanted = {one: one.greedy(PROMPT, 16) for one in adapters}
        base = found[4]
        assert found == [base if one is None else wanted[one] for one in chosen]
