"""Steps in scattered pages whose logits are transformers' own, and the tokens of an engine that records its steps."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from crossdock.kernels.backend import Attention
from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.ranks.pool_layout import choose_groups
from crossdock.workers.schedule.request.batch import Batch, Scheduled
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.submission import SamplingParams, Submission
from tests.workers.model.paged import monolithic

PAGE_SIZE = 8


class PagedStep:
    """A step of decodes and chunks in scattered pages. All slots that hold no token yet are NaN, page 0 too."""

    def __init__(
        self,
        module: PreTrainedModel,
        attention: Attention,
        parts: list[tuple[int, int]],
        *,
        is_grouped: bool = False,
    ) -> None:
        """`parts`: (tokens computed before, tokens of the step) of each sequence. `is_grouped`: by unlike windows."""
        generator = torch.Generator().manual_seed(len(parts))
        prompts = [torch.randint(3, 120, (start + tokens,), generator=generator) for start, tokens in parts]
        module.set_attn_implementation("eager")
        whole = [monolithic(module, prompt) for prompt in prompts]
        self.expected = torch.stack([logits[-1] for logits in whole])
        self._of_all_rows = torch.cat([logits[start:] for logits, (start, _) in zip(whole, parts, strict=True)])
        self.model = wrap_module(module, LoadOptions(attention=attention))
        if is_grouped:
            self.model = choose_groups(self.model, EngineConfig(page_size=PAGE_SIZE))
        num_groups = len(self.model.held_groups)
        self.model.allocate_pool(64 * num_groups, PAGE_SIZE)
        self.pool = self.model.pool.tensor
        self.pool.fill_(float("nan"))
        spare = iter((torch.randperm(64 * num_groups - 1, generator=generator) + 1).tolist())
        requests = [Request(Submission(f"{i}", prompt.tolist(), SamplingParams())) for i, prompt in enumerate(prompts)]
        pages = [
            [[next(spare) for _ in range(-(-len(prompt) // PAGE_SIZE))] for _ in range(num_groups)]
            for prompt in prompts
        ]
        for request, (held, *more), (start, _) in zip(requests, pages, parts, strict=True):
            if start:
                before = Scheduled(request, 0, start, held, True, further_pages=more)
                StepInputs.of(Batch([before], 0), PAGE_SIZE)[0].run(self.model)
        scheduled = [
            Scheduled(request, start, tokens, held, True, further_pages=more)
            for request, (held, *more), (start, tokens) in zip(requests, pages, parts, strict=True)
        ]
        self.batch = Batch(scheduled, 0)
        self.inputs = StepInputs.of(self.batch, PAGE_SIZE)[0]

    def with_all_logits(self) -> "PagedStep":
        """Have all rows' logits wanted, as of streams that verify drafts. Returns the step."""
        self.inputs = replace(self.inputs, wanted=np.arange(len(self.inputs.token_ids)))
        self.expected = self._of_all_rows
        return self

    def check(self, run: Callable[[], Tensor]) -> None:
        """Check that `run` gives transformers' logits, and writes exactly what the step without padding writes."""
        before = self.pool.clone()
        self.inputs.run(self.model)
        written = self.pool.clone()
        assert not torch.equal(written.isnan(), before.isnan())
        self.pool.copy_(before)
        torch.testing.assert_close(run()[: len(self.expected)], self.expected, atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(self.pool, written, equal_nan=True, atol=2e-3, rtol=2e-3)
        assert torch.equal(self.pool.isnan(), written.isnan())
        self.pool.copy_(before)


def tokens_of(engine: Engine, **params: Any) -> dict[str, list[int]]:
    """Return the tokens of 14 requests of other lengths, by request."""
    for number in range(14):
        prompt = [(13 * number + 7 * at) % 90 + 3 for at in range(1 + 31 * number % 151)]
        given = SamplingParams(max_tokens=4 + 3 * number, seed=number, ignore_eos=True, **params)
        engine.add(Submission(f"{number}", prompt, given))
    return answers_of(engine)


def answers_of(engine: Engine) -> dict[str, list[int]]:
    """Return the tokens of the engine's requests until all have ended, by request."""
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for delta in engine.step().deltas:
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
    return tokens
