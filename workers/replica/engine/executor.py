"""All that an engine runs its steps on: a model (computing.py) or an emulated device (emulated.py). No torch."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from crossdock.kvtransfer.layout import PoolSpec
from crossdock.kvtransfer.transport import Memory
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.schedule.adapter_slots import AdapterSlots, SlotChange
from crossdock.workers.schedule.drafts.drafting import DraftPolicy
from crossdock.workers.schedule.memory.pages import PagePool
from crossdock.workers.schedule.pictures.encoding import Encoding
from crossdock.workers.schedule.request.batch import Batch, SampledToken
from crossdock.workers.schedule.request.request import Request, TokenDelta
from crossdock.workers.schedule.request.submission import Grammar, SamplingParams

if TYPE_CHECKING:  # what only a model needs imports torch
    from crossdock.workers.draft.head_drafter import HeadDrafter
    from crossdock.workers.model.model import LoadedModel
    from crossdock.workers.replica.engine.weight_update import WeightUpdate
    from crossdock.workers.replica.ranks.rank_messages import MemoryChange
    from crossdock.workers.replica.ranks.step_deadline import StepDeadline
    from crossdock.workers.replica.ranks.worker_group import WorkerGroup
    from crossdock.workers.replica.tiers.tier_store import TierStore


class StepRunner(Protocol):
    """Computes the steps of a pipeline: `Runner` on a model, `EmulatedRunner` by waiting. Its values are opaque."""

    @property
    def graphs_text(self) -> str: ...

    @property
    def num_stages(self) -> int:
        """How many steps are computed at a time, each by a stage of its own."""

    def begin(self, batch: Batch) -> tuple[Any, list[range]]:
        """Begin to compute a step. Returns its inputs, and each part's rows of the result."""

    def is_usual(self, inputs: Any) -> bool:
        """Return whether a step is computed like others of its size, so that its seconds predict theirs."""

    def finish(self, step: tuple[Any, list[range]], previous_tokens: Any = None) -> tuple[Any, list[range]]:
        """Compute a step that has begun. Returns what the sampler draws from, and each part's rows of that."""

    def finish_pooled(
        self, step: tuple[Any, list[range]], previous_tokens: Any = None
    ) -> tuple[tuple[Any, list[range]], Any]:
        """Compute a step as `finish` does. Returns its result, and the last hidden states of its tokens."""

    def wait(self) -> None:
        """Wait until all steps are computed."""


class Drawn(Protocol):
    """The tokens of a step, which the device has begun to draw."""

    @property
    def on_device(self) -> Any:
        """The tokens on the device."""

    def read(self, void: Collection[str] = ()) -> tuple[Mapping[str, SampledToken], Collection[str]]:
        """Wait for the tokens. Returns them by request, and the requests whose token only the host could draw.

        `void`: the requests whose part of the step began with a wrong token, and does not count."""


class TokenSampler(Protocol):
    """Draws the tokens of steps: `StepSampler` from logits, `EmulatedSampler` by request and position."""

    def add(self, request: Request, grammar: Any = None) -> None: ...

    def accept(self, request_id: str, token_id: int) -> None: ...

    def remove(self, request_id: str) -> None: ...

    def complete(self, deltas: Sequence[TokenDelta]) -> None:
        """Add log-probabilities and vectors of prompts to the first delta after them."""

    def pool(self, batch: Batch, hidden: Any) -> None:
        """Pool the hidden states of prompts that want a vector."""

    def reads_tokens(self, batch: Batch) -> bool:
        """Return whether tokens of the step before must be on the host before `batch` is drawn."""

    def draw(self, batch: Batch, logits: Any, rows: Sequence[range], previous_tokens: Any = None) -> Drawn: ...

    def sample(self, batch: Batch, logits: Any, rows: Sequence[range]) -> Mapping[str, SampledToken]: ...


class Grammars(Protocol):
    """Compiles the grammars of requests."""

    def warm_up(self) -> None: ...

    def compile(self, grammar: Grammar, token_ids: Sequence[int] = ()) -> Any:
        """Return the state of a grammar after `token_ids`. InvalidField: the grammar cannot be served."""

    def close(self) -> None: ...

    async def compiled(
        self, grammar: Grammar, token_ids: Sequence[int] = (), may_refuse: bool = True, owner: str = ""
    ) -> Any: ...


class Drafts(Protocol):
    """Guesses the next tokens of streams: `Speculation`, and `SimulatedDrafts`."""

    @property
    def policy(self) -> DraftPolicy: ...

    def add(self, request: Request) -> None: ...

    def remove(self, request_id: str) -> None: ...

    def drafts(self, wanted: Mapping[str, int]) -> dict[str, Sequence[int]]:
        """Return at most so many drafts for each request."""


class AdapterLoads(Protocol):
    """Loads adapters beside the steps: `AdapterLoader`, and `SimulatedAdapterLoads`."""

    on_done: list[Callable[[], None]]

    def begin(self, changes: Sequence[SlotChange]) -> None: ...

    def take_in(self, slots: AdapterSlots) -> list[tuple[Request, str]]:
        """Note the loads that have ended. Returns the requests that cannot be served, each with the reason."""

    def check(self, folder: Path) -> None:
        """Check that the adapter in a folder can be served. ValueError, OSError: it cannot."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Executor:
    """Everything that an engine gets from its device, complete at construction."""

    config: EngineConfig  # its sizes are known
    runner: StepRunner
    sampler: TokenSampler
    grammars: Grammars
    pages: PagePool
    memory: Callable[[], Memory]  # where the pages are now
    max_model_len: int
    vocab_size: int
    eos_token_ids: Collection[int]
    is_ahead: bool  # see `Pipeline`
    check: Callable[[SamplingParams], None]  # raises InvalidField for what the device cannot answer
    spec_of: Callable[[str], PoolSpec]  # the KV pool as other replicas must know it, by the name of the weights
    model: "LoadedModel | None" = None  # None: the device is emulated
    encoding: Encoding | None = None  # None: prompts are text alone, see `why_text_alone`
    why_text_alone: str = ""
    cpu_kernels: str = ""  # which compute the matrix products of fused layers on a CPU; empty: none are named
    speculation: Drafts | None = None
    head: "HeadDrafter | None" = None  # drafts for `speculation` from the hidden states of steps; None: nothing does
    adapters: AdapterLoads | None = None  # None: it takes no adapters
    new_weights: "WeightUpdate | None" = None  # None: the device is emulated, and has no weights
    change_memory: "Callable[[MemoryChange], None] | None" = None  # of all ranks; None: the device is emulated
    tiers: "TierStore | None" = None
    worker_group: "WorkerGroup | None" = None
    row_tile: int = 1  # rows that products on this device compute at a time
    step_deadline: "Callable[[], StepDeadline] | None" = None  # of a GPU's steps from now on; None: none is kept
