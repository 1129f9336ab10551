"""A model with recurrent layers in a pair of replicas of several ranks each, and pairs of unlike ranks."""

import asyncio
import pickle
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crossdock.workers.model.load import load_model
from crossdock.workers.replica.config import ReplicaSpec
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.ranks.rank_loader import driver_of
from crossdock.workers.replica.ranks.worker_group import WorkerGroup
from crossdock.workers.replica.serving.follower import follow
from crossdock.workers.schedule.request.request import FinishReason
from crossdock.workers.schedule.request.submission import Leg, Submission
from tests.workers.architectures import SERVED, build
from tests.workers.ranks import Ranks, saved
from tests.workers.replica.engines import generated
from tests.workers.replica.sides import Side, closing, prompts, start, submission
from tests.workers.worker_groups import engine_of_ranks, spec_of

NUM_TOKENS = 20
SETTINGS: dict[str, Any] = {"page_size": 4, "max_num_batched_tokens": 48}
PREFILL = 2, 3  # the processes of the prefill worker group: its driver and its follower


def write(path: Path, content: object) -> None:
    """Write a file that `read` in another process finds whole."""
    path.with_suffix(".part").write_bytes(pickle.dumps(content))
    path.with_suffix(".part").rename(path)


def read(path: Path) -> Any:
    """Wait for a file of another process, and return its content."""
    end = time.monotonic() + 240
    while not path.exists():
        assert time.monotonic() < end, f"nothing has written {path}"
        time.sleep(0.01)
    return pickle.loads(path.read_bytes())


def prefill(spec: ReplicaSpec, folder: Path, works: Sequence[Submission]) -> list[list[int]]:
    """Drive the prefill worker group in a process of its own. Returns the first tokens of `works`."""
    lost: list[str] = []
    worker_group = WorkerGroup(spec, "127.0.0.1", lost.append)
    write(folder / "worker group", worker_group.address)

    async def main() -> list[list[int]]:
        side = Side("tcp", engine=new_engine(worker_group.load(), spec.engine, worker_group=worker_group))
        write(folder / "prefill", side.blob)
        peer = await asyncio.to_thread(read, folder / "decode")
        for work in works:
            await side.thread.submit("test", replace(work, leg=Leg.SEND, peer=peer))
        tokens = []
        for work in works:
            tokens.append(list((await side.next(work.id)).token_ids))
            assert (await side.next(work.id)).finish_reason is FinishReason.SHIPPED
        assert await side.is_clean()
        await side.close()
        return tokens

    try:
        return asyncio.run(main())
    finally:
        worker_group.close()


@pytest.mark.parametrize("division", [(2, 1), (1, 2)])
def test_states_shipped_between_like_ranks_give_the_tokens_of_transformers(
    ranks: Ranks, tmp_path: Path, division: tuple[int, int]
) -> None:
    module = build("qwen3_next", SERVED["qwen3_next"])
    path = saved(module, tmp_path / "model")
    works = [submission(prompt, NUM_TOKENS, min_tokens=NUM_TOKENS) for prompt in prompts(5)]
    spec = spec_of(path, *division, **SETTINGS)
    follower = next(rank for rank in range(2) if rank != driver_of(spec))
    ranks.start(PREFILL[0], prefill, spec, tmp_path, works)
    ranks.start(PREFILL[1], follow, spec, follower, read(tmp_path / "worker group"))

    async def main() -> list[list[int]]:
        with engine_of_ranks(ranks, path, *division, **SETTINGS) as engine:
            side = Side("tcp", engine=engine)
            peer = await asyncio.to_thread(read, tmp_path / "prefill")
            for work in works:
                await side.thread.submit("test", replace(work, leg=Leg.RECEIVE, peer=peer))
            write(tmp_path / "decode", side.blob)
            tokens = [await side.rest(work.id) for work in works]
            assert side.num_prompt_tokens == 0, "no prompt was computed again"
            assert await side.is_clean()
            await side.close()
            return tokens

    rest = asyncio.run(main())
    first = ranks.answer(PREFILL[0])
    ranks.answer(PREFILL[1])
    found = [[*begin, *end] for begin, end in zip(first, rest, strict=True)]
    assert found == generated(module, [work.prompt_token_ids for work in works], NUM_TOKENS)


async def test_pair_of_unlike_ranks_is_refused_with_both_printed(ranks: Ranks, tmp_path: Path) -> None:
    path = saved(build("qwen3_next", SERVED["qwen3_next"]), tmp_path)
    with engine_of_ranks(ranks, path, 2, 1, **SETTINGS) as engine:
        spec = spec_of(path, 1, 1, **SETTINGS)
        alone = new_engine(load_model(spec.model), spec.engine)
        async with closing(Side("tcp", engine=alone), Side("tcp", engine=engine)) as (whole, divided):
            with pytest.raises(RuntimeError, match=r"(?s)pools differ in state.*layer 0.*layer"):
                await start(whole, divided, submission([1, 2, 3]))
