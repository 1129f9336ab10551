"""Pages of GPUs go and come back at another address, and other replicas ship pages there. No GPU is here."""

import asyncio
from pathlib import Path

import pytest

from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.weights.fingerprint import fingerprint
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.serving.controls import Controls
from crossdock.workers.schedule.request.submission import Submission
from tests.workers.architectures import build
from tests.workers.ranks import Ranks, saved
from tests.workers.replica.moving_memory import MovingMemory, follow_moving
from tests.workers.replica.sides import Side, closing, local, prompts, ship, submission
from tests.workers.worker_groups import SETTINGS, engine_of_ranks


@pytest.mark.parametrize("is_prefill_divided", [False, True], ids=["ranks decode", "ranks prefill"])
async def test_pages_are_shipped_to_where_they_are_after_a_sleep(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_prefill_divided: bool
) -> None:
    path = saved(build("llama", {}), tmp_path)
    MovingMemory(monkeypatch)
    spec = ModelSpec(str(path), dtype="float32", attention_backend="torch")
    with engine_of_ranks(ranks, path, 2, 1, follow_moving, attention_backend="torch") as engine:
        whole = Side("tcp", engine=new_engine(load_model(spec), EngineConfig(**SETTINGS)))
        divided = Side("tcp", engine=engine)
        sides = (divided, whole) if is_prefill_divided else (whole, divided)
        async with closing(*sides) as (prefill, decode):
            works = [submission(prompt) for prompt in prompts(4)]
            expected = await asyncio.gather(*(whole.generate(local(work)) for work in works))
            assert await shipped(prefill, decode, works) == expected
            first = {side: side.blob for side in sides}
            for level, part in ((1, "weights"), (2, "kv_cache")):
                for side in sides:
                    controls = Controls(side.thread, folder=path, checkpoint=fingerprint(path))
                    await controls.pause()
                    await controls.sleep(level)
                    await side.thread.peer_dead(first[side])  # a notice of any replica's end changes nothing now
                    assert len(await controls.wake_up([part])) == 1
                    assert await controls.wake_up([]) == []
                    await controls.resume()
                assert await shipped(prefill, decode, works) == expected
            assert all(side.blob != first[side] for side in sides)


async def shipped(prefill: Side, decode: Side, works: list[Submission]) -> list[list[int]]:
    """Return the tokens of requests that both compute, with no prefix at either side."""
    for side in (prefill, decode):
        await side.on_engine(side.engine.pages.block_pool.clear_cache)
    again = (submission(list(work.prompt_token_ids)) for work in works)
    return await asyncio.gather(*(ship(prefill, decode, work) for work in again))
