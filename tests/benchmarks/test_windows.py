"""The benchmarks of windows and of paired steps on tiny inputs: what they count, and their tables."""

import argparse
import random
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from tests.workers.architectures import SERVED, build

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a script of benchmarks/ or benchmarks/models/, imported as Python does when it is run."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "models"))
    return import_module(request.param)


@pytest.mark.parametrize("script", ["windows"], indirect=True)
def test_groups_of_layers_hold_more_prompts_at_a_time_and_give_the_same_tokens(
    script: ModuleType, tmp_path: Path
) -> None:
    layers = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "max_position_embeddings": 512}
    build("gemma3_text", SERVED["gemma3_text"] | layers).save_pretrained(tmp_path)
    draw = random.Random(0)
    prompts = [[draw.randrange(3, 100) for _ in range(240)] for _ in range(4)]
    args = argparse.Namespace(
        model=tmp_path, dtype="float32", prompt_tokens=240, output_tokens=16, fit=1, chunk=32, page_size=8
    )
    memory = script.memory_of(args)
    (before, tokens), (after, others) = (
        script.serve(args, prompts, memory, has_groups) for has_groups in (False, True)
    )
    assert (before["at a time"], after["at a time"]) == (1, 2)
    assert tokens == others
    assert [len(answer) for answer in tokens] == [16] * 4


@pytest.mark.parametrize("script", ["paired_steps"], indirect=True)
def test_ratio_of_paired_steps_is_the_median_over_rounds(script: ModuleType) -> None:
    found = {"decodes": [[0.010, 0.011], [0.020, 0.024], [0.010, 0.010]], "chunks": [[0.1, 0.1]] * 3}
    lines = script.report(found, ["this", "before"]).splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert rows[0] == ["step", "this, ms", "before, ms", "before / this"]
    assert rows[2] == ["decodes", "10", "11", "1.100"]
    assert rows[3] == ["chunks", "100", "100", "1.000"]
    assert rows[4][-1] == f"{(1.1 * 1.2) ** (1 / 6):.3f}"
