"""The scripts of benchmarks/chunks: what they compute from simulated runs."""

import argparse
from pathlib import Path
from typing import Any

from crossdock.workers.report.presets import preset
from crossdock.workers.schedule.cost.cost import StepCost
from tests.benchmarks.scripts import script
from tests.workers.architectures import build

stages = script("chunks/stages")
piggyback = script("chunks/piggyback")
cost = script("chunks/cost")
CPU = StepCost(base=0.012, per_prefill_token=1.6e-3, per_attended=1e-7, per_decode=4e-3, per_context=1e-6)


def test_chunks_of_equal_time_lose_no_tokens_and_leave_stages_less_idle_than_chunks_of_512(
    stages: Any, tmp_path: Path
) -> None:
    classes = ({"name": "standard", "ttft_s": 600.0, "tpot_s": 2.0},)
    profile = preset("l4-8b").model_copy(update={"cost": CPU}).model_dump(mode="json") | {"slo_classes": classes}
    file = tmp_path / "cpu.json"
    file.write_text(type(preset("l4-8b")).model_validate(profile).model_dump_json())
    args = argparse.Namespace(profile=str(file), requests=36, open=6)
    fixed, equal = (stages.run(args, 2, f"chunks of {what}") for what in ("512 tokens", "equal time"))
    assert equal.tokens_per_s >= fixed.tokens_per_s
    assert equal.idle_share() < 0.5 * fixed.idle_share()
    assert equal.gap_p99() < fixed.gap_p99()


def test_decodes_that_ride_along_cost_less_and_stages_wait_less(piggyback: Any) -> None:
    args = argparse.Namespace(profile="l4-8b", prompt_tokens=1024, requests=24, open=8, budget=512)
    whole, mixed = (piggyback.run(args, name, 1, 20) for name in ("whole", "mixed"))
    assert mixed.decode_seconds() < 0.8 * whole.decode_seconds()
    assert sum(step.work.decodes for step in mixed.steps) == sum(step.work.decodes for step in whole.steps) == 24 * 19
    piped, piped_mixed = (piggyback.run(args, name, 4, 20) for name in ("whole", "mixed"))
    assert piped_mixed.idle_share() < piped.idle_share() / 3
    assert piped_mixed.tokens_per_s > piped.tokens_per_s


def test_cost_of_chunks_is_counted_and_measured_for_each_size(cost: Any, tmp_path: Path) -> None:
    """Chunks compute the same products; attention before masks is more in one step."""
    build("llama", {"max_position_embeddings": 256, "vocab_size": 40_064}).save_pretrained(tmp_path)
    args = argparse.Namespace(model=str(tmp_path), tokens=96, repeats=1, seconds=60.0)
    rows, _ = cost.measure(args, tmp_path)
    assert list(rows) == [64, 96]
    (chunked, parts, taken), (whole, one, _) = rows.values()
    assert 0 < taken.longest <= taken.total
    assert taken.cpu > 0
    assert (parts, one) == ([64, 32], [96])
    assert chunked.linear == whole.linear
    assert chunked.causal_attention == whole.causal_attention
    assert chunked.dense_attention < whole.dense_attention
