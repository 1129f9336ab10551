"""The settings that decide how much memory a rank gives to KV pages. No torch."""

from dataclasses import dataclass

from pydantic import ByteSize

from crossdock.workers.schedule.memory.page_needs import PageNeeds

ON_CPUS = 2 << 30  # bytes


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The settings that decide how much memory KV pages get, the same for all ranks of a replica."""

    kv_cache_memory: int | None = None  # bytes; None: `ON_CPUS` on CPUs, measured on GPUs
    gpu_memory_utilization: float = 0.9  # share of the GPU's memory
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    most_drafts: int = 0  # of one stream in a step; 0: there is no speculation
    mm_encoder_cache: int = 256 << 20  # bytes of embeddings of pictures

    def known(self, device: str) -> int | None:
        """Return the bytes of KV pages on a device of this type; None if they must be measured."""
        if self.kv_cache_memory is not None:
            return self.kv_cache_memory
        return ON_CPUS if device == "cpu" else None

    def check_one_request_fits(
        self, num_pages: int, page_bytes: int, needs: PageNeeds, max_model_len: int, device: str
    ) -> None:
        """Raise ValueError where one request of `max_model_len` tokens needs more than `num_pages` pages."""
        needed = needs.at_most(max_model_len)
        if num_pages >= needed:
            return
        known = self.known(device)
        limit = f"gpu_memory_utilization ({self.gpu_memory_utilization:g}) leaves memory that"
        if known is not None:
            limit = f"kv_cache_memory ({ByteSize(known).human_readable()})"
        held = f"{num_pages * needs.page_size} tokens of {page_bytes // needs.page_size} bytes"
        if len(needs.windows) > 1 or needs.state_pages:
            held = f"{num_pages} pages of {page_bytes} bytes"
        raise ValueError(
            f"{limit} holds {held}; one request of max_model_len ({max_model_len}) needs "
            f"{ByteSize(needed * page_bytes).human_readable()}"
        )
