"""Count the kernels that a decoder layer launches on a GPU in a decode step, without a GPU.

    TRITON_INTERPRET=1 python benchmarks/models/launches.py

Tiny models run on a CPU, Triton's kernels in its interpreter. Counted are Triton's kernels, and the operators for which
torch would launch one; views and allocations launch nothing. An operator counts once, although a sort or a product may
launch several kernels. A layer's count is the difference between a model of two layers and one of one layer.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from crossdock.kernels.attention import reference_paged_attention, reference_store_kv
from crossdock.kernels.backend import choose_attention
from crossdock.workers.model.forward.forward_context import ForwardContext, batch_of_one_page_each
from crossdock.workers.model.layers import grouped_experts, replaced_parts
from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.model.model import LoadedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the tests' small models

from tests.workers.architectures import SERVED, build

MODELS = ("llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe")
_SIZES = {"hidden_size": 64, "head_dim": 16}  # Triton's kernels take heads of a power of two
_WITHOUT_LAUNCH = {"detach", "empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view", "lift_fresh"}
_WAITS = {  # operators for whose result, or the size of whose result, the host waits
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim"),
    *("unique_consecutive", "bincount", "grouped_mm_fallback"),
}


class Launches(TorchDispatchMode):
    """Counts launches by name while it is entered, and the operators for which the host would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self._in_kernel = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._in_kernel:
            name = func.overloadpacket.__name__
            if not func.is_view and name not in _WITHOUT_LAUNCH:
                self.counts[name] += 1
            if name in _WAITS or _has_unknown_size(name, args):
                self.waits[name] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Count Triton's kernels as well; the interpreter's own use of torch does not count."""
        run = interpreter.GridExecutor.__call__

        def counted(executor: Any, *args: Any, **kwargs: Any) -> None:
            self.counts[executor.fn.__name__] += 1
            self._in_kernel = True
            try:
                run(executor, *args, **kwargs)
            finally:
                self._in_kernel = False

        interpreter.GridExecutor.__call__ = counted
        try:
            yield
        finally:
            interpreter.GridExecutor.__call__ = run


def _has_unknown_size(name: str, args: Any) -> bool:
    """Return whether an operator indexes with a mask, or repeats by a tensor: the size of its result is on the GPU."""
    if name in ("index", "index_put", "index_put_"):
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return name == "repeat_interleave" and isinstance(args[-1], Tensor)


def tiny(name: str, num_layers: int, is_fused: bool, has_own_experts: bool = False) -> LoadedModel:
    """Return a random model in float32 that is loaded as on a GPU, with or without Triton's steps.

    `has_own_experts`: as on a GPU before Hopper.
    """
    module = build(name, SERVED[name] | _SIZES | {"num_hidden_layers": num_layers})
    attention = choose_attention("triton", torch.device("cpu"))
    # The interpreter takes seconds for attention: loading, which checks logits several times, has it in torch.
    loading = replace(attention, store_kv=reference_store_kv, paged_attention=reference_paged_attention)
    may_use, waits_for_none = replaced_parts.use_triton_layers, grouped_experts._waits_for_none
    grouped_experts._waits_for_none = lambda *_: not has_own_experts
    if not is_fused:

        def refuse(*_: Any, **__: Any) -> Any:
            raise replaced_parts.NotFusableError("counted as transformers computes them")

        replaced_parts.use_triton_layers = refuse
    try:
        model = wrap_module(module, LoadOptions(attention=loading))
    finally:
        replaced_parts.use_triton_layers = may_use
        grouped_experts._waits_for_none = waits_for_none
    assert bool(model.kernels) is is_fused
    return replace(model, attention=attention)


@torch.no_grad()  # in inference mode torch hands composite operators to the counter undivided
def trace(model: LoadedModel, lengths: list[int]) -> Launches:
    """Return the launches of one step that computes whole prompts of these lengths."""
    batch = batch_of_one_page_each(lengths, model.device)
    model.allocate_pool(len(lengths), max(lengths))
    context = ForwardContext(model.attention, batch, model.pool.pages, places=model.places)
    ids, positions = torch.ones(sum(lengths), dtype=torch.long), torch.cat([torch.arange(n) for n in lengths])
    with Launches() as launches, launches.kernels():
        model.run(context, ids, positions, torch.arange(len(ids)))
    return launches


def per_layer(name: str, is_fused: bool, has_own_experts: bool = False) -> Counter[str]:
    """Return the launches of one layer of a decode step of three sequences, by name."""
    few, many = (trace(tiny(name, num_layers, is_fused, has_own_experts), [1, 1, 1]).counts for num_layers in (1, 2))
    return many - few


def main() -> None:
    print(f"{'launches per layer':20}{'transformers, joined':>22}{'with Triton steps':>20}{'and own experts':>18}")
    for name in MODELS:
        kinds = ((False, False), (True, False), (True, True))
        before, after, own = (per_layer(name, *kind).total() for kind in kinds)
        print(f"{name:20}{before:22}{after:20}{own:18}")


if __name__ == "__main__":
    main()
