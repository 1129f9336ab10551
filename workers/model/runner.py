"""Execute batches on this rank and on all others: one flat forward pass over any mix of chunks and decodes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from crossdock.workers.model.graphs.decode_graphs import DecodeGraphs, decode_graphs, verify_graphs
from crossdock.workers.model.graphs.mixed_graphs import MixedGraphs, mixed_graphs
from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.shared_rows import send_rows
from crossdock.workers.model.step_messages import StepSender
from crossdock.workers.schedule.drafts.drafting import DraftRoom
from crossdock.workers.schedule.request.batch import Batch


class RecordedSizes(NamedTuple):
    """The largest steps that are recorded."""

    max_num_seqs: int
    max_num_batched_tokens: int
    most_drafts: int = 0  # that a step verifies for one stream; 0: there is no speculation


@dataclass(slots=True)
class Runner:
    """Executes steps on one model, or on this rank's part of it. Every rank of a group has one, with the same graphs.

    `notify_ranks` sends each batch to the other ranks; None: there are none, or another rank is the driver.
    """

    model: LoadedModel
    page_size: int
    notify_ranks: Callable[[bytes], None] | None = None
    graphs: Sequence[DecodeGraphs | MixedGraphs] = ()  # of steps that are recorded; other steps run kernel by kernel
    graphs_text: str = ""  # which steps run as CUDA graphs, and why others do not; empty: none, and none could
    _sizes: RecordedSizes | None = None  # None: nothing is to be recorded
    _sender: StepSender = field(init=False)

    def __post_init__(self) -> None:
        self._sender = StepSender(self.page_size)

    @classmethod
    def recorded(
        cls,
        model: LoadedModel,
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        notify_ranks: Callable[[bytes], None] | None = None,
        *,
        most_drafts: int = 0,
    ) -> "Runner":
        """Return a runner whose steps are CUDA graphs where they can be. Collective: every rank must call it."""
        sizes = RecordedSizes(max_num_seqs, max_num_batched_tokens, most_drafts)
        runner = cls(model, page_size, notify_ranks, _sizes=sizes)
        runner.record()
        return runner

    def record(self) -> None:
        """Record the steps, if they are to be recorded: over the memory that the model has now. Collective."""
        if self._sizes is None:
            return
        sizes = self.page_size, *self._sizes[:2]
        most_drafts = self._sizes.most_drafts
        decodes, self.graphs_text = decode_graphs(self.model, *sizes[:2])
        if decodes is None:
            return
        verifying = None
        if most_drafts:
            verifying, further = verify_graphs(self.model, *sizes[:2], most_drafts, decodes)
            self.graphs_text += further
        mixed, further = mixed_graphs(self.model, *sizes, decodes, most_drafts=most_drafts)
        self.graphs_text += further
        self.graphs = [each for each in (decodes, verifying, mixed) if each is not None]

    def forget(self) -> None:
        """Forget what is recorded, before its memory moves. Steps run kernel by kernel until `record`."""
        self.graphs = ()

    def begin(self, batch: Batch) -> tuple[StepInputs, list[range]]:
        """Encode the pictures of a batch, and send it to the other ranks, which may compute it from now on."""
        inputs, rows = StepInputs.of(batch, self.page_size)
        if self.model.encoder is not None:
            inputs = inputs.with_pictures(batch, self.model.encoder)
            if inputs.pictures is not None:
                self.model.encoder.prepare(inputs.pictures, self.model.device)
        if self.notify_ranks is not None:  # not before: a rank that waits for rows has a deadline
            self.notify_ranks(self._sender.pack(inputs, [part.request.id for part in batch.scheduled]))
            if inputs.pictures is not None:
                send_rows(self.model, inputs.pictures)
        return inputs, rows

    def is_usual(self, inputs: StepInputs) -> bool:
        """Return whether a step is computed like others of its size, so that its seconds predict theirs.

        A step with more sequences than CUDA graphs have room for, or with pictures, takes several times as long to
        launch, and so does one with adapters that graphs do not compute. Before some steps experts move.
        """
        if self.model.balance is not None and self.model.balance.is_moving:
            return False
        if self._is_never_recorded(inputs):
            return not any(graphs.covers(inputs) for graphs in self.graphs)
        return self._graphs_for(inputs) is not None or not any(graphs.misses(inputs) for graphs in self.graphs)

    def _graphs_for(self, inputs: StepInputs) -> DecodeGraphs | MixedGraphs | None:
        """Return the graphs that a step runs as; None: it runs kernel by kernel.

        Recorded steps embed tokens alone, at positions of one axis. They have adapters where Triton computes them.
        """
        if self._is_never_recorded(inputs):
            return None
        return next((graphs for graphs in self.graphs if graphs.covers(inputs)), None)

    def _is_never_recorded(self, inputs: StepInputs) -> bool:
        """Return whether a step runs kernel by kernel whatever its size."""
        lacks_adapters = bool(inputs.adapters) and not all(graphs.has_adapters for graphs in self.graphs)
        return inputs.reads_pictures or lacks_adapters

    def finish(
        self, step: tuple[StepInputs, list[range]], previous_tokens: Tensor | None = None
    ) -> tuple[Tensor, list[range]]:
        """Compute a step. Steps are finished in the order they began.

        Returns the logits [N, vocab], valid until the next call, and each part's rows of them. `previous_tokens`: see
        `StepInputs.on`.
        """
        inputs, rows = step
        return self.compute(inputs, previous_tokens), rows

    def finish_pooled(
        self, step: tuple[StepInputs, list[range]], previous_tokens: Tensor | None = None
    ) -> tuple[tuple[Tensor, list[range]], Tensor]:
        """Compute a step as `finish` does. Returns its result, and its last hidden states [T, E].

        Both are valid until the next call. Only the driver, on the last stage, has hidden states.
        """
        with self.model.tap.opened():
            computed = self.finish(step, previous_tokens)
            return computed, self._hidden(step[0])

    @property
    def draft_room(self) -> DraftRoom | None:
        """Return the drafts for which steps are recorded; None: no step is recorded at all."""
        if not self.graphs:
            return None
        alone = (graphs for graphs in self.graphs if isinstance(graphs, DecodeGraphs) and graphs.verifies)
        rows = next((graphs.most_rows for graphs in alone), 0)
        beside = next((graphs.verified for graphs in self.graphs if isinstance(graphs, MixedGraphs)), (0, 0))
        return DraftRoom(rows, *beside)

    def replay_of(self, num_decodes: int) -> Callable[[], None] | None:
        """Return the graph alone of so many decodes, for measurements; None: they are not recorded."""
        return next((each.replay_of(num_decodes) for each in self.graphs if isinstance(each, DecodeGraphs)), None)

    def wait(self) -> None:
        """Wait until the device has computed all steps."""
        self.model.wait()

    @property
    def num_stages(self) -> int:
        return self.model.part.position.num_stages

    def _hidden(self, inputs: StepInputs) -> Tensor:
        graphs = self._graphs_for(inputs)
        found = self.model.tap.hidden if graphs is None else graphs.hidden(inputs)
        assert found is not None, "the engine refuses prompts that want a vector where the model gives none"
        return found

    def compute(self, inputs: StepInputs, previous_tokens: Tensor | None = None) -> Tensor:
        """Compute this rank's part of a step; see `finish`.

        Whether it is a graph, and which one, depends on the step alone: every rank of a worker group does the same.
        """
        if self.model.balance is not None:
            self.model.balance.before_step()
        if (claim := self.model.pool.before_step) is not None:
            claim(inputs.written_pages(self.page_size))
        graphs = self._graphs_for(inputs)
        return inputs.run(self.model, previous_tokens) if graphs is None else graphs.run(inputs, previous_tokens)
