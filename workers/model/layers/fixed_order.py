"""`batch_invariant` on GPUs: what sums over a row adds in one order, and a start proves that on its device."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.model.layers.llama_layers import NotFusableError, decoder_layers
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.schedule.request.batch import Batch, Scheduled
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.submission import SamplingParams, Submission

# Tokens: the long prompt has two tiles of rows, and of context.
_PAGE_SIZE = 16
_SHORT = 5
_LONG = 70


def fix_order(module: nn.Module) -> None:
    """Compute all linears and the last norm of a model by kernels that add each row in one order.

    Raises:
        NotFusableError: the model has no decoder layers, or its last norm is not Llama's.
    """
    from crossdock.kernels.gpu import triton_fixed_order, triton_layer_steps  # Triton is not on every machine

    def normed(norm: Any, hidden: Tensor) -> Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        return triton_layer_steps.add_and_norm(rows, None, norm.weight, norm.variance_epsilon).view(hidden.shape)

    norm: Any = getattr(decoder_layers(module)[0], "norm", None)
    if not hasattr(norm, "variance_epsilon"):
        raise NotFusableError("its last norm is not Llama's RMS norm")
    norm.forward = partial(normed, norm)
    for linear in module.modules():
        if isinstance(linear, nn.Linear):
            linear.forward = partial(_product, triton_fixed_order.product, linear)  # type: ignore[method-assign]


def _product(product: Any, linear: nn.Linear, x: Tensor) -> Tensor:
    out: Tensor = product(x, linear.weight, linear.bias)
    return out


def check_rows(model: LoadedModel) -> None:
    """Compute two prompts in one step, and the same rows in three others: chunks, and a decode beside a chunk.

    Raises:
        ValueError: some logits have other bits.
    """
    generator = torch.Generator().manual_seed(0)
    length = min(_LONG, model.max_model_len)
    ids = torch.randint(0, min(model.vocab_size, 1000), (_SHORT + length,), generator=generator).tolist()
    short, long = (
        Request(Submission(f"rows of {len(each)}", each, SamplingParams(prompt_logprobs=0)))
        for each in (ids[:_SHORT], ids[_SHORT:])
    )

    def run(*parts: tuple[Request, int, int], num_decodes: int = 0) -> Tensor:
        scheduled = [
            Scheduled(request, start, end - start, [0] if request is short else range(1, num_pages), samples=True)
            for request, start, end in parts
        ]
        return StepInputs.of(Batch(scheduled, num_decodes), _PAGE_SIZE)[0].run(model)

    num_pages = 1 + -(-length // _PAGE_SIZE)
    cut = length // 2
    try:
        model.allocate_pool(num_pages, _PAGE_SIZE)
        together = run((short, 0, _SHORT), (long, 0, length))
        begun = run((long, 0, cut))
        mixed = run((long, cut, cut + 1), (short, 0, _SHORT), num_decodes=1)
        rest = run((long, cut + 1, length))
    finally:
        model.pool.free()
    apart = torch.cat([mixed[1:], begun, mixed[:1], rest])
    if not torch.equal(together, apart):
        number = int((together != apart).any(-1).sum())
        raise ValueError(
            f"batch_invariant: on this device {number} of {len(apart)} rows have other bits in another batch; the "
            f"mode runs where a kernel's rows do not depend on their place in a tile"
        )
