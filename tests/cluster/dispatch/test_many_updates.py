"""A hundred updates of weights under load, with replicas that die: in the soak."""

import asyncio
from itertools import count
from pathlib import Path

import pytest

from crossdock.cluster.dispatch.dispatcher import Dispatcher, ReplicaLost
from crossdock.cluster.dispatch.rollouts import Rollouts
from crossdock.workers.schedule.request.request import FinishReason
from tests.cluster.dispatch.in_process import InProcess, serving
from tests.cluster.dispatch.test_rollouts import Stream
from tests.cluster.dispatch.test_weights import greedy_of
from tests.waiting import until
from tests.workers.model.test_new_weights import saved

pytestmark = pytest.mark.soak
LENGTH = 30  # tokens of an answer


async def test_a_hundred_updates_under_load_with_deaths_mix_no_answer(tmp_path: Path) -> None:
    """Every fifth update a replica dies and another takes its place, with the weights of the start."""
    folders = [saved(tmp_path / f"{seed}", seed) for seed in (1, 2, 3)]
    wanted = [greedy_of(folder, LENGTH) for folder in folders]
    replicas = {"r0": InProcess(), "r1": InProcess()}
    is_over, checked, unavailable = asyncio.Event(), list[str](), list[str]()
    names = count()

    async with serving(Dispatcher("tiny"), **replicas) as dispatcher:
        rollouts = Rollouts(dispatcher)
        await rollouts.start()
        await rollouts.update(str(folders[0]), "", "wait")

        async def load() -> None:
            while not is_over.is_set():
                stream = Stream(dispatcher, f"{next(names)}", LENGTH)
                try:
                    await asyncio.wait_for(stream.task, 240)
                except ReplicaLost as error:  # the replica that is up to date died, and the other one catches up
                    unavailable.append(str(error))
                    await asyncio.sleep(0.05)
                    continue
                made_by = {delta.weights for delta in stream.deltas if delta.token_ids}
                assert len(made_by) <= 1, "an answer mixes versions"
                if stream.end is not FinishReason.ABORT:
                    name = made_by.pop()
                    assert stream.output == wanted[(int(name) - 1) % 3], f"wrong tokens with weights {name}"
                    checked.append(name)

        loading = [asyncio.create_task(load()) for _ in range(8)]
        for number in range(1, 101):
            if number % 5 == 0:
                name, victim = next(iter(replicas.items()))
                del replicas[name]
                victim.is_killed = True
                dispatcher.leave(name)
                new = replicas[f"r{number}"] = InProcess()
                dispatcher.join(f"r{number}", new, new.profile)
            weights = await rollouts.update(str(folders[number % 3]), "", "abort" if number % 7 == 0 else "wait")
            assert weights.number == number + 1
            enough = len(checked) + 8
            await until(lambda enough=enough: len(checked) > enough)  # type: ignore[misc]
        is_over.set()
        await asyncio.gather(*loading)
        await until(lambda: not dispatcher.fleet.table.outdated)
        rollouts.stop()
        assert len(set(checked)) > 90
        for replica in replicas.values():
            await until(lambda replica=replica: not replica.engine_thread.engine.scheduler.table.requests())  # type: ignore[misc]
            assert await replica.owned_pages() == 0
        assert len(unavailable) < len(checked) / 5
