"""Counter-based randomness: Gumbel noise as a hash of (seed, position, token id), in 32-bit integers that wrap alike
on every device."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from crossdock.workers.model.sampling.devices import copy_to
from crossdock.workers.model.sampling.row import SampleRow


@lru_cache(maxsize=4)  # one model a process; tests have more
def hashed_ids(vocab_size: int, device: torch.device) -> Tensor:
    """Return a hash of every token id [V] int32: the part of the noise that all rows share."""
    return _mix32(torch.arange(vocab_size, dtype=torch.int32, device=device))


def row_keys(rows: Sequence[SampleRow], device: torch.device) -> Tensor:
    """Return two 32-bit words a row, [2, N, 1] int32, hashed from seed and position; the second is odd."""
    keys = [_mix64(_mix64(row.params.seed) + row.num_tokens) for row in rows]
    words = np.array([keys, [key >> 32 | 1 for key in keys]], dtype=np.uint64).astype(np.uint32).view(np.int32)
    return copy_to(device, torch.from_numpy(words).unsqueeze(-1))


def negative_gumbel(hashed: Tensor, keys: Tensor) -> Tensor:
    """Return minus Gumbel noise [N, K] for the tokens whose hashed ids are given, [K] or [N, K].

    A token has the same noise wherever it stands. This is the log of an exponential variate: tokens race, each at the
    rate of its probability.
    """
    bits = _mix32((hashed ^ keys[0]) * keys[1])
    # Near zero lie the likely winners, and float32 is finest there: all bits matter. At 1 the log would be infinite.
    uniform = bits.float().abs_().mul_(2.0**-31).clamp_(2.0**-32, 1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_()


def _mix32(x: Tensor) -> Tensor:
    """Wellons' lowbias32 on int32, without its last step, which stirs low bits only."""
    x = x ^ _shift_right(x, 16)
    x *= 0x7FEB352D
    x ^= _shift_right(x, 15)
    x *= 0x846CA68B - (1 << 32)
    return x


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift logically, where int32's own shift is arithmetic."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _mix64(x: int) -> int:
    """One step of splitmix64 (Steele, Lea, Flood, 2014)."""
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & mask
    return x ^ x >> 31
