"""Pages that leave the pool of several ranks come back from the hosts' memory, each rank's part to its rank."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ByteSize

from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from tests.sweeps import shared_out
from tests.workers.architectures import build
from tests.workers.ranks import DIVISIONS, Ranks, saved
from tests.workers.replica.engine.test_tiers import MAX_MODEL_LEN, MODELS, PAGE_SIZE, PROMPTS, answers
from tests.workers.replica.engines import generated
from tests.workers.worker_groups import engine_of_ranks

HOST_BYTES = 16 << 20
NAMES = ["llama", "gemma3_text", "lfm2 conv"]  # the last have windows, and states


def settings_for(path: Path, num_pages: int, division: tuple[int, int]) -> dict[str, Any]:
    """Return settings by which every rank has some `num_pages` pages of its part."""
    whole = load_model(ModelSpec(str(path), "float32", MAX_MODEL_LEN)).layout(PAGE_SIZE).page_bytes
    return {
        "page_size": PAGE_SIZE,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 4,
        "max_model_len": MAX_MODEL_LEN,
        "kv_cache_memory": ByteSize(num_pages * whole // (division[0] * division[1])),
        "kv_cache_host_memory": ByteSize(HOST_BYTES),
    }


@pytest.mark.parametrize(("name", "division"), shared_out(len(DIVISIONS), NAMES, DIVISIONS))
def test_prompt_whose_pages_were_evicted_is_loaded_on_all_ranks(
    ranks: Ranks, tmp_path: Path, name: str, division: tuple[int, int]
) -> None:
    """The tokens of the second time are computed from pages of each rank: those of another page would be others."""
    module = build(name, MODELS[name])
    path = saved(module, tmp_path)
    expected = generated(module, PROMPTS, 5)
    with engine_of_ranks(ranks, path, *division, **settings_for(path, 60, division)) as engine:
        try:
            tokens, cached = answers(engine, [*PROMPTS, *PROMPTS])
            assert engine.tiers is not None
            (host,) = engine.tiers.counts()
        finally:
            engine.tiers.close()
    assert tokens == expected * 2
    assert cached == [0] * len(PROMPTS) + [88] * len(PROMPTS)
    assert host.loaded > 0
    assert 0 < host.bytes <= HOST_BYTES, "of all ranks together"
