"""The scales of e4m3 pages, from a measured pass: in each layer two for every head, of its keys and of its values.

Replicas may exchange pages only if their scales are equal. Yet each replica computes its own, and sums differ in their
last bits between tensor-parallel sizes and devices. So scales are computed in float32, whatever the model's dtype, and
rounded up to powers of two. These differ only where the last bits of a float32 decide which power is next. (In bfloat16
the largest elements of SmolLM2-135M are off by 1 % on average, and one of its 180 powers by one.) A power of two costs
no accuracy: e4m3 is a float, which stores 4 bits of an element at any scale, and scaling by a power is exact.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from crossdock.kernels.attention import E4M3_MAX

_NUM_TOKENS = 256
_HEADROOM = 4.0
"""How much larger than the measured largest an element may be before it is clamped. On English text the largest
elements of SmolLM2-135M's heads are 0.5 to 2 times as large. It costs two of the 15 powers of two over which e4m3
stores 4 bits."""


def example_text(max_model_len: int, vocab_size: int) -> Tensor:
    """Return the token ids to measure with, [T] int64: spread over the vocabulary, and the same everywhere."""
    return torch.arange(min(_NUM_TOKENS, max_model_len)) * 7919 % vocab_size


def scale_for(largest: Tensor) -> Tensor:
    """Return the scales [Hkv] float32, powers of two, of heads whose largest magnitudes are `largest` [Hkv]."""
    _, exponent = torch.frexp(largest.float() * (_HEADROOM / E4M3_MAX))
    return torch.ldexp(torch.ones_like(largest, dtype=torch.float32), exponent)


def exponents(scale: Tensor) -> list[int]:
    """Return the exponents of scales that are powers of two, to send to other ranks and replicas."""
    numbers: list[int] = (torch.frexp(scale)[1] - 1).tolist()
    return numbers


def fingerprint_of(heads: Iterable[Sequence[int]]) -> str:
    """Return a hash of (layer, head, exponent of keys, exponent of values) of every head, in any order."""
    rows = sorted({tuple(head) for head in heads})
    return hashlib.blake2b(repr(rows).encode(), digest_size=4).hexdigest()


@contextmanager
def in_float32(module: nn.Module) -> Iterator[None]:
    """Make every submodule compute in float32.

    A submodule's parameters are float32 only while it is called, so that at most one submodule's parameters are in
    memory twice.
    """
    originals: dict[nn.Parameter, Tensor] = {}

    def enter(part: nn.Module, _args: object) -> None:
        for parameter in part.parameters(recurse=False):
            if parameter.is_floating_point():
                originals[parameter] = parameter.data
                parameter.data = parameter.data.float()

    def leave(part: nn.Module, _args: object, _output: object) -> None:
        for parameter in part.parameters(recurse=False):
            if parameter in originals:
                parameter.data = originals.pop(parameter)

    parts = [part for part in module.modules() if any(True for _ in part.parameters(recurse=False))]
    handles = [part.register_forward_pre_hook(enter, prepend=True) for part in parts]
    handles += [part.register_forward_hook(leave) for part in parts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for parameter, data in originals.items():  # of modules left by an exception, like a stage's last layer
            parameter.data = data
