"""Executes batches, on this rank and on all others: one flat forward pass over any mix of chunks and decodes."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from crossdock.workers.model.graphs import DecodeGraphs
from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.model.model import PagedModel
from crossdock.workers.schedule.batch import Batch


@dataclass(frozen=True, slots=True)
class Runner:
    """Executes batches on one model; `tell` gives each to the other ranks, where there are any."""

    model: PagedModel
    page_size: int
    tell: Callable[[bytes], None] | None = None
    graphs: DecodeGraphs | None = None

    def begin(self, batch: Batch) -> tuple[StepInputs, list[range]]:
        """The other ranks may compute it from now on."""
        step = StepInputs.of(batch, self.page_size)
        if self.tell is not None:
            self.tell(step[0].pack())
        return step

    def finish(self, step: tuple[StepInputs, list[range]], found: Tensor | None = None) -> tuple[Tensor, list[range]]:
        """Logits [N, vocab], valid until the next call, and for each part of the batch its rows. Batches are finished
        in the order they began. `found`: see `StepInputs.on`."""
        inputs, rows = step
        if self.graphs is not None and self.graphs.fit(inputs):
            return self.graphs.run(inputs, found), rows
        return inputs.run(self.model, found), rows
