"""Experts that move between ranks, a piece before each step: the logits of transformers before, during and after."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from crossdock.kernels.cpu.choice import KernelChoice, only
from crossdock.kernels.cpu.linear import ChosenLinear
from crossdock.workers.model.cut import expert_balance, expert_slots
from crossdock.workers.model.cut.collectives import Collectives
from crossdock.workers.model.cut.expert_balance import BalanceTimes, ExpertBalance
from crossdock.workers.model.cut.expert_plan import first_placement, holders
from crossdock.workers.model.cut.expert_slots import ExpertSlots, slot_form, slot_tensors
from crossdock.workers.model.cut.position import CannotCut, RankPosition
from crossdock.workers.model.layers.coded_products import CodedExperts
from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.weights.weights import check_division, model_on_meta, part_bytes
from tests.sweeps import SOAK
from tests.workers.architectures import SERVED, build
from tests.workers.model.paged import assert_near, in_random_steps, monolithic, random_prompts
from tests.workers.model.weights.test_packed_checkpoints import write_experts, write_gpt_oss
from tests.workers.quantised import CASES
from tests.workers.ranks import UNHURRIED_S, Ranks, saved

PROMPTS = random_prompts(5, 70, 40)
COUNT = 4  # experts


def checkpoint(name: str, folder: Path) -> tuple[Path, Any]:
    """Write a mixture with four experts. Returns its folder, and transformers' model of the same weights."""
    if name == "mxfp4 of gpt-oss":
        return folder, write_gpt_oss(folder)
    if name in CASES:
        return folder / "packed", write_experts(folder, CASES[name], 96).eval()
    module = build(name, SERVED[name])
    for key, parameter in module.named_parameters():
        if key.endswith("bias"):  # else zero: a copy without it would not be seen
            torch.nn.init.normal_(parameter, std=0.1)
    return saved(module, folder), module.eval()


def logits_during_moves(rank: int, path: Path, num_ranks: int, copies: int) -> tuple[list[list[Tensor]], Any]:
    """On one rank: return the logits of turns between which ever more has moved, and what the rank holds then."""
    position = RankPosition(rank, num_ranks, has_whole_experts=True, num_redundant_experts=copies)
    links = Collectives(position, UNHURRIED_S)
    model = load_model(ModelSpec(str(path), "float32"), links=links)
    slots = model.part.slots
    experts = [model.module.get_submodule(each.name) for each in slots]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_balance, "_PIECE_S", 0.0)
        patch.setattr(expert_balance, "_LEAST_PIECE", 5_000)  # bytes: a part of an expert
        balance = ExpertBalance(experts, slots, links, BalanceTimes(window_size=2, step_interval=2))
    found = []
    is_between = False
    for _ in range(40):
        torch.manual_seed(0)  # the same pages everywhere
        found.append(in_random_steps(model, PROMPTS, seed=7))
        for _ in range(2 + 5 * len(found)):
            balance.before_step()
        is_between |= balance.is_moving and balance.num_moved > 0
        if len(found) > 4 and not balance.is_moving:
            break
    weights = {
        (layer, int(expert)): torch.cat(slot_tensors(experts[layer], slot))
        for layer, each in enumerate(slots)
        for slot, expert in enumerate(each.placement[rank])
    }
    return found, ([each.placement for each in slots], weights, balance.num_moved, is_between)


@pytest.mark.parametrize(
    ("name", "num_ranks", "copies"),
    [
        ("qwen3_moe", 2, 2),
        pytest.param("qwen3_moe", 2, 0, marks=SOAK),
        ("gpt_oss", 4, 4),
        ("awq", 2, 2),
        pytest.param("fp8 blocks", 2, 2, marks=SOAK),
        pytest.param("mxfp4 of gpt-oss", 2, 2, marks=SOAK),
    ],
)
def test_logits_are_those_of_transformers_before_during_and_after_moves(
    ranks: Ranks, tmp_path: Path, name: str, num_ranks: int, copies: int
) -> None:
    path, module = checkpoint(name, tmp_path)
    expected = [monolithic(module, prompt) for prompt in PROMPTS]
    answers = ranks.run(num_ranks, logits_during_moves, path, num_ranks, copies)
    placements, _, num_moved, is_between = answers[0][1]
    assert num_moved
    assert is_between
    for turn in answers[0][0]:
        assert_near(turn, expected)
    for layer, placement in enumerate(placements):
        held = holders(placement, COUNT)
        assert held.sum() == COUNT + copies
        for _, (others, *_) in answers:
            assert np.array_equal(others[layer], placement), "all ranks know one placement"
        for expert in range(COUNT):
            copies_of = [own[1][layer, expert] for _, own in answers if (layer, expert) in own[1]]
            assert len(copies_of) == held[:, expert].sum()
            assert all(torch.equal(each, copies_of[0]) for each in copies_of), "copies have the same bytes"


@pytest.mark.parametrize("may_know", [True, False])
def test_slots_on_all_ranks_compute_each_pair_once(may_know: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, with steps of few and of many rows, also as on GPUs, where the host does not know the rows."""
    monkeypatch.setattr(expert_slots, "_may_know_rows", lambda _: may_know)
    monkeypatch.setattr(expert_slots, "WORTH_A_COPY", {"cpu": 32, "cuda": 32})
    slots = [
        ExpertSlots("experts", 6, RankPosition(rank, 3, has_whole_experts=True, num_redundant_experts=6))
        for rank in range(3)
    ]
    placement = first_placement(6, 3, 4)
    placement[:, 2:] = [[2, 5], [0, 5], [0, 1]]
    generator = torch.Generator().manual_seed(0)
    for rows in (1, 3, 80, 300):
        chosen = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(rows)])
        for each in slots:
            each.slots_of(chosen)
            each.place(placement, np.ones(6))
        found = [each.slots_of(chosen) for each in slots]
        owners = torch.stack([own < 4 for own in found])
        assert (owners.sum(0) == 1).all()
        for rank, own in enumerate(found):
            mine = owners[rank]
            assert torch.equal(torch.from_numpy(placement[rank])[own[mine]], chosen[mine])
        if rows == 300:
            assert all(150 < mine.sum() < 250 for mine in owners), "copies divide rows"
        read = [len(set(own[own < 4].tolist())) for own in found]
        assert rows > 3 or sum(read) == len(set(chosen.flatten().tolist())), "each expert is read once"
        assert slots[0].counted_rows() == (2 * chosen.flatten().bincount(minlength=6)).tolist()
        for each in slots:
            each.clear_rows()
            each.reset()


def refusal(rank: int, path: Path) -> str:
    """On one rank: return why experts that move are refused where no batch may change a bit."""
    position = RankPosition(rank, 2, has_whole_experts=True, num_redundant_experts=2)
    spec = ModelSpec(str(path), "float32", cpu_kernels="native", batch_invariant=True)
    with pytest.raises(ValueError, match="batch_invariant") as refused:
        load_model(spec, links=Collectives(position, UNHURRIED_S))
    return str(refused.value)


def test_bits_that_no_batch_changes_and_experts_that_move_exclude_each_other(ranks: Ranks, tmp_path: Path) -> None:
    path = saved(build("qwen3_moe", SERVED["qwen3_moe"]), tmp_path)
    for reason in ranks.run(2, refusal, path):
        assert reason.startswith("batch_invariant: experts move between ranks (enable_eplb)")


def balancedness(rank: int) -> float | None:
    """On one rank: return what is measured after two steps with three rows of expert 0 and one of expert 2."""
    position = RankPosition(rank, 2, has_whole_experts=True, num_redundant_experts=0)
    slots = ExpertSlots("experts", 4, position)
    experts, links = torch.nn.Linear(3, 2, bias=False), Collectives(position, UNHURRIED_S)
    balance = ExpertBalance([experts], [slots], links, BalanceTimes(window_size=2, step_interval=2))
    for _ in range(3):
        assert balance.balancedness is None
        balance.before_step()
        slots.slots_of(torch.tensor([[0], [0], [2], [0]]))
    return balance.balancedness


def test_balancedness_is_the_mean_rows_of_a_rank_by_the_most_when_experts_are_rearranged(ranks: Ranks) -> None:
    """The first rank has experts 0 and 1, and measures; the other one is not asked."""
    assert ranks.run(2, balancedness) == [4 / 6, None]


@pytest.mark.parametrize(("copies", "words"), [(1, "0, 2 or 4 would be"), (6, "at most 4 copies")])
def test_number_of_copies_that_ranks_cannot_hold_is_refused(tmp_path: Path, copies: int, words: str) -> None:
    path = saved(build("qwen3_moe", SERVED["qwen3_moe"]), tmp_path)
    with pytest.raises(CannotCut, match=f"num_redundant_experts is {copies}: .*{words}"):
        check_division(path, RankPosition(0, 2, 1, True, copies))


@pytest.mark.parametrize("name", ["qwen3_moe", "awq"])
def test_copies_are_in_the_bytes_of_a_rank(tmp_path: Path, name: str) -> None:
    path, _ = checkpoint(name, tmp_path)
    config = AutoConfig.from_pretrained(path)
    bytes_of = [
        part_bytes(model_on_meta(config, RankPosition(0, 2, 1, True, copies), torch.float32)) for copies in (None, 0, 4)
    ]
    assert bytes_of[0] == bytes_of[1]
    expert = sum(len(tensor) for tensor in _first_slot(config))
    assert bytes_of[2] - bytes_of[1] == 2 * config.num_hidden_layers * expert


def _first_slot(config: Any) -> list[Tensor]:
    module = model_on_meta(config, RankPosition(0, 2, 1, True, 0), torch.float32)
    return slot_tensors(module.model.layers[0].mlp.experts, 0)


def test_slots_have_one_form_from_whatever_number_of_rows_a_kernel_runs() -> None:
    """Each rank measures its kernels: two may change to another one at unlike numbers of rows."""

    def form(choice: KernelChoice) -> str:
        experts, coded = nn.Module(), CodedExperts()
        coded.products = [ChosenLinear(torch.ones(64, 32, dtype=torch.bfloat16), choice)]
        experts.add_module("down", coded)
        return slot_form(experts)

    late = form(KernelChoice("native", "torch", 256))
    assert late == form(KernelChoice("native", "torch", 64))
    assert late.startswith("native and torch in ")
    assert late != form(only("native"))
    assert late != form(only("torch"))
