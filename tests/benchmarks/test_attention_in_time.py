"""The script that simulates divisions of attention: its promise, and the requests of a trace."""

import json
from pathlib import Path
from types import ModuleType

from tests.benchmarks.scripts import script

attention_in_time = script("models/attention_in_time")


def test_promise_reaches_the_scheduler_and_judges_the_requests(attention_in_time: ModuleType, tmp_path: Path) -> None:
    """Eight stages of DeepSeek-V3 read nearly all experts in a chunk: none that is quick fits in 100 ms."""
    model = attention_in_time.MODELS["DeepSeek-V3"]
    stages = attention_in_time.divisions(model, "h200", 8, tmp_path)["stages"]
    jobs = attention_in_time.arrivals(4.0, 3, 2048, 16, 0)
    rows = {}
    for tpot_s in (0.0001, 0.1, 0.3):
        fleet = attention_in_time.fleet_of(stages, tpot_s)
        rows[tpot_s] = attention_in_time.figures(attention_in_time.Simulation(fleet).run(jobs), tpot_s)
    assert rows[0.0001]["good, %"] == 0
    assert rows[0.3]["good, %"] == 100
    assert rows[0.3]["TTFT p99, s"] < 0.7 * rows[0.1]["TTFT p99, s"]


def test_requests_of_a_trace_begin_at_time_zero_at_its_speed(attention_in_time: ModuleType, tmp_path: Path) -> None:
    lines = [{"timestamp": 1000 * second, "input_length": 10 + second, "output_length": 5} for second in range(6)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    jobs = attention_in_time.trace_arrivals(trace, 2.0, 3, 2)
    assert [job.due for job in jobs] == [0.0, 0.5, 1.0]
    assert [job.prompt_tokens for job in jobs] == [12, 13, 14]
    assert {job.service_tier for job in jobs} == {"standard"}
