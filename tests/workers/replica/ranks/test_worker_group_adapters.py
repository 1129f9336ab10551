"""Adapters on a replica of several ranks: each rank has its part, and tokens are those of PEFT."""

from pathlib import Path

import pytest

from crossdock.workers.schedule.request.submission import Adapter, Submission
from tests.sweeps import rest_in_soak
from tests.workers.architectures import build
from tests.workers.lora_oracle import tuned
from tests.workers.ranks import DIVISIONS, Ranks, saved
from tests.workers.replica.engines import greedy, run, tokens_of
from tests.workers.worker_groups import engine_of_ranks

PROMPTS = [[7, 3, 9, 11, 5], [20 + i for i in range(90)]]


@pytest.mark.parametrize("division", rest_in_soak(DIVISIONS, (2, 2)))
def test_worker_group_gives_each_request_its_adapters_tokens(
    ranks: Ranks, tmp_path: Path, division: tuple[int, int]
) -> None:
    module = build("llama", {})
    adapters = [tuned(module, tmp_path / f"{number}", number, r=3 + number) for number in range(3)]
    path = saved(module, tmp_path / "model")
    with engine_of_ranks(ranks, path, *division, enable_lora=True, max_loras=2) as engine:
        wanted = {}
        for number, one in enumerate(adapters):
            for prompt in PROMPTS:
                name = f"{number}-{len(prompt)}"
                engine.add(Submission(name, prompt, greedy(8), adapter=one.adapter))
                wanted[name] = one.greedy(prompt, 8)
        engine.add(Submission("base", PROMPTS[0], greedy(8)))
        found = {name: tokens_of(deltas) for name, deltas in run(engine).items()}
        base = found.pop("base")
        assert found == wanted
        assert base not in wanted.values()
        missing = Adapter("gone", str(tmp_path / "gone"), "0")
        engine.add(Submission("gone", PROMPTS[0], greedy(8), adapter=missing))
        assert "adapter 'gone' cannot be loaded" in str(run(engine)["gone"][-1].error)
