"""The lines that `crossdock serve` prints about the machine, from the reports of the replicas."""

from dataclasses import replace
from typing import Any

import pytest

from crossdock.cluster.serve.summary import summary
from crossdock.workers.report.capacity import most_streams
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.request.slo import DEFAULT_CLASSES

GIB = 1 << 30
COST = StepCost(base=0.02, per_prefill_token=0.001, per_attended=0.0, per_decode=0.001, per_context=1e-6)
MACHINE = {
    "device": "Acme 9000",
    "instructions": "avx512_bf16",
    "threads": 2,
    "dtype": "bfloat16",
    "kv_dtype": "bfloat16",
    "attention": "cpp",
    "kernels": "own below 32 rows, onednn from there",
    "weights": GIB // 4,
    "pool": 2 * GIB,
}


def profile(**changes: Any) -> SchedulingProfile:
    plain = {
        "max_model_len": 8192,
        "vocab_size": 1000,
        "page_size": 16,
        "num_pages": 5000,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 64,
        "slo_classes": DEFAULT_CLASSES,
        "cost": COST,
    }
    return SchedulingProfile.model_validate(plain | changes)


def replica(pool: str = "mixed", machine: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {"pool": pool, "profile": profile(**changes).model_dump(mode="json"), "machine": MACHINE | (machine or {})}


def test_one_replica_is_summarised_in_four_lines() -> None:
    lines = summary([replica()], used=3 * GIB, free=10 * GIB)
    assert lines == [
        "Machine: Acme 9000 (avx512_bf16), 1 replica, 2 threads each; bfloat16, attention in cpp, "
        "products in own below 32 rows, onednn from there",
        "Memory: 256.0MiB weights, 2.0GiB KV pages, 768.0MiB for Python, torch and Ray; 10.0GiB are left",
        "KV pages: 80,000 tokens in bfloat16; the longest context is 8,192 tokens",
        "Speed: a prompt of 1,000 tokens takes 1.02 s; streams of 1,000 tokens at once: "
        "15 at 50 ms a token (interactive), 40 at 100 ms a token (standard), 64 at 2000 ms a token (batch)",
    ]


def test_machine_without_a_compiler_is_told_what_it_loses_and_what_to_install() -> None:
    reason = "no C++ compiler was found (install g++, or name one in CXX)"
    lines = summary([replica(machine={"attention": "torch", "slower": reason})])
    assert lines[1] == f"Slower: attention runs in plain torch, several times slower: {reason}"


def test_predicted_seconds_of_both_divisions_of_experts_stand_between_machine_and_pages() -> None:
    experts = ["slices: 1.0 GiB a rank; predicted 2 ms for 1 stream: chosen", "whole: 1.0 GiB a rank"]
    _, *lines = summary([replica(machine={"experts": experts})])
    assert lines[:2] == [f"Experts: {line}" for line in experts]
    assert lines[2].startswith("KV pages")


def test_pages_of_an_emulated_device_are_counted_and_not_stored() -> None:
    (pages,) = [line for line in summary([replica(machine={"device": "emulated h100-8b"})]) if line.startswith("KV")]
    assert pages == "KV pages: 80,000 tokens, counted and not stored; the longest context is 8,192 tokens"


def test_pages_of_layers_with_windows_are_said_to_hold_a_window() -> None:
    (pages,) = [line for line in summary([replica(windows=(None, 512))]) if line.startswith("KV")]
    assert "tokens in bfloat16, where layers with a window keep no more than their window;" in pages


def test_promise_that_not_even_one_stream_can_have_is_said_to_be_beyond_the_machine() -> None:
    slow = COST.slowed(3)
    (speed,) = [line for line in summary([replica(cost=slow)]) if line.startswith("Speed")]
    assert "0 at 50 ms a token (interactive)" in speed
    assert speed.endswith("; the promise of interactive is beyond this machine, whose tokens take 63 ms or more")


def test_pools_are_summarised_one_by_one_and_all_ranks_count_as_memory() -> None:
    members = [replica("prefill"), replica("prefill"), replica("decode", tensor_parallel_size=2)]
    lines = summary(members, used=10 * GIB, free=20 * GIB)
    assert [line.partition(";")[0] for line in lines if line.startswith("Machine")] == [
        "Machine: prefill: Acme 9000 (avx512_bf16), 2 replicas, 2 threads each",
        "Machine: decode: Acme 9000 (avx512_bf16), 1 replica of 2 ranks, 2 threads each",
    ]
    assert lines[1] == "Memory: 1.0GiB weights, 8.0GiB KV pages, 1.0GiB for Python, torch and Ray; 20.0GiB are left"
    assert sum(line.startswith("Memory") for line in lines) == 1


def test_pages_that_no_step_has_written_hide_what_the_rest_takes() -> None:
    lines = summary([replica()], used=GIB, free=20 * GIB)
    assert lines[1] == "Memory: 256.0MiB weights, 2.0GiB KV pages; 20.0GiB are left"


def test_replicas_on_other_machines_are_summarised_without_memory() -> None:
    assert not any(line.startswith("Memory") for line in summary([replica()]))
    assert summary([]) == []


@pytest.mark.parametrize(
    ("changes", "context", "most"),
    [
        ({}, 1000, 15),  # (0.05 s - 0.02 s) / (0.001 + 1000 * 1e-6 s)
        ({"overrun": 1.25}, 1000, 10),
        ({"max_num_seqs": 4}, 1000, 4),
        ({"num_pages": 125}, 1000, 2),
        ({"cost": replace(COST, base=0.06)}, 1000, 0),
        ({"pipeline_parallel_size": 2, "interval_share": 0.5}, 1000, 30),  # half of the streams in each step
    ],
)
def test_most_streams_are_those_that_a_step_in_time_carries(changes: dict[str, Any], context: int, most: int) -> None:
    assert most_streams(profile(**changes), 0.05, context) == most
