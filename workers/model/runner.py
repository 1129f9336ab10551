"""Execute batches on this rank and on all others: one flat forward pass over any mix of chunks and decodes."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from crossdock.workers.model.graphs.decode_graphs import DecodeGraphs, decode_graphs
from crossdock.workers.model.graphs.mixed_graphs import MixedGraphs, mixed_graphs
from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.model.model import PagedModel
from crossdock.workers.model.pictures.shared_rows import send_rows
from crossdock.workers.model.step_messages import StepSender
from crossdock.workers.schedule.batch import Batch


@dataclass(frozen=True, slots=True)
class Runner:
    """Executes steps on one model, or on this rank's part of it. Every rank of a gang has one, with the same graphs.

    `notify_ranks` sends each batch to the other ranks; None: there are none, or another rank is the driver.
    """

    model: PagedModel
    page_size: int
    notify_ranks: Callable[[bytes], None] | None = None
    graphs: DecodeGraphs | None = None
    mixed_graphs: MixedGraphs | None = None
    _sender: StepSender = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_sender", StepSender(self.page_size))  # frozen

    @classmethod
    def recorded(
        cls,
        model: PagedModel,
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        notify_ranks: Callable[[bytes], None] | None = None,
        *,
        most_drafts: int = 0,
    ) -> "Runner":
        """Return a runner whose steps are CUDA graphs where they can be. Collective: every rank must call it."""
        graphs = decode_graphs(model, page_size, max_num_seqs)
        mixed = mixed_graphs(model, page_size, max_num_seqs, max_num_batched_tokens, graphs, most_drafts=most_drafts)
        return cls(model, page_size, notify_ranks, graphs, mixed)

    def begin(self, batch: Batch) -> tuple[StepInputs, list[range]]:
        """Encode the pictures of a batch, and send it to the other ranks, which may compute it from now on."""
        inputs, rows = StepInputs.of(batch, self.page_size)
        if self.model.encoder is not None:
            inputs = inputs.with_pictures(batch, self.model.encoder)
        pictures = inputs.pictures
        if pictures is not None and self.model.encoder is not None:
            self.model.encoder.prepare(pictures, self.model.device)
        if self.notify_ranks is not None:  # not before: a rank that waits for rows has a deadline
            self.notify_ranks(self._sender.pack(inputs, [part.request.id for part in batch.scheduled]))
            if pictures is not None:
                send_rows(self.model, pictures)
        return inputs, rows

    def is_usual(self, inputs: StepInputs) -> bool:
        """Return whether a step is computed as others of its size are: its seconds then predict theirs.

        A step with more sequences than CUDA graphs have room for, or with pictures, takes several times as long to
        launch.
        """
        if inputs.reads_pictures:
            return not self._has_graph(inputs)
        if self.mixed_graphs is None or (self.graphs is not None and self.graphs.covers(inputs)):
            return True
        return not self.mixed_graphs.misses(inputs)

    def _has_graph(self, inputs: StepInputs) -> bool:
        """Return whether a step of as many sequences and tokens, without pictures, is a CUDA graph."""
        return any(graphs is not None and graphs.covers(inputs) for graphs in (self.graphs, self.mixed_graphs))

    def finish(
        self, step: tuple[StepInputs, list[range]], previous_tokens: Tensor | None = None
    ) -> tuple[Tensor, list[range]]:
        """Compute a step. Steps are finished in the order they began.

        Returns the logits [N, vocab], valid until the next call, and each part's rows of them. `previous_tokens`: see
        `StepInputs.on`.
        """
        inputs, rows = step
        return self.compute(inputs, previous_tokens), rows

    def hidden(self, inputs: StepInputs) -> Tensor:
        """Return the last hidden states [T, E] of the step computed last, valid until the next one.

        The model's tap was open meanwhile, and is possible. Only the driver, which is on the last stage, has them.
        """
        if inputs.reads_pictures:
            found = self.model.tap.hidden
        elif self.graphs is not None and self.graphs.covers(inputs):
            found = self.graphs.hidden(inputs)
        elif self.mixed_graphs is not None and self.mixed_graphs.covers(inputs):
            found = self.mixed_graphs.hidden(inputs)
        else:
            found = self.model.tap.hidden
        assert found is not None, "the engine refuses prompts that want a vector where the model gives none"
        return found

    def compute(self, inputs: StepInputs, previous_tokens: Tensor | None = None) -> Tensor:
        """Compute this rank's part of a step; see `finish`.

        Whether it is a graph, and which one, depends on the step alone: every rank of a gang does the same.
        """
        if inputs.reads_pictures:  # recorded steps embed tokens alone, at positions of one axis
            return inputs.run(self.model, previous_tokens)
        if self.graphs is not None and self.graphs.covers(inputs):
            return self.graphs.run(inputs, previous_tokens)
        if self.mixed_graphs is not None and self.mixed_graphs.covers(inputs):
            return self.mixed_graphs.run(inputs, previous_tokens)
        return inputs.run(self.model, previous_tokens)
