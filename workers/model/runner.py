"""Execute batches on this rank and on all others: one flat forward pass over any mix of chunks and decodes."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from crossdock.workers.model.graphs import DecodeGraphs
from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.model.mixed_graphs import MixedGraphs
from crossdock.workers.model.model import PagedModel
from crossdock.workers.model.step_messages import StepSender
from crossdock.workers.schedule.batch import Batch


@dataclass(frozen=True, slots=True)
class Runner:
    """Executes batches on one model. `notify_ranks` sends each batch to the other ranks, if there are any."""

    model: PagedModel
    page_size: int
    notify_ranks: Callable[[bytes], None] | None = None
    graphs: DecodeGraphs | None = None
    mixed_graphs: MixedGraphs | None = None
    _sender: StepSender = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_sender", StepSender(self.page_size))  # frozen

    def begin(self, batch: Batch) -> tuple[StepInputs, list[range]]:
        """Send a batch to the other ranks, which may compute it from now on."""
        step = StepInputs.of(batch, self.page_size)
        if self.notify_ranks is not None:
            self.notify_ranks(self._sender.pack(step[0], [part.request.id for part in batch.scheduled]))
        return step

    def is_usual(self, inputs: StepInputs) -> bool:
        """Return whether a step is computed as others of its size are: its seconds then predict theirs.

        A step with more sequences than CUDA graphs have room for takes several times as long to launch.
        """
        if self.mixed_graphs is None or (self.graphs is not None and self.graphs.covers(inputs)):
            return True
        return not self.mixed_graphs.misses(inputs)

    def finish(
        self, step: tuple[StepInputs, list[range]], previous_tokens: Tensor | None = None
    ) -> tuple[Tensor, list[range]]:
        """Compute a step. Steps are finished in the order they began.

        Returns the logits [N, vocab], valid until the next call, and each part's rows of them. `previous_tokens`: see
        `StepInputs.on`.
        """
        inputs, rows = step
        if self.graphs is not None and self.graphs.covers(inputs):
            return self.graphs.run(inputs, previous_tokens), rows
        if self.mixed_graphs is not None and self.mixed_graphs.covers(inputs):
            return self.mixed_graphs.run(inputs, previous_tokens), rows
        return inputs.run(self.model, previous_tokens), rows
