"""Loads one rank's part of a model, together with the other ranks of its worker group."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from crossdock.workers.model.cut.collectives import Collectives
from crossdock.workers.model.cut.expert_balance import BalanceTimes, ExpertBalance
from crossdock.workers.model.cut.expert_slots import slot_bytes, slot_form
from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.load import load_model
from crossdock.workers.model.memory.kv_memory import PageBudget, count_pages_that_fit
from crossdock.workers.model.memory.memory_fit import size_of, used
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.replica.config import EplbConfig, ReplicaSpec
from crossdock.workers.replica.ranks.device import device_of
from crossdock.workers.replica.ranks.expert_choice import with_experts_divided
from crossdock.workers.replica.ranks.pool_layout import agree_on_states, choose_groups_of_ranks
from crossdock.workers.replica.ranks.rank_network import gloo_on, use_interface_of
from crossdock.workers.replica.step_sizes import sized

_LAST_RESORT = 2.0  # times `rank_timeout_s`


class RankFailed(RuntimeError):
    """A rank of the replica could not start, has ended or hangs; the message is that rank's own where it sent one."""


_REFUSAL = re.compile(r"[^:]*: ValueError: (.*)", re.DOTALL)


def why_failed(error: Exception) -> str:
    """Return an error of a rank as text for the others."""
    kind = "ValueError" if isinstance(error, ValueError) else type(error).__name__
    return f"{kind}: {error}"


def failure_of(why: str) -> Exception:
    """Return the error of a worker group that could not start: a rank's ValueError, which says all to the user, as one.

    `why`: the rank, and what `why_failed` returned there.
    """
    refusal = _REFUSAL.fullmatch(why)
    return RankFailed(why) if refusal is None else ValueError(refusal[1])


def position_of(spec: ReplicaSpec, rank: int) -> RankPosition:
    """Return where `rank` stands in the worker group of a replica.

    Where its ranks choose how to divide experts, these count as whole, which can be divided wherever slices can.
    """
    copies = None if spec.eplb is None else spec.eplb.num_redundant_experts
    sizes = spec.tensor_parallel_size, spec.pipeline_parallel_size
    return RankPosition(rank, *sizes, spec.enable_expert_parallel is not False, copies)


def driver_of(spec: ReplicaSpec) -> int:
    """Return the rank that schedules and samples."""
    return RankPosition(0, spec.tensor_parallel_size, spec.pipeline_parallel_size).driver


class LoadedRank(NamedTuple):
    """Holds what a rank has loaded."""

    model: LoadedModel
    budget: PageBudget
    experts: Sequence[str]  # a line about each way in which ranks could divide experts; none: there was no choice


def load_rank(spec: ReplicaSpec, rank: int, store: Any, host: str, report: Callable[[str], None]) -> LoadedRank:
    """Join the worker group's torch.distributed world, load this rank's part, and find how many pages fit beside it.

    Collective: every rank must call it. `host`: the address at which this rank listens for the others. `report` gets
    one line per phase of the start, for the log.

    Raises:
        ValueError: the spec wants a GPU, and torch finds none. Or there is not enough memory; the message says how much
            is missing, and what would fit.
    """
    phases = _Phases(report)
    torch.set_num_threads(spec.num_threads)  # Ray sets OMP_NUM_THREADS by its own accounting
    device = device_of(spec)
    timeout = timedelta(seconds=spec.start_timeout_s)
    use_interface_of(host)
    gloo = gloo_on(host)
    dist.init_process_group(gloo, store=store, rank=rank, world_size=spec.num_ranks, timeout=timeout)
    phases.done("joined the others")
    spec, experts = with_experts_divided(spec, rank, driver_of(spec))
    if experts:
        phases.done("division of experts chosen")
    position = position_of(spec, rank)
    # NCCL's watchdog aborts the process. The driver's StepDeadline comes first, and names the reason.
    links = (
        Collectives(position, _LAST_RESORT * spec.rank_timeout_s, "nccl")
        if device == "cuda"
        else Collectives(position, spec.rank_timeout_s, gloo)
    )
    if device == "cuda":
        links.use_symmetric_memory(torch.device(device))

    def loaded() -> None:
        phases.done("weights read")
        links.wait_for_all()  # reading has no deadline, the check that follows has

    known = spec.engine.budget.known(device)
    model = load_model(spec.model, device, links, known or 0, loaded)
    phases.done("logits checked")
    if spec.eplb is not None:
        model = replace(model, balance=_balance(model, links, spec.eplb))
        copies = sum(slot_bytes(model.module.get_submodule(each.name)) * each.num_empty for each in model.part.slots)
        phases.done(f"experts of {len(model.part.slots)} layers may move, and {size_of(copies)} are for copies: ready")
    model = choose_groups_of_ranks(model, spec.engine, store, position.size)
    model = agree_on_states(model, spec.engine, store, position.size)
    budget = sized(spec.engine, model).budget
    room = count_pages_that_fit(model, budget, spec.engine.page_size)
    if known is None:
        phases.done("memory measured")
    return LoadedRank(model, room, experts)


def _balance(model: LoadedModel, links: Collectives, config: EplbConfig) -> ExpertBalance | None:
    """Return the balance of the experts of this rank's part; None: none of them move.

    Collective. Raises ValueError: ranks hold the weights of experts in unlike forms.
    """
    slots = model.part.slots
    position = model.part.position
    experts = [model.module.get_submodule(each.name) for each in slots]
    texts = links.gather_texts(", ".join(dict.fromkeys(map(slot_form, experts))))
    unlike = {*texts[position.stage * position.tensor_size :][: position.tensor_size]}
    if slots and len(unlike) > 1:
        raise ValueError(
            f"enable_eplb: ranks keep the weights of experts in unlike forms, {' and '.join(sorted(unlike))}: set "
            f"cpu_kernels, or leave enable_eplb out"
        )
    if not slots:
        return None
    log_interval = config.log_balancedness_interval if config.log_balancedness else 0
    times = BalanceTimes(config.window_size, config.step_interval, log_interval)
    return ExpertBalance(experts, slots, links, times)


class _Phases:
    """Reports how long each phase of a rank's start took, and how much memory is in use after it."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._since = time.monotonic()

    def done(self, phase: str) -> None:
        now = time.monotonic()
        self._report(f"{phase} in {now - self._since:.1f} s, {used()}")
        self._since = now
