"""The settings that decide how much memory a rank gives to KV pages. No torch."""

from dataclasses import dataclass

ON_CPUS = 2 << 30  # bytes


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The settings that decide how much memory KV pages get, the same for all ranks of a replica."""

    kv_cache_memory: int | None = None  # bytes; None: `ON_CPUS` on CPUs, measured on GPUs
    gpu_memory_utilization: float = 0.9  # share of the GPU's memory
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64

    def known(self, device: str) -> int | None:
        """Return the bytes of KV pages on a device of this type; None if they must be measured."""
        if self.kv_cache_memory is not None:
            return self.kv_cache_memory
        return ON_CPUS if device == "cpu" else None
