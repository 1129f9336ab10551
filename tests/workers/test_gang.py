"""A replica of several ranks gives the tokens of one rank, and ends as a whole when a rank ends."""

from dataclasses import replace
from pathlib import Path

import pytest

from crossdock.workers.engine import Engine, EngineConfig
from crossdock.workers.model import wrap_module
from crossdock.workers.request import SamplingParams, Submission

from .architectures import SERVED, build
from .gangs import SETTINGS, ganged
from .ranks import Ranks, saved
from .test_engine import run, tokens_of
from .test_parallel import DIVISIONS


def works(count: int = 12, num_tokens: int = 10) -> list[Submission]:
    """Prompts of 1 to 150 tokens, every third sampled."""
    prompts = [[(13 * number + 7 * at * at) % 90 + 3 for at in range(1 + 37 * number % 151)] for number in range(count)]
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return [
        Submission(f"{number}", prompt, replace(sampling, temperature=0.8 * (number % 3 == 2), seed=number))
        for number, prompt in enumerate(prompts)
    ]


def tokens(engine: Engine, submissions: list[Submission]) -> list[list[int]]:
    for submission in submissions:
        engine.add(submission)
    deltas = run(engine)
    return [tokens_of(deltas[submission.id]) for submission in submissions]


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
def test_tokens_equal_those_of_one_rank(ranks: Ranks, tmp_path: Path, name: str) -> None:
    module = build(name, SERVED[name])
    path = saved(module, tmp_path)
    expected = tokens(Engine(wrap_module(module), EngineConfig(**SETTINGS)), works())
    for tensor_size, num_stages in DIVISIONS:
        with ganged(ranks, path, tensor_size, num_stages) as engine:
            assert tokens(engine, works()) == expected
