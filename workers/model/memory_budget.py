"""The settings that decide how much memory a rank gives to KV pages. No torch."""

from dataclasses import dataclass

from pydantic import ByteSize

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

    def check_one_request_fits(
        self, num_pages: int, page_bytes: int, page_size: int, max_model_len: int, device: str
    ) -> None:
        """Raise ValueError where `num_pages` pages, of `page_size` tokens each, hold less than `max_model_len`."""
        needed = -(-max_model_len // page_size)
        if num_pages >= needed:
            return
        known = self.known(device)
        limit = f"gpu_memory_utilization ({self.gpu_memory_utilization:g}) leaves memory that"
        if known is not None:
            limit = f"kv_cache_memory ({ByteSize(known).human_readable()})"
        raise ValueError(
            f"{limit} holds {num_pages * page_size} tokens of {page_bytes // page_size} bytes; one request of "
            f"max_model_len ({max_model_len}) needs {ByteSize(needed * page_bytes).human_readable()}"
        )
