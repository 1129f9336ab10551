"""Memory on pages of 2 MiB: tensors of any type that share a mapping."""

import torch

from crossdock.kernels.huge_pages import HugePages


def test_tensors_that_share_memory_lie_close_and_do_not_overlap() -> None:
    memory = HugePages()
    sizes = (1000, 1, 300_000, 40 << 20, 5000)
    taken = [memory.take(size, torch.bfloat16).fill_(number) for number, size in enumerate(sizes)]
    for number, tensor in enumerate(taken):
        assert tensor.eq(number).all(), number
    first, second, third = (tensor.data_ptr() for tensor in taken[:3])
    assert second - first == third - second == 4096
    del memory, taken[1:]
    assert taken[0].eq(0).all(), "the others are freed, this one is not"


def test_new_memory_is_zero_whatever_its_type() -> None:
    memory = HugePages()
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8):
        tensor = memory.take(3000, dtype)
        assert tensor.dtype is dtype
        assert tensor.shape == (3000,)
        assert not tensor.float().any()
        tensor.view(torch.uint8).fill_(7)
