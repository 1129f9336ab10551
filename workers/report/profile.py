"""The static part of what a replica advertises to routers; the live part is in advertise.py."""

from functools import lru_cache
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

from crossdock.workers.schedule.config import SchedulerConfig
from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.memory.page_needs import PageNeeds
from crossdock.workers.schedule.memory.prefix_index import Window
from crossdock.workers.schedule.pictures.encoder_cost import EncoderCost
from crossdock.workers.schedule.policies.chunk_policies import ChunkPolicy
from crossdock.workers.schedule.prefixes.tier_pages import TierName
from crossdock.workers.schedule.request.slo import SloClass

Role: TypeAlias = Literal["mixed", "prefill", "decode"]
"""The work that a replica is assigned to. A value that can change: every replica can do all work."""

NO_ENCODE_POOLS = (
    "there are no encode pools: the replica that computes a prompt encodes its pictures; use a role of mixed, prefill "
    "or decode, and give the GPU to one of those"
)


class TierSize(BaseModel):
    """A tier below a replica's pool."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: TierName
    num_bytes: int  # of pages; 0: there is no such tier, and the rate is what it would have
    bytes_per_second: float  # of pages that are loaded


class SchedulingProfile(BaseModel):
    """The static part of what a replica advertises: fixed once the replica has started."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_model_len: int  # tokens, prompt and output together
    vocab_size: int
    page_size: int  # tokens
    num_pages: int
    windows: tuple[Window, ...] = (None,)  # of each group of layers with pages of its own
    state_pages: int = 0  # of each request's recurrent state
    max_num_batched_tokens: int  # per step
    max_num_seqs: int
    slo_classes: tuple[SloClass, ...]  # most urgent first
    chunk_policy: ChunkPolicy = "adaptive"
    idle_step_share: float = 0.25  # adaptive: longest step, as a share of the tightest promise of a first token
    enable_chunked_prefill: bool = True
    max_prefill_tokens: int = 0  # per step; 0: `max_num_batched_tokens`
    min_chunk_tokens: int = 16  # adaptive: prompt tokens that a step computes however tight the slack is
    admission: Literal["reject", "queue"] = "reject"
    role: Role = "mixed"
    compatibility: str = ""  # equal for replicas that may exchange pages: model, data type, shape of a page
    dtype: str = ""  # of weights and activations; empty: nothing is computed
    device: str = ""  # cpu or cuda; empty: nothing is computed
    weights: str = ""  # equal for replicas whose weights are equal, bit for bit, and so their tokens; empty: unknown
    page_bytes: int = 0  # 0: unknown
    tiers: tuple[TierSize, ...] = ()  # below the pool, fastest first, as measured at the start
    bytes_per_second: float = 1e9  # of page transfers to another replica; until one is measured
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    runs_ahead: bool = False  # a step begins before the one before it has ended: `EngineConfig.async_scheduling`
    caches_prefixes: bool = True
    kernels: str = ""  # which compute the matrix products of fused layers on a CPU; empty: transformers' own code does
    peer: bytes = b""  # address for KV transfers; empty: the replica makes none
    generates: bool = True  # False: a text encoder, whose requests have no output and keep no pages
    cost: StepCost  # as measured at the start
    encoder_cost: EncoderCost | None = None  # of pictures, as measured at the start; None: prompts are text alone
    encoder_tokens: int = 0  # of embeddings, that the replica keeps
    keeps_items_whole: bool = False  # chunks may not end inside a picture
    interval_share: float = 1.0  # interval of the steps of a full pipeline / seconds of one; see `IntervalShare`
    overrun: float = 1.0  # see `StepCostFit`
    is_estimate: bool = False  # computed from data sheets, not measured
    start_s: float = 0.0  # that its start took, from the process on; 0: unknown

    @classmethod
    def settings_of(cls, config: SchedulerConfig) -> dict[str, Any]:
        """Return the fields that a scheduler's settings fix."""
        names = SchedulerConfig.model_fields.keys() & cls.model_fields.keys()
        return {name: getattr(config, name) for name in names} | {"min_chunk_tokens": config.chunk_floor}

    def slowed(self, scale: float) -> "SchedulingProfile":
        """Return the profile of a device that takes `scale` times as long for everything."""
        encoder = self.encoder_cost
        return self.model_copy(
            update={
                "cost": self.cost.slowed(scale),
                "encoder_cost": encoder and encoder.slowed(scale),
                "bytes_per_second": self.bytes_per_second / scale,
            }
        )

    @property
    def needs(self) -> PageNeeds:
        """Return how the pages of a request are counted."""
        return _needs(self.page_size, self.windows, self.max_num_batched_tokens, self.state_pages)

    @property
    def token_bytes(self) -> int:
        """Return the bytes of pages that a token takes while every group sees the token."""
        return len(self.windows) * self.page_bytes // self.page_size


_needs = lru_cache(PageNeeds)  # routers ask for each request, and replicas are alike
