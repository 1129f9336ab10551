"""A pair of replicas with unlike ranks, whose decode replica is lost in mid-stream: transformers' tokens all the same.

The prefill replica has one rank, the decode replica two, and the replica that goes on has one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from crossdock.cluster.dispatch.dispatcher import Dispatcher
from crossdock.router.fleet import RouterConfig
from crossdock.workers.model.load import load_model
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.report.profile import Role
from crossdock.workers.schedule.request.submission import Submission
from tests.cluster.dispatch.in_process import InProcess, ready, serving
from tests.sweeps import SOAK, rest_in_soak
from tests.workers.draft.mtp_reference import target_of, write_checkpoint
from tests.workers.draft.noted_heads import head_config, noting
from tests.workers.ranks import Ranks, saved
from tests.workers.replica.engines import before_each_step, generated, greedy
from tests.workers.worker_groups import engine_of_ranks, spec_of

PROMPT = [3 + i * i % 100 for i in range(40)]  # two pages and a part
NUM_TOKENS = 80


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """One process, for the second rank."""
    processes = Ranks(1)
    yield processes
    processes.close()


def whole(path: Path, **config: Any) -> Engine:
    """Return an engine of one rank."""
    spec = spec_of(path, 1, 1, **config)
    return new_engine(load_model(spec.model), spec.engine)


async def with_a_loss(prefill: InProcess, decode: InProcess, other: InProcess) -> list[int]:
    """Return the tokens of a request that is shipped to `decode`, which is killed, and goes on at `other`."""
    computed: list[int] = []  # tokens of prompts, in steps of `decode`
    before_each_step(decode.engine_thread.engine, lambda batch: computed.append(batch.work.prefill_tokens))
    output: list[int] = []
    dispatcher = Dispatcher("tiny", RouterConfig(shipping="always"))
    async with serving(dispatcher, prefill=prefill, decode=decode):
        async for delta in dispatcher.generate(Submission("r", PROMPT, greedy(NUM_TOKENS))):
            assert delta.first == len(output) or not delta.token_ids
            output += delta.token_ids
            if len(output) >= NUM_TOKENS // 3 and not decode.is_killed:
                dispatcher.join("other", other, other.profile)
                await ready(dispatcher, 3)
                decode.is_killed = True
        assert "crossdock_ingress_placed_again_total 1.0" in dispatcher.metrics.text()
    assert sum(computed) < len(PROMPT), "its pages came from the prefill replica"
    return output


@contextmanager
def replicas_of(ranks: Ranks, path: Path, is_whole: bool = False, **config: Any) -> Iterator[list[InProcess]]:
    """Yield a prefill, a decode and a mixed replica, of which the decode replica has two ranks.

    `is_whole`: with whole experts.
    """
    with engine_of_ranks(ranks, path, 2, 1, enable_expert_parallel=is_whole, **config) as divided:
        engines: dict[Role, Engine] = {"prefill": whole(path, **config), "decode": divided}
        engines["mixed"] = whole(path, **config)
        yield [InProcess(role=role, engine=engine) for role, engine in engines.items()]


@pytest.mark.parametrize(
    ("name", "is_whole"),
    [
        pytest.param("glm_moe_dsa", False, id="latents and indexers"),
        pytest.param("minimax_m3_vl_text", False, id="indexers of KV heads", marks=SOAK),
        pytest.param("deepseek_v3", False, id="latents", marks=SOAK),
        pytest.param("qwen3_moe", True, id="whole experts"),
    ],
)
async def test_stream_of_a_lost_replica_of_other_ranks_has_transformers_tokens(
    ranks: Ranks, tmp_path: Path, name: str, is_whole: bool
) -> None:
    with replicas_of(ranks, saved(target_of(name), tmp_path), is_whole) as replicas:
        found = await with_a_loss(*replicas)
    assert found == generated(target_of(name), [PROMPT], NUM_TOKENS)[0]


@pytest.mark.parametrize("name", rest_in_soak(["glm4_moe", "glm_moe_dsa"], "glm4_moe"))
async def test_stream_of_a_lost_replica_with_a_head_drafts_on_each_and_has_transformers_tokens(
    ranks: Ranks, tmp_path: Path, name: str
) -> None:
    """Each replica drafts from its first decode step on: the states of the last tokens travel, or are computed."""
    path = write_checkpoint(tmp_path, name)
    wanted = generated(target_of(name), [PROMPT], NUM_TOKENS)[0]
    config = {"speculative_config": head_config(path, 3, method="mtp")}
    with replicas_of(ranks, path, **config) as replicas:
        engines = [replica.engine_thread.engine for replica in replicas[1:]]
        notes = [noting(engine, {"r": wanted}, num_prompt={"r": len(PROMPT)}) for engine in engines]
        assert await with_a_loss(*replicas) == wanted
        for engine, noted in zip(engines, notes, strict=True):
            assert engine.scheduler.verification is not None
            assert sum(engine.scheduler.verification.totals.num_accepted_at) > 5
            assert all(text == [*PROMPT, *wanted][: len(text)] for text, _ in noted.notes)
    assert len(notes[0].notes[0][0]) == len(PROMPT) + 1, "the prompt and its first token"
