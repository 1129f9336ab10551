"""Many equal decode steps at once, for a simulated clock that knows how long the steps take."""

from collections.abc import Callable, Mapping, Sequence

from msgspec import structs

from crossdock.workers.schedule import kv
from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.policies.chunk_policies import meaning_of
from crossdock.workers.schedule.policies.pace import next_due, steps_without_skips
from crossdock.workers.schedule.request.batch import Batch
from crossdock.workers.schedule.request.request import adapter_work
from crossdock.workers.schedule.request.submission import Leg
from crossdock.workers.schedule.table import RequestTable


def steady_steps(table: RequestTable, cost: StepCost | None, batch: Batch) -> int:
    """Return how many steps, the scheduled `batch` the first of them, are the same decodes and nothing else.

    This holds while no request arrives or leaves. The last of the steps may make a request's last token. 1: a
    second such step is not certain.
    """
    parts = batch.scheduled
    config = table.config
    requests = [part.request for part in parts]
    if table.num_drafts:
        return 1
    if table.pages.has_windows or table.pages.state_pages:
        return 1  # which cached pages are evicted depends on when windows give pages back, or snapshots take some
    if table.waiting or not parts or not len(parts) == batch.num_decodes == len(table.running):
        return 1
    if any(request.leg is Leg.SEND for request in requests):
        return 1  # the last token of a prompt: the tokens after the next one are made elsewhere
    steps = min(
        min(request.sampling.max_tokens - request.num_output_tokens, table.max_model_len - request.num_tokens)
        for request in requests
    )
    steps = min(
        steps, table.pages.block_pool.num_available // len(parts) * table.pages.page_size + 1
    )  # without preemptions
    may_skip = meaning_of(config.chunk_policy).fits_streams and len({request.priority for request in requests}) > 1
    if cost is not None and may_skip:
        tpot = min([config.slo_classes[request.priority].tpot_s for request in requests])
        contexts = [request.num_tokens for request in requests]
        steps = min(steps, steps_without_skips(contexts, tpot, cost, adapter_work(requests)))
    return steps


def advance(
    table: RequestTable,
    batch: Batch,
    tokens: Mapping[str, Sequence[int]],
    ends: Sequence[float],
    charge: Callable[[Batch], None],
) -> Batch:
    """Record fewer than `steady_steps` steps, `batch` the first of them, and return the batch of the next step.

    The result is the same as that of `schedule` and `update` in turn. `tokens`: what each stream sampled in the steps,
    none of which ends it. `ends`: when each step ended. `charge`: `Forecast.charge`, for each step that begins.
    """
    if not ends:
        return batch
    parts = []
    size = table.pages.page_size
    classes = table.config.slo_classes
    for part in batch.scheduled:
        request = part.request
        start = part.start
        request.token_ids += tokens[request.id]
        request.num_computed_tokens = request.num_tokens - 1
        missing = -(-request.num_tokens // size) - len(part.pages)
        if missing > 0:
            table.pages.allocate(request.owner, missing)
        if request.num_computed_tokens // size > start // size:
            kv.index_full_pages(table, request, start)
        due = request.due
        tpot = classes[request.priority].tpot_s
        for end in ends:
            due = next_due(due, end, tpot)
        request.due = due
        parts.append(structs.replace(part, start=request.num_computed_tokens))
    table.now = ends[-1]
    if table.tenants.in_use:
        for number in range(1, len(ends) + 1):
            charge(Batch([structs.replace(part, start=part.start + number) for part in batch.scheduled], len(parts)))
    return Batch(parts, len(parts))
