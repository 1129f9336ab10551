"""Opens the tiers that an engine's settings ask for, under a fingerprint of all that a page's bytes depend on."""

import hashlib

from crossdock.workers.model.model import LoadedModel
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.ranks.pool_layout import held_layers, pool_spec
from crossdock.workers.replica.tiers.file_tier import FileTier
from crossdock.workers.replica.tiers.tier_store import TierStore


def open_tiers(model: LoadedModel, config: EngineConfig, weights: str, num_pages: int) -> TierStore | None:
    """Return the tiers below the pool of a model of one rank; None: the settings ask for none.

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
    most_pages = max(model.state_pages(config.page_size), 1)
    return TierStore(model.pool.by_page, host_bytes, files, most_pages)


def _fingerprint(model: LoadedModel, config: EngineConfig, weights: str, num_pages: int) -> bytes:
    """Return 16 bytes that differ where a page's bytes would mean something else."""
    spec = pool_spec([held_layers(model)], 0, model, weights, config.page_size, num_pages)
    text = f"{spec.compatibility} {spec.page_bytes} {model.state_pages(config.page_size)}"
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
