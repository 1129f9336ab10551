"""A prompt for which the ranks of a replica compute NaN ends with the error, and requests beside it go on."""

from pathlib import Path

import torch

from crossdock.workers.schedule.request.failures import NOT_FINITE
from crossdock.workers.schedule.request.request import FinishReason
from crossdock.workers.schedule.request.submission import Submission
from tests.workers.architectures import build
from tests.workers.ranks import Ranks, saved
from tests.workers.replica.engines import greedy, run, tokens_of
from tests.workers.worker_groups import engine_of_ranks

BROKEN = 9  # its embedding is finite, and infinite after the model's own factor; no check at start uses this token


def test_prompt_that_gives_nan_on_two_ranks_ends_and_others_go_on(ranks: Ranks, tmp_path: Path) -> None:
    module = build("granite", {"vocab_size": 640, "embedding_multiplier": 12.0})
    with torch.no_grad():
        module.get_input_embeddings().weight[BROKEN] = 3e38
    path = saved(module, tmp_path)
    good = {"one": [7, 3, 8, 11, 5], "two": [20 + number for number in range(50)]}
    with engine_of_ranks(ranks, path, 2, 1) as engine:
        for name, prompt in good.items():
            engine.add(Submission(name, prompt, greedy(6)))
        alone = run(engine)
        for name, prompt in good.items():
            engine.add(Submission(f"{name} again", prompt, greedy(6)))
            engine.add(Submission(f"{name} bad", [5, 7, BROKEN, *range(30, 70)], greedy(6)))
        found = run(engine)
        for name in good:
            assert tokens_of(found[f"{name} again"]) == tokens_of(alone[name])
            last = found[f"{name} bad"][-1]
            assert (last.finish_reason, last.error, last.is_not_finite) == (FinishReason.ERROR, NOT_FINITE, True)
        assert engine.num_not_finite == len(good)
