"""Which model is loaded, and how it computes. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crossdock.kernels.options import AttentionBackend, CpuKernels, KVCacheDtype, LoadFormat, Quantization
from crossdock.workers.model.weights.checkpoint import resolve_model

FITTING = -1
"""`max_model_len` of a server whose longest request is what the KV pages hold, at most the model's own."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model and how it computes: the same for every rank of a replica. Crosses processes."""

    path: str | None = None  # directory, hub name (org/name@revision) or s3:// URL; None: the embedded SmolLM2-135M
    dtype: str = "auto"  # of weights and activations; auto: the checkpoint's, on CPUs bfloat16 where they have it
    max_model_len: int | None = None  # tokens, prompt and output together; None: the model's own limit
    attention_backend: AttentionBackend = "auto"
    kv_cache_dtype: KVCacheDtype = "auto"  # of KV pages; auto: the model's
    cpu_kernels: CpuKernels = "auto"  # kernels of products and prompts' attention; auto: the fastest here
    batch_invariant: bool = False  # a model whose bits depend on the batch is refused
    max_lora_rank: int = 0  # of adapters; 0: the model takes none
    max_loras: int = 0  # adapters in memory at once
    quantization: Quantization | None = None  # int8 and, of plain ones, fp8: at load; others: as stored; None: any
    load_format: LoadFormat = "auto"  # who reads the files of weights; auto: our own reader
    fits_memory: bool = False  # the longest request is at most what the KV pages hold
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)  # values in place of those of config.json

    def folder(self, *, needs_weights: bool = True) -> Path:
        """Return the directory of the model's files, whose config.json has the values of `hf_overrides`.

        `needs_weights` and ValueError: as in `resolve_model`.
        """
        return resolve_model(self.path, self.hf_overrides, needs_weights=needs_weights)
