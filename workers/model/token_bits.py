"""Masks of tokens as bits: 32 tokens in a word, the lowest bit first."""

import numpy as np
import torch
from torch import Tensor


def unpacked(mask: Tensor, vocab_size: int) -> Tensor:
    """Return a mask as [V] bool, of its bits [ceil(V/32)] int32 on the CPU. A mask of bool is returned as it is."""
    if mask.dtype is torch.bool:
        return mask
    bits = np.unpackbits(mask.numpy().view(np.uint8), count=vocab_size, bitorder="little")
    return torch.from_numpy(bits.view(np.bool_))


def packed(mask: Tensor) -> Tensor:
    """Return the bits of a mask [V] bool on the CPU, [ceil(V/32)] int32."""
    words = np.zeros(-(-len(mask) // 32), np.int32)
    bits = np.packbits(mask.numpy(), bitorder="little")
    words.view(np.uint8)[: len(bits)] = bits
    return torch.from_numpy(words)
