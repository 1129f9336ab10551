"""The layers measured stand for the whole model: their shape, their rows, and enough bytes."""

import logging
from pathlib import Path

import pytest
import torch

from crossdock.kernels.cpu import stack_choice as stacks
from crossdock.kernels.cpu.choice import only
from crossdock.kernels.cpu.decoder import DecoderShape
from crossdock.kernels.cpu.linear import usable_kernels
from crossdock.kernels.cpu.packed_linear import CodeForm
from crossdock.kernels.cpu.stack_choice import sample_of, stack_cells, stack_choice

TINY = DecoderShape(
    hidden=32, num_heads=4, num_kv_heads=2, head_dim=32, intermediate=64, eps=1e-5, qk_eps=0.0, scale=0.2
)
SMOL = DecoderShape(
    hidden=576, num_heads=9, num_kv_heads=3, head_dim=64, intermediate=1536, eps=1e-5, qk_eps=0.0, scale=0.125
)
LLAMA_8B = DecoderShape(
    hidden=4096, num_heads=32, num_kv_heads=8, head_dim=128, intermediate=14336, eps=1e-5, qk_eps=0.0, scale=0.09
)
FORM = CodeForm("int4", 32, has_offsets=False)


@pytest.mark.parametrize(("shape", "num_layers"), [(TINY, 2), (SMOL, 30), (LLAMA_8B, 32)])
def test_sample_streams_from_memory_and_has_the_shape_of_a_share_of_the_model(
    shape: DecoderShape, num_layers: int
) -> None:
    sample, num_measured = sample_of(shape, num_layers, torch.bfloat16)
    whole, measured = (
        sum(each.num_bytes(torch.bfloat16) for each in each_shape.matrices(count))
        for each_shape, count in ((shape, num_layers), (sample, num_measured))
    )
    assert min(whole, 64 << 20) <= measured <= 128 << 20
    assert sample.why_not() is None
    assert sample.num_heads * shape.num_kv_heads == shape.num_heads * sample.num_kv_heads


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_kernel_computes_the_same_layers(dtype: torch.dtype) -> None:
    kernels = usable_kernels(dtype)
    cells = stack_cells(TINY, 2, dtype, kernels, (1, 5, 70))
    assert set(cells) == {(kernel, rows) for kernel in kernels for rows in (1, 5, 70)}
    for rows in (1, 5, 70):
        outputs = [cells[kernel, rows][0]() for kernel in kernels]
        for output in outputs:
            assert isinstance(output, torch.Tensor)
            assert output.shape == (rows, TINY.hidden)
            # Sums of 128 terms, in bfloat16 rounded after each of the layer's six steps.
            torch.testing.assert_close(output, outputs[-1], rtol=0.05 if dtype is torch.bfloat16 else 1e-4, atol=1e-3)


@torch.inference_mode()
def test_choice_of_layers_is_measured_once_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CROSSDOCK_CACHE", str(tmp_path))
    monkeypatch.setattr(stacks, "ROWS", (1, 16))
    with caplog.at_level(logging.INFO):
        first = stack_choice(TINY, 2, torch.float32, ("native", "torch"), FORM)
    assert caplog.messages[-1].startswith(f"decoder layers: {first} (ms for 1/16 rows: native ")
    monkeypatch.setattr(stacks, "stack_cells", lambda *_: pytest.fail("measured again"))
    assert stack_choice(TINY, 2, torch.float32, ("native", "torch"), FORM) == first
    assert stack_choice(TINY, 2, torch.float32, ("torch",), FORM) == only("torch")
