"""The settings of one replica: its model, its engine and its KV transfers. No torch, no ray."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, TypeAdapter, model_validator

from crossdock.kernels.options import (
    ROUNDED_AT_LOAD,
    AttentionBackend,
    CpuKernels,
    KVCacheDtype,
    LoadFormat,
    Quantization,
)
from crossdock.workers.model.memory.memory_budget import MemoryBudget
from crossdock.workers.model.model_spec import FITTING, ModelSpec
from crossdock.workers.report.kv_events import KVEventsConfig
from crossdock.workers.report.profile import Role, SchedulingProfile
from crossdock.workers.schedule.config import SchedulerConfig
from crossdock.workers.schedule.drafts.speculative_config import SpeculativeConfig
from crossdock.workers.schedule.memory.page_events import PageEvents

Device: TypeAlias = Literal["cpu", "cuda"]

_GIB = 1 << 30
_BYTES = TypeAdapter(ByteSize)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The default of `max_num_batched_tokens` and of `max_num_seqs` on a device."""

    tokens: int
    requests: int

    @classmethod
    def of_device(cls, name: str, memory: int) -> Self:
        """Return the defaults for a GPU by its name and its bytes of memory; 0 bytes: a CPU.

        GPUs have the defaults of `vllm serve` 0.32. On an A100, larger chunks are not faster, whatever its memory.
        """
        if memory == 0:
            return cls(2048, 64)
        if memory >= 160 * _GIB:
            return cls(16384, 1024)
        if memory >= 70 * _GIB and "a100" not in name.lower():
            return cls(8192, 1024)
        return cls(2048, 256)


class EngineConfig(SchedulerConfig):
    """The resources and the features of an engine. Scheduling fields come from `SchedulerConfig`."""

    max_num_batched_tokens: int = Field(
        0,
        ge=0,
        description="Tokens one step may compute, decodes and chunks together; the adaptive ceiling. 0: by the device, "
        "2048 on CPUs, on GPUs as in vLLM (8192 from 70 GiB); without chunks at least the context.",
    )
    max_num_seqs: int = Field(
        0,
        ge=0,
        description="Requests that may hold pages at once. 0: by the device, 64 on CPUs, on GPUs as in vLLM (1024 from "
        "70 GiB, else 256), and no more than fit max_num_batched_tokens.",
    )
    enable_prefix_caching: bool = Field(True, description="Share pages between requests with equal beginnings.")
    kv_cache_memory: ByteSize | None = Field(
        None, description="Memory for KV pages of each rank, e.g. 2GiB; null: 2GiB on CPUs, on GPUs what is left."
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Share of the GPU's memory that a rank may use in all, if kv_cache_memory is null."
    )
    kv_cache_host_memory: ByteSize | None = Field(
        None, gt=0, description="Memory of the host for KV pages that leave the pool, e.g. 8GiB; null: none."
    )
    kv_cache_files: str | None = Field(
        None,
        json_schema_extra={"format": "path"},
        description="Folder for KV pages that leave the pool, and its size, e.g. /var/cache/kv,100GiB; null: none. "
        "Replicas share it, and find its pages after a restart. Also the URL of an object store, s3://bucket/kv,1TiB.",
    )
    mm_encoder_cache: ByteSize = Field(
        ByteSize(256 << 20),
        gt=0,
        description="Memory for embeddings of pictures, e.g. 256MiB. A picture is encoded once while it is in there.",
    )
    disable_hybrid_kv_cache_manager: bool = Field(
        False, description="Keep the pages of layers with a sliding window or attention chunks as long as others."
    )
    enforce_eager: bool = Field(False, description="On GPUs: no steps as CUDA graphs.")
    async_scheduling: bool | None = Field(
        None,
        description="Begin a step before the tokens of the one before it are known; null: on GPUs, of one stage.",
    )
    speculative_config: SpeculativeConfig | None = Field(
        None,
        description="Draft tokens and verify several of a stream in one step, as JSON with vLLM's names; null: do not.",
    )
    kv_events_config: KVEventsConfig | None = Field(
        None,
        description="Publish over ZMQ which pages are cached, as JSON with vLLM's names; null: do not. Events have the "
        "tokens of prompts, and every process that reaches the port reads them.",
    )
    kv_cache_dtype: KVCacheDtype = Field(
        "auto", description="Dtype of KV pages; auto: the model's; fp8 (e4m3) holds twice as many tokens as bfloat16."
    )
    attention_backend: AttentionBackend = Field(
        "auto", description="Implementation of attention; auto: our C++ on CPUs and Triton on GPUs."
    )
    cpu_kernels: Annotated[CpuKernels, BeforeValidator(lambda value: "native" if value == "own" else value)] = Field(
        "auto",
        description="Kernels of matrix products and of prompts' attention on CPUs; auto: native for plain weights, and "
        "for others and attention the fastest, measured at the first start; "
        "int8: for packed weights, rounds rows to int8. Version 0.1 also takes own, the old name of native.",
    )
    batch_invariant: bool = Field(
        False,
        description="A request's tokens and logprobs are the same bits alone and in any batch, chunks, prefix or "
        "preemption; a model that cannot is refused. On CPUs by cpu_kernels native, on GPUs by Triton; costs speed.",
    )
    quantization: Quantization | None = Field(
        None,
        description="fp8: round plain weights to e4m3 as they are loaded, a scale for each output; int8: the same with "
        "integers, on CPUs with AVX512-VNNI or AVX2 alone; null: as they are. Other values, and fp8 of a checkpoint in "
        "FP8, ask for one that is stored so; its own configuration says so too.",
    )
    load_format: LoadFormat = Field(
        "auto",
        description="Who reads the files of weights. auto and safetensors: our own reader; runai_streamer and "
        "fastsafetensors: the package of that name. A model in an object store is read by runai_streamer.",
    )
    enable_lora: bool = Field(False, description="Take LoRA adapters beside the base model, in the same batches.")
    max_loras: int = Field(
        8, ge=1, description="Adapters that a replica holds at once; the least recently used one makes way for others."
    )
    max_lora_rank: int = Field(16, ge=1, le=512, description="Largest rank of an adapter.")
    log_chunks: bool = Field(
        False, description="Log a line for each chunk: request, tokens, predicted seconds, and why it is no longer."
    )
    fault_token_ids: tuple[int, ...] = Field(
        (), description="For tests alone: a prompt with these tokens side by side kills every replica it is sent to."
    )

    @model_validator(mode="after")
    def _drafts_follow_known_tokens(self) -> "EngineConfig":
        if self.speculative_config is not None and self.async_scheduling:
            raise ValueError(
                "async_scheduling must be false or null with speculative_config: drafts continue the tokens of the "
                "step before, which must be known"
            )
        return self

    @model_validator(mode="after")
    def _batches_change_no_bits(self) -> "EngineConfig":
        if not self.batch_invariant:
            return self
        wrong = {
            "cpu_kernels": (
                self.cpu_kernels,
                "auto, native or int8: other products add in an order that the batch decides",
            ),
            "attention_backend": (self.attention_backend, "auto or triton: others cut contexts as the batch decides"),
            "enable_lora": (self.enable_lora, "false: the products of adapters are computed by their rows of a step"),
        }
        for name, (value, needed) in wrong.items():
            if value not in ("auto", "native", "int8", "triton", False):
                raise ValueError(f"{name} is {value!r}; with batch_invariant it must be {needed}")
        return self

    @model_validator(mode="after")
    def _tiers_hold_prefixes(self) -> "EngineConfig":
        place, _ = self.kv_files
        if (place or self.kv_cache_host_memory) and not self.enable_prefix_caching:
            raise ValueError(
                "kv_cache_host_memory and kv_cache_files must be null without enable_prefix_caching: they hold prefixes"
            )
        return self

    @model_validator(mode="after")
    def _events_are_of_prefixes(self) -> "EngineConfig":
        if self.kv_events is not None and not self.enable_prefix_caching:
            raise ValueError("kv_events_config must be null without enable_prefix_caching: no page is cached then")
        return self

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """Return how events of cached pages are published; None: none are."""
        config = self.kv_events_config
        return config if config is not None and config.is_on else None

    def new_page_events(self) -> PageEvents | None:
        """Return where an engine takes down the events that it publishes; None: it publishes none."""
        return None if self.kv_events is None else PageEvents(self.page_size)

    @property
    def kv_files(self) -> tuple[str, int]:
        """Return the folder or the URL of `kv_cache_files`, and the bytes that may be there. Empty: there is none.

        Raises:
            ValueError: the value is no folder and size.
        """
        if self.kv_cache_files is None:
            return "", 0
        place, _, size = self.kv_cache_files.rpartition(",")
        try:
            most_bytes = int(_BYTES.validate_python(size))
        except ValueError:
            most_bytes = 0
        if not place or most_bytes <= 0:
            raise ValueError(
                f"kv_cache_files must be a folder and a size, /var/cache/kv,100GiB, not {self.kv_cache_files!r}"
            )
        return place, most_bytes

    def sized(self, defaults: StepSizes, max_model_len: int) -> Self:
        """Return the configuration with the numbers that are left to the device. ValueError: numbers do not fit."""
        tokens = self.max_num_batched_tokens
        requests = self.max_num_seqs
        if not tokens:
            whole = 0 if self.enable_chunked_prefill else max_model_len
            tokens = max(defaults.tokens, whole, requests + self.page_size)
        if not requests:
            requests = max(min(defaults.requests, tokens - self.page_size), 1)
        return self.model_validate(self.model_dump() | {"max_num_batched_tokens": tokens, "max_num_seqs": requests})

    @property
    def most_drafts(self) -> int:
        """Return how many drafts a step may verify for one stream; 0: there is no speculation."""
        return 0 if self.speculative_config is None else self.speculative_config.num_speculative_tokens

    @property
    def rounds_to(self) -> Quantization | None:
        """Return the codes that plain weights are rounded to as they are loaded; None: they stay."""
        return self.quantization if self.quantization in ROUNDED_AT_LOAD else None

    @property
    def budget(self) -> MemoryBudget:
        """Return the settings that decide how much memory a rank gives to KV pages."""
        return MemoryBudget(
            None if self.kv_cache_memory is None else int(self.kv_cache_memory),
            self.gpu_memory_utilization,
            self.max_num_batched_tokens,
            self.max_num_seqs,
            self.most_drafts,
            int(self.mm_encoder_cache),
        )

    def model_spec(
        self,
        path: str | None,
        dtype: str = "auto",
        max_model_len: int | None = None,
        hf_overrides: Mapping[str, Any] | None = None,
    ) -> ModelSpec:
        """Return the spec of a model that runs with these settings; arguments as in `ModelSpec`."""
        kernels = "native" if self.batch_invariant and self.cpu_kernels == "auto" else self.cpu_kernels
        return ModelSpec(
            path,
            dtype,
            None if max_model_len == FITTING else max_model_len,
            self.attention_backend,
            self.kv_cache_dtype,
            kernels,
            batch_invariant=self.batch_invariant,
            quantization=self.quantization,
            load_format=self.load_format,
            max_lora_rank=self.max_lora_rank if self.enable_lora else 0,
            max_loras=self.max_loras,
            fits_memory=max_model_len == FITTING,
            hf_overrides=hf_overrides or {},
        )


class TransferConfig(BaseModel):
    """How KV pages are transferred between replicas."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    transport: Literal["auto", "nixl", "tcp"] = Field(
        "auto", description="auto: nixl where it is installed, else tcp; all replicas must use the same."
    )
    host: str | None = Field(
        None, description="Address at which others reach a replica's transfers; null: the node's own in the cluster."
    )
    deadline_s: float = Field(10.0, gt=0, description="Seconds for which the other side of a transfer may be silent.")
    grace_s: float = Field(
        1.0, ge=0, description="Seconds after a writer's death in which its writes might still land."
    )
    checksum: bool = Field(
        False,
        description="Send KV pages with a CRC-32, and compute again what arrives otherwise. Not for pools on GPUs.",
    )


class EplbConfig(BaseModel):
    """When whole experts move between the ranks of a replica, and how many copies hot ones have. Names and defaults as
    in vLLM."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_redundant_experts: int = Field(
        0, ge=0, description="Copies of experts in each layer, on all its ranks together; 0: experts move, without any."
    )
    window_size: int = Field(1000, ge=1, description="Steps whose rows are counted, at most step_interval.")
    step_interval: int = Field(3000, ge=1, description="Steps from one rearrangement of experts to the next.")
    log_balancedness: bool = Field(False, description="Log how evenly rows are divided among ranks; 1 is even.")
    log_balancedness_interval: int = Field(1, ge=1, description="Steps from one such line of the log to the next.")


@dataclass(frozen=True, slots=True)
class EmulatedDevice:
    """A device whose steps take the seconds of a profile. Crosses processes."""

    name: str
    profile: SchedulingProfile


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """Everything that a replica is started with, the same for each of its ranks. Crosses processes."""

    model: ModelSpec
    engine: EngineConfig
    num_threads: int  # of each rank
    tokenizer: str | None = None  # directory or hub name; None: the model's
    role: Role = "mixed"
    transfer: TransferConfig | None = None  # None: no replica of the cluster sends KV pages
    mixes_weights: bool = False  # whether it exchanges pages with replicas of unlike weights
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_expert_parallel: bool | None = False
    """Whole experts on each tensor rank, where the model allows it; None: the ranks choose before they load."""
    eplb: EplbConfig | None = None  # of whole experts that move between ranks; None: they stay
    rank_timeout_s: float = 60.0  # a rank that takes longer for its part of one step counts as hung
    start_timeout_s: float = 900.0  # until all ranks have loaded their parts
    emulated: EmulatedDevice | None = None  # in place of one that computes
    lora_modules: Mapping[str, str] = field(default_factory=dict)  # folders of the start's adapters, by name
    device: Device | None = None  # of each rank; None: a GPU where torch finds one, else the CPU

    def weights_of(self, checkpoint: str) -> str:
        """Return a name for the weights that products read, by the name of the checkpoint."""
        quantization = self.model.quantization
        return f"{checkpoint} {quantization}" if quantization in ROUNDED_AT_LOAD else checkpoint

    def name_of_kept_pages(self, checkpoint: str) -> str:
        """Return a name for the weights of pages in files: where weights are mixed, some are of other replicas."""
        return f"{self.weights_of(checkpoint)}{' and others' * self.mixes_weights}"

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size
