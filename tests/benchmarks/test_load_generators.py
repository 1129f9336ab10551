"""The comparison of load generators reads each generator's result in the same units."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

RESULTS: dict[str, dict[str, Any]] = {
    "crossdock bench": {
        "summary": {
            "output_tokens_per_s": 100.0,
            "requests_ok": 32,
            "prompt_tokens": 4096,
            "ttft_ms": {"p50": 50.0},
            "tpot_ms": {"p50": 10.0},
            "e2e_ms": {"p50": 680.0},
        }
    },
    "aiperf": {
        "output_token_throughput": {"avg": 100.0},
        "request_count": {"avg": 32},
        "time_to_first_token": {"p50": 50.0},
        "inter_token_latency": {"p50": 10.0},
        "request_latency": {"p50": 680.0},
        "input_sequence_length": {"avg": 128.0},
    },
    "guidellm": {
        "benchmarks": [
            {
                "metrics": {
                    "request_totals": {"successful": 32},
                    "output_tokens_per_second": {"successful": {"mean": 100.0, "median": 7.0}},
                    "time_to_first_token_ms": {"successful": {"median": 50.0}},
                    "inter_token_latency_ms": {"successful": {"median": 10.0}},
                    "request_latency": {"successful": {"median": 0.68, "count": 32}},
                    "prompt_token_count": {"successful": {"mean": 128.0}},
                }
            }
        ]
    },
    "vllm bench serve": {
        "output_throughput": 100.0,
        "completed": 32,
        "total_input_tokens": 4096,
        "median_ttft_ms": 50.0,
        "median_tpot_ms": 10.0,
        "median_itl_ms": 1.0,
        "median_e2el_ms": 680.0,
    },
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "peers"))
    return importlib.import_module("load_generators")


def test_equal_measurements_give_equal_figures(script: ModuleType) -> None:
    assert list(RESULTS) == list(script.GENERATORS)
    rows = [list(script.figures(name, result).values()) for name, result in RESULTS.items()]
    assert rows == [[100.0, 50.0, 10.0, 680.0, 32, 128.0]] * 4
