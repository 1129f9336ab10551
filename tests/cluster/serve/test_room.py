"""Sentences about replicas that Ray could not place, and the end of a wait that is too long."""

from typing import Any

import pytest

from crossdock.cluster.config import ClusterConfig
from crossdock.cluster.config_file import load
from crossdock.cluster.serve.room import Demand, Machine, RoomWatch, lacking_room

LARGE = Machine({"CPU": 16.0, "GPU": 8.0}, {"CPU": 10.0, "GPU": 3.0}, {"kind": "H100"})
SMALL = Machine({"CPU": 4.0}, {"CPU": 4.0}, {})


def config(*pools: dict[str, Any]) -> ClusterConfig:
    return load(None, {"pools": [{"num_gpus": 1.0, **pool} for pool in pools]})


def sentences(config: ClusterConfig, *demands: Demand, machines: list[Machine] | None = None) -> list[str]:
    return list(lacking_room([config], demands, [LARGE, SMALL] if machines is None else machines))


def test_sentence_says_who_waits_what_the_cluster_has_and_what_is_missing() -> None:
    found = sentences(config({"name": "mixed", "replicas": 6}), Demand({"GPU": 1.0}, 5))
    assert found == [
        "5 of 6 replicas of pool 'mixed' wait for room, each for 1 GPU: the cluster has 8 GPUs on 2 machines, 3 GPUs "
        "free; 2 GPUs missing"
    ]


def test_each_pool_is_told_its_own_demand_and_others_demands_are_not() -> None:
    given = config({"name": "prefill", "num_cpus": 8}, {"name": "decode", "replicas": 2, "tensor_parallel_size": 4})
    others = [Demand({"CPU": 1.0}, 7), Demand({"memory": 1e9}, 1)]
    prefill = Demand({"CPU": 8.0, "GPU": 1.0}, 1)
    decode = Demand({"CPU": 0.004, "GPU": 4.0}, 1)
    busy = [LARGE._replace(free={"CPU": 4.0, "GPU": 3.0}), SMALL]
    assert sentences(given, prefill, decode, *others, machines=busy) == [
        "1 of 1 replicas of pool 'prefill' wait for room, each for 8 CPUs and 1 GPU: the cluster has 20 CPUs and 8 "
        "GPUs on 2 machines, 8 CPUs and 3 GPUs free, but no machine has it free for a whole replica",
        "1 of 2 replicas of pool 'decode' wait for room, each for 4 GPUs: the cluster has 8 GPUs on 2 machines, 3 GPUs "
        "free; 1 GPU missing",
    ]
    assert sentences(given, prefill, *others) == [], "there is room: Ray places it in a moment"
    assert sentences(given, *others) == []


def test_machines_without_the_labels_of_a_pool_do_not_count() -> None:
    given = config({"name": "mixed", "node_labels": {"kind": "H100"}}, {"name": "b", "num_cpus": 1})
    full = LARGE._replace(free={"CPU": 10.0})
    (found,) = sentences(given, Demand({"GPU": 1.0}, 1), machines=[full, SMALL])
    assert found.endswith("the cluster has 8 GPUs on 1 machine with kind=H100, 0 GPUs free; 1 GPU missing")
    (absent,) = sentences(given, Demand({"GPU": 1.0}, 1), machines=[SMALL])
    assert absent.endswith("each for 1 GPU: the cluster has no machine with kind=H100")


def test_watch_tells_each_change_once_after_a_moment_and_ends_a_wait_that_is_too_long() -> None:
    watch = RoomWatch(begun=0.0, patience_s=60.0)
    assert watch.hear(["a waits"], 1.0) == []
    assert watch.hear(["a waits"], 6.0) == ["a waits"]
    assert watch.hear(["a waits"], 7.0) == []
    assert watch.hear(["a and b wait"], 8.0) == ["a and b wait"]
    assert watch.hear([], 30.0) == []
    assert watch.hear(["b waits"], 40.0) == ["b waits"]
    assert watch.hear(["b waits"], 99.0) == []
    with pytest.raises(TimeoutError, match=r"b waits\. No room came in 60 s \(application\.room_timeout_s\)"):
        watch.hear(["b waits"], 100.0)


def test_watch_looks_once_a_second() -> None:
    watch = RoomWatch(begun=0.0, patience_s=60.0)
    assert [watch.is_due(at / 4) for at in range(9)] == [True, False, False, False] * 2 + [True]
