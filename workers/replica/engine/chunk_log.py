"""A line for each chunk that the scheduler has decided on: its request, tokens and seconds, and why it is no longer."""

import logging

from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.request.batch import Batch

chunk_logger = logging.getLogger("crossdock.chunks")
"""One line for each chunk, at DEBUG, before its step is executed."""


def log_chunks(batch: Batch, cost: StepCost | None, step_seconds: float) -> None:
    """Log the chunks of a step. `step_seconds`: predicted, with its pictures. `cost`: None before it was measured."""
    for part in batch.scheduled[batch.num_decodes :]:
        end = part.start + part.num_tokens
        whole = part.request.num_tokens
        chunk_logger.debug(
            "%s: tokens %d to %d of %d, %.2f ms alone, %.2f ms with all of the step, %d decodes; first because: %s; "
            "no longer because: %s",
            part.request.id,
            part.start,
            end,
            whole,
            1e3 * cost.chunk_step_seconds(part.start, part.num_tokens, part.request.adapter_weights)
            if cost is not None
            else 0.0,
            1e3 * step_seconds,
            batch.num_decodes,
            part.reason,
            "the prompt ends" if end == whole else f"{batch.limit}, down to whole pages",
        )
