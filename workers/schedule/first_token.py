"""When a prompt would have its first token, and what follows from a replica's steps: the one place that predicts it.

A replica's admission asks with floats, about each prompt that waits there. A router asks with floats or with arrays
`[replica]`, about groups of prompts of similar length. The cost is a `StepCost`, or the `StepCosts` of many replicas.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple, Protocol

import numpy as np

from crossdock.workers.schedule.cost.cost import StepCost, StepWork
from crossdock.workers.schedule.cost.formula import CostFormula
from crossdock.workers.schedule.cost.stages import gap_of
from crossdock.workers.schedule.policies.chunk_policies import (
    NOTHING_LENT,
    Beside,
    ChunkLimits,
    Lent,
    lent_beside,
    meaning_of,
    pace_beside,
)
from crossdock.workers.schedule.policies.chunking import LEAST_SHARE, idle_step
from crossdock.workers.schedule.request.slo import SloClass

_NO_LIMIT_S = 1e9
_LEAST_S = 1e-12  # of a token
_EQUAL = 1 + 1e-9  # ratio below which lengths are the same: sums of equal prompts differ in their last digits

# -- a prompt alone ------------------------------------------------------------------------------------------------


class StepSettings(Protocol):
    """The settings of a scheduler that bound the steps of a prompt alone: of `SchedulerConfig`, or of a profile."""

    @property
    def chunk_policy(self) -> str: ...

    @property
    def enable_chunked_prefill(self) -> bool: ...

    @property
    def max_num_batched_tokens(self) -> int: ...

    @property
    def max_prefill_tokens(self) -> int: ...

    @property
    def idle_step_share(self) -> float: ...

    @property
    def slo_classes(self) -> Sequence[SloClass]: ...


class PromptSteps(NamedTuple):
    """The steps in which a replica computes a prompt alone. Floats, or arrays of replicas."""

    max_step_tokens: Any  # that a step may hold
    max_chunk_s: Any  # seconds of a step beyond its fixed part, at most: see `idle_step`

    @classmethod
    def of(cls, settings: StepSettings, cost: StepCost, waiting_s: float = 0.0) -> "PromptSteps":
        """Return the steps of one replica. All its classes count as in use, and no context before a chunk.

        `waiting_s`: of the prompts that wait behind the first one, see `idle_step`.
        """
        most = settings.max_num_batched_tokens
        most = min(settings.max_prefill_tokens or most, most)
        if not settings.enable_chunked_prefill or not meaning_of(settings.chunk_policy).fits_streams:
            return cls(most, _NO_LIMIT_S)
        longest = settings.idle_step_share * min([slo.ttft_s for slo in settings.slo_classes])
        seconds = idle_step(cost, 0, longest, waiting_s) - cost.fixed_seconds(0)
        return cls(most, max(seconds, cost.per_prefill_token))

    def tokens(self, cost: CostFormula[Any], per_token: Any) -> Any:
        """Return the tokens of a prompt that a step computes, as a mean with a fraction: one or more.

        `per_token`: seconds of one of its tokens in a step of many rows.
        """
        fitting = cost.smaller(self.max_chunk_s / (per_token + _LEAST_S), self.max_step_tokens)
        return cost.larger(fitting, 1.0)


def queue_seconds(
    cost: StepCost, prompts: Iterable[tuple[int, float]], classes: Sequence[SloClass], tightest_ttft_s: float
) -> float:
    """Return the seconds that prompts which wait weigh in `idle_step`: less, the longer the promise of their class.

    `prompts`: priority and tokens of each. `tightest_ttft_s`: the promise of which a prompt counts whole.
    """
    weights = [min(tightest_ttft_s / slo.ttft_s, 1.0) for slo in classes]
    return cost.per_prefill_token * sum([tokens * weights[priority] for priority, tokens in prompts])


def prompt_seconds(
    cost: CostFormula[Any], interval_share: Any, start: Any, end: Any, chunk: Any, adapter: float = 0
) -> Any:
    """Return the seconds of a replica's time that the tokens `[start, end)` of a prompt take.

    In a pipeline, the next step begins before the first one has ended: other prompts wait for `interval_share` of the
    seconds. `chunk`: see `PromptSteps.tokens`. `adapter`: numbers in the matrices of the prompt's adapter.
    """
    if isinstance(chunk, np.ndarray) and end <= np.minimum.reduce(chunk):  # one step everywhere: less to compute
        return cost.chunk_step_seconds(start, end - start, adapter) * interval_share
    return cost.prefill_seconds(start, end, chunk, adapter) * interval_share


def drain_seconds(
    cost: CostFormula[Any], interval_share: Any, start: Any, end: Any, chunk: Any, adapter: float = 0
) -> Any:
    """Return the seconds of a prompt's last step in a pipeline, beyond the interval between two steps."""
    after = 1 - interval_share
    if largest(after) <= 0:  # no pipeline, which is the usual case
        return nothing_like(end - start)
    return cost.larger(after, 0.0) * cost.last_step_seconds(start, end, chunk, adapter)


# -- prompts beside streams ----------------------------------------------------------------------------------------


def overrun_when_full(overrun: float, depth: int, interval_share: float) -> float:
    """Return the factor by which some steps take longer than predicted while the pipeline is full: see `gap_of`."""
    return overrun * gap_of(depth, interval_share)


class Sharing(NamedTuple):
    """The steps in which the prompts of a replica share its time with its streams."""

    cost: StepCost
    most_urgent: int  # priority of the most urgent streams
    beside: Beside | None  # for prompts as urgent as these streams; None: there is no stream

    @classmethod
    def of(
        cls, cost: StepCost, limits: ChunkLimits, counts: Sequence[float], step: StepWork, classes: Sequence[SloClass]
    ) -> "Sharing":
        """Return the steps of a replica where requests decode, or are on their way to decode there.

        `counts`: of these requests, by priority. `step`: decodes its part of them.
        """
        if not step.decodes:
            return cls(cost, len(classes), None)
        tpot = min([slo.tpot_s for slo, count in zip(classes, counts, strict=True) if count])
        return cls(cost, first_nonzero(counts), Beside(step, cost.seconds(step), tpot, limits))

    def share(self, priority: int) -> float:
        """Return the share of a prompt's pace on an idle replica that the streams leave to a class."""
        if self.beside is None:
            return 1.0
        beside = self.beside if priority <= self.most_urgent else self.beside._replace(is_urgent=False)
        return meaning_of(beside.limits.chunk_policy).share(self.cost, beside)

    def shares(self, num_classes: int) -> list[float]:
        """Return the share of each class."""
        num_urgent = min(self.most_urgent + 1, num_classes)
        shares = [self.share(0)] * num_urgent
        return shares + [self.share(num_urgent)] * (num_classes - num_urgent) if num_urgent < num_classes else shares

    def lent(self, priority: int, share: float, lead: float) -> Lent:
        """Return the loan of streams that are `lead` seconds ahead to prompts of a class that has this `share`."""
        if self.beside is None or priority > self.most_urgent:
            return NOTHING_LENT
        if not meaning_of(self.beside.limits.chunk_policy).fits_streams:
            return NOTHING_LENT
        return lent_beside(self.cost, self.beside, share, lead)


# -- prompts behind others -----------------------------------------------------------------------------------------


def seconds_of_equals(counts: Any, seconds: Any, own: Any, cost: CostFormula[Any], left: Any = 1.0) -> tuple[Any, Any]:
    """Return the seconds of prompts of the same urgency that go before a prompt of `own` seconds, and the seconds by
    which the prompt delays others of them.

    The shortest rest goes first (`order_prefills`). So prompts with no more left go before it; each of the others
    waits `own` seconds longer. `counts`, `seconds`: of groups of prompts, `[group]` or `[group, replica]`. `left`:
    share of the seconds that is not computed yet.
    """
    if isinstance(counts, np.ndarray):
        rest, later = seconds * left, counts * own
        goes_before = rest <= later * _EQUAL
        before = total_of(cost.chosen(goes_before, rest, 0.0))
        return before, total_of(cost.chosen(goes_before, 0.0, later))
    before, after = 0.0, 0.0
    for count, each in zip(counts, seconds, strict=True):
        rest, later = each * left, count * own
        if rest <= later * _EQUAL:
            before = before + rest
        else:
            after = after + later
    return before, after


def rivals_seconds(turns: Any, rivals: Iterable[tuple[float, float, float]]) -> Any:
    """Return the seconds that other tenants of a class get until the virtual time of a prompt's tenant is `turns`.

    `rivals`: of each other tenant (seconds that its prompts wait for, weight, virtual time), with virtual times on one
    scale, in seconds of a tenant with weight 1.
    """
    return sum(min(seconds, weight * max(turns - time, 0.0)) for seconds, weight, time in rivals)


def first_token_seconds(
    step_left: Any,
    ahead: Any,
    own: Any,
    pace: Any,
    drain: Any,
    room_wait: Any,
    filled_step: Any,
    larger: Callable[..., Any],
) -> Any:
    """Return the seconds until the first token of a prompt of `own` seconds.

    `step_left`: until a step may hold the prompt. `ahead`: of other prompts that are computed between that time and
    the prompt. `pace`: see `pace_beside`. `drain`: see `drain_seconds`. `room_wait`: until there are a place and pages.
    `filled_step`: of a step that has chunks of others too. A token comes when its step ends, however short the prompt.
    """
    return larger(step_left + ahead * pace, room_wait) + larger(own * pace, filled_step) + drain


def pace_of(share: Any, lent: Lent, seconds: Any, larger: Callable[..., Any]) -> Any:
    """Return `pace_beside` of prompts of `seconds`, however small a share streams leave."""
    return pace_beside(larger(share, LEAST_SHARE), *lent, seconds, larger)


def loads_sooner(compute_s: Any, queue_s: Any, load_s: Any, meets: Any) -> Any:
    """Return whether pages are loaded from a tier sooner than they are computed.

    Where a prompt is computed from its beginning while its pages are loaded from the end, until both meet (`meets`),
    the load pays once it begins in time. `queue_s`: seconds until the load begins. `load_s`: of all its pages.
    """
    return compute_s > queue_s + load_s * (1 - meets)


# -- figures of one replica or of many -----------------------------------------------------------------------------


def largest(figures: Any) -> float:
    """Return the largest of all replicas' figures; of an only replica's, the figure."""
    found: float = np.maximum.reduce(figures) if isinstance(figures, np.ndarray) else figures  # no frames of `max`
    return found


def nothing_like(figures: Any) -> Any:
    """Return zeros for as many replicas as `figures` has."""
    return np.zeros(len(figures)) if isinstance(figures, np.ndarray) else 0.0


def total_of(groups: Any) -> Any:
    """Add the groups of every replica, or of an only one, in order."""
    # In half the time of `Floats.sum` where replicas have few groups.
    return np.add.reduce(groups) if isinstance(groups, np.ndarray) else reduce(add, groups, 0.0)


def first_nonzero(counts: Sequence[float]) -> int:
    """Return the priority of the most urgent class that has any; the number of classes if none has."""
    for priority, count in enumerate(counts):
        if count:
            return priority
    return len(counts)
