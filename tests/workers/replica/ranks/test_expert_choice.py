"""How ranks divide experts where the operator leaves it open: sizes of the model, both lines, one choice for all."""

from pathlib import Path

import pytest
import torch

from crossdock.workers.model.weights.weights import read_config
from crossdock.workers.replica.config import ReplicaSpec
from crossdock.workers.replica.ranks import expert_choice
from crossdock.workers.replica.ranks.expert_choice import (
    Division,
    measured_seconds,
    sizes_of,
    sliced_experts,
    whole_experts,
    with_experts_divided,
)
from crossdock.workers.report.expert_division import ExpertSizes
from tests.sweeps import rest_in_soak, shared_out
from tests.workers.architectures import SERVED, build
from tests.workers.model.weights.test_packed_checkpoints import write_experts
from tests.workers.quantised import CASES
from tests.workers.ranks import Ranks, saved
from tests.workers.replica.ranks.test_worker_group import assert_worker_group_equals_one_rank
from tests.workers.worker_groups import spec_of


def open_spec(path: Path, tensor_size: int = 2, num_stages: int = 1) -> ReplicaSpec:
    return spec_of(path, tensor_size, num_stages, enable_expert_parallel=None)


def divided(ranks: Ranks, spec: ReplicaSpec) -> tuple[ReplicaSpec, list[str]]:
    """Return the choice of all ranks of a replica."""
    found: list[tuple[ReplicaSpec, list[str]]] = ranks.run(spec.num_ranks, _divided, spec)
    assert found == found[:1] * spec.num_ranks
    return found[0]


def _divided(rank: int, spec: ReplicaSpec) -> tuple[ReplicaSpec, list[str]]:
    return with_experts_divided(spec, rank, 0)


def _sizes(rank: int, spec: ReplicaSpec) -> ExpertSizes:
    config = read_config(Path(str(spec.model.path)))
    return sizes_of(spec, config, "cpu", whole_experts(spec, config, rank, "cpu"))


MIXTURES = ("qwen3_moe", 0), ("glm4_moe", 2)  # and how many of the first layers have no experts


@pytest.mark.parametrize(("mixture", "division"), shared_out(2, MIXTURES, [(2, 1), (2, 2)]))
def test_sizes_are_those_of_the_model_that_transformers_makes(
    ranks: Ranks, tmp_path: Path, mixture: tuple[str, int], division: tuple[int, int]
) -> None:
    """Count layers of all stages: the first has none with experts where the first two of four layers have none."""
    name, num_without = mixture
    without = {"first_k_dense_replace": num_without} if num_without else {}
    module = build(name, SERVED[name] | {"num_hidden_layers": 4} | without)
    config = module.config
    first, *others = ranks.run(2 * division[1], _sizes, open_spec(saved(module, tmp_path), *division))
    assert others == [first] * len(others)
    experts = [each for each in module.modules() if hasattr(each, "gate_up_proj") and each.gate_up_proj.dim() == 3]
    assert len(experts) == 4 - num_without
    count, width, inner = experts[0].down_proj.shape
    each = sum(parameter.numel() for parameter in experts[0].parameters()) // count
    sizes = len(experts), count, config.num_experts_per_tok, inner, each, 4 * each, 4 * width
    assert first == ExpertSizes(*sizes)


SLOW, FAST = [9.0, 9.0, 9.0], [1.0, 1.0, 1.0]


def _divided_by(rank: int, spec: ReplicaSpec, whole: list[float], slices: list[float]) -> tuple[ReplicaSpec, list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_choice, "measured_seconds", lambda *_: [slices, whole])
        return with_experts_divided(spec, rank, 0)


@pytest.mark.parametrize(("whole", "slices", "is_whole"), [(FAST, SLOW, True), (SLOW, FAST, False)])
def test_faster_division_is_chosen_for_all_ranks_and_both_are_said(
    ranks: Ranks, tmp_path: Path, whole: list[float], slices: list[float], is_whole: bool
) -> None:
    path = saved(build("qwen2_moe", SERVED["qwen2_moe"]), tmp_path)
    first, second = ranks.run(2, _divided_by, open_spec(path), whole, slices)
    assert first == second
    spec, lines = first
    assert spec == spec_of(path, 2, 1, enable_expert_parallel=is_whole)
    seconds = {"slices": slices, "whole": whole}
    for line, (way, (one, streams, chunk)) in zip(lines, seconds.items(), strict=True):
        assert line.startswith(f"{way}: ")
        assert f" MiB a rank; measured {1000 * one:.3g} ms for 1 stream, " in line
        assert f" {1000 * streams:.3g} ms for 8, " in line  # max_num_seqs
        assert f" {1000 * chunk:.3g} ms for a chunk of 80 tokens" in line  # max_num_batched_tokens
    assert [line.endswith(": chosen") for line in lines] == [not is_whole, is_whole]


def test_ranks_that_choose_give_the_tokens_of_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    path = saved(build("qwen3_moe", SERVED["qwen3_moe"]), tmp_path)
    assert_worker_group_equals_one_rank(ranks, path, (2, 1), enable_expert_parallel=None)


class _Experts(torch.nn.Module):
    """Experts on a rank whose clock, of one number, goes on by `each_s` for each row and expert."""

    def __init__(self, clock: list[float], each_s: float) -> None:
        super().__init__()
        self.clock = clock
        self.each_s = each_s

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> None:
        assert hidden.shape == (len(chosen), 6)
        assert chosen.shape == shares.shape
        assert float(shares.sum(1).mean()) == pytest.approx(1)
        self.clock[0] += self.each_s * chosen.numel()


def _measured_by_clock(rank: int, ways: list[list[list[float]]], steps: tuple[int, ...]) -> list[list[float]]:
    clock = [0.0]
    divisions = [
        Division({f"{number}": _Experts(clock, each_s) for number, each_s in enumerate(layers[rank])}, ())
        for layers in ways
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.process_time", lambda: clock[0])
        sizes = ExpertSizes(layers=5, count=8, chosen=3, inner=4, numbers=1, num_bytes=1, row_bytes=24)
        return measured_seconds(spec_of(Path("nowhere"), 2, 1), divisions, sizes, torch.float32, steps)


def test_seconds_are_those_of_the_slowest_rank_in_all_layers(ranks: Ranks) -> None:
    """A slow layer is measured once, a fast one more often. The second rank's stage has no experts the second way."""
    ways = [[[0.001], [0.002]], [[0.2], []]]
    expected = [[pytest.approx(5 * 3 * rows * seconds) for rows in (1, 7)] for seconds in (0.002, 0.2)]
    assert ranks.run(2, _measured_by_clock, ways, (1, 7)) == [expected, expected]


def test_runs_take_layers_in_turn(ranks: Ranks) -> None:
    """The slowest rank decides each run: the second rank for its second layer, the first rank for all others."""
    ways = [[[0.0001, 0.0001], [0.00005, 0.0002]], [[0.0003, 0.0001], [0.0001, 0.0001]]]
    expected = [[pytest.approx(5 * 3 * seconds)] for seconds in (0.00015, 0.0002)]
    assert ranks.run(2, _measured_by_clock, ways, (1,)) == [expected, expected]


def test_layers_are_measured_until_they_have_256_mib_and_at_least_one() -> None:
    with torch.device("meta"):
        of_64_mib, of_512_mib = (torch.nn.Linear(4096, width, bias=False) for width in (4096, 8 * 4096))
    for layer, number in ((of_64_mib, 4), (of_512_mib, 1)):
        assert len(expert_choice._measured_layers(Division(dict.fromkeys("abcdef", layer), ()))) == number
    assert not expert_choice._measured_layers(Division({}, ()))


def _measured(rank: int, spec: ReplicaSpec) -> list[list[float]]:
    config = read_config(Path(str(spec.model.path)))
    whole = whole_experts(spec, config, rank, "cpu")
    slices = sliced_experts(spec, config, rank, "cpu", whole)
    return measured_seconds(spec, (slices, whole), sizes_of(spec, config, "cpu", whole), torch.float32, (1, 40))


@pytest.mark.parametrize(
    "case", rest_in_soak(["plain", "fp8 blocks", "compressed-tensors w4a16"], "plain", "fp8 blocks")
)
def test_plain_and_packed_experts_are_measured(ranks: Ranks, tmp_path: Path, case: str) -> None:
    """All ranks have the same seconds, and computing takes some."""
    write_experts(tmp_path, CASES["awq" if case == "plain" else case], 128)
    spec = open_spec(tmp_path / ("plain" if case == "plain" else "packed"))
    first, second = ranks.run(2, _measured, spec)
    assert first == second
    assert min(map(min, first)) > 0


@pytest.mark.parametrize("is_whole", [True, False])
def test_what_the_operator_says_is_obeyed_without_a_look_at_the_model(tmp_path: Path, is_whole: bool) -> None:
    spec = spec_of(tmp_path / "nowhere", 2, 1, enable_expert_parallel=is_whole)
    assert with_experts_divided(spec, 0, 0) == (spec, [])


def test_there_is_no_choice_without_experts_or_without_ranks_that_divide_them(ranks: Ranks, tmp_path: Path) -> None:
    dense = saved(build("llama", SERVED["llama"]), tmp_path / "dense")
    mixture = saved(build("qwen3_moe", SERVED["qwen3_moe"]), tmp_path / "mixture")
    few = saved(
        build("qwen3_moe", SERVED["qwen3_moe"] | {"num_local_experts": 1, "num_experts_per_tok": 1}), tmp_path / "few"
    )
    for path, division in ((dense, (2, 1)), (mixture, (1, 2)), (few, (2, 1))):
        spec, lines = divided(ranks, open_spec(path, *division))
        assert spec.enable_expert_parallel is False
        assert not lines


def test_packed_experts_whose_groups_slices_would_divide_stay_whole(ranks: Ranks, tmp_path: Path) -> None:
    write_experts(tmp_path, CASES["awq"], 96)
    spec, lines = divided(ranks, open_spec(tmp_path / "packed"))
    assert spec.enable_expert_parallel
    slices, whole = lines
    assert slices.startswith("slices: not possible: ")
    assert "cannot be divided" in slices
    assert whole.endswith(" MiB a rank: chosen")


def _divided_on_gpu(rank: int, spec: ReplicaSpec, name: str) -> tuple[ReplicaSpec, list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_choice, "device_of", lambda _: "cuda")
        patch.setattr(torch.cuda, "get_device_name", lambda: name)
        return with_experts_divided(spec, rank, 0)


def test_gpu_with_a_data_sheet_is_predicted_by_it(ranks: Ranks, tmp_path: Path) -> None:
    path = saved(build("qwen3_moe", SERVED["qwen3_moe"]), tmp_path)
    spec, lines = ranks.run(2, _divided_on_gpu, open_spec(path), "NVIDIA H100 80GB HBM3")[0]
    assert spec.enable_expert_parallel is not None
    assert all(" MiB a rank; predicted " in line for line in lines)
    assert sum(line.endswith(": chosen") for line in lines) == 1


def test_gpu_without_a_data_sheet_keeps_slices_and_says_why(ranks: Ranks, tmp_path: Path) -> None:
    path = saved(build("qwen3_moe", SERVED["qwen3_moe"]), tmp_path)
    spec, lines = ranks.run(2, _divided_on_gpu, open_spec(path), "Acme 9000")[0]
    assert spec.enable_expert_parallel is False
    assert "there is no data sheet of Acme 9000" in lines[0]
    assert len(lines) == 2
