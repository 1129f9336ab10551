"""Why a call of the encoder failed: the picture is at fault, or memory was short, which passes."""

import torch

from crossdock.workers.schedule.pictures.encoding import ItemFailure

_SHORT = ("out of memory", "not enough memory", "can't allocate memory", "alloc_failed")
"""In errors that are plain `RuntimeError`s: of CUDA, of the CPU's allocator (two), of cuBLAS."""


def is_passing(error: Exception) -> bool:
    """Return whether memory was too short for the call, which may then succeed another time."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _SHORT)


def item_failure(error: Exception) -> ItemFailure:
    """Return why an item has no embeddings, for the requests that read it."""
    if is_passing(error):
        reason = f"memory was short when a picture was encoded; the same request may succeed later: {error}"
        return ItemFailure(reason, is_passing=True)
    return ItemFailure(f"a picture cannot be encoded: {type(error).__name__}: {error}", is_passing=False)
