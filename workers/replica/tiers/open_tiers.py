"""Opens the tiers that an engine's settings ask for, under a fingerprint of all that a page's bytes depend on."""

import hashlib

from crossdock.workers.model.model import LoadedModel
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.ranks.gang import Gang
from crossdock.workers.replica.ranks.pool_layout import held_layers, pool_spec
from crossdock.workers.replica.tiers.file_tier import FileTier
from crossdock.workers.replica.tiers.page_copies import PoolCopies
from crossdock.workers.replica.tiers.tier_store import TierStore

_STAGING_BYTES = 64 << 20  # of host memory on the way to files, where no memory is given to pages


def open_tiers(
    model: LoadedModel, config: EngineConfig, weights: str, num_pages: int, gang: Gang | None
) -> TierStore | None:
    """Return the tiers below the pool of a model; None: the settings ask for none. `gang`: the other ranks.

    `weights` names the weights. Raises ValueError: the folder cannot be written to, or the memory is too small.
    """
    folder, most_bytes = config.kv_files
    host_bytes = int(config.kv_cache_host_memory or 0)
    if folder is None and not host_bytes:
        return None
    files = None
    if folder is not None:
        assert weights, "files outlive the engine: their pages are of named weights"
        files = FileTier(folder.expanduser(), most_bytes, _fingerprint(model, config, weights, num_pages))
    pages, most_pages = model.pool.by_page, max(model.state_pages(config.page_size), 1)
    page_bytes = pages.shape[1] if gang is None else gang.page_bytes
    if 0 < host_bytes < most_pages * page_bytes:
        raise ValueError(f"kv_cache_host_memory ({host_bytes}) must be at least {most_pages * page_bytes} bytes")
    num_slots = host_bytes // page_bytes or max(_STAGING_BYTES // page_bytes, 2 * most_pages)
    copies = PoolCopies(pages, num_slots + most_pages, None if gang is None else gang.broadcast)
    return TierStore(copies, page_bytes, files, stay=host_bytes > 0, most_pages=most_pages)


def _fingerprint(model: LoadedModel, config: EngineConfig, weights: str, num_pages: int) -> bytes:
    """Return 16 bytes that differ where a page's bytes would mean something else."""
    spec = pool_spec([held_layers(model)], 0, model, weights, config.page_size, num_pages)
    text = f"{spec.compatibility} {spec.page_bytes} {model.state_pages(config.page_size)}"
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
