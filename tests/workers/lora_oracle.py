"""Random LoRA adapters, saved by PEFT, and PEFT's own tokens and logits for them."""

import copy
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from crossdock.workers.model.lora.adapter_files import read_adapter
from crossdock.workers.schedule.request.submission import Adapter

peft: Any = pytest.importorskip("peft", reason="needs peft, the oracle of adapters")
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Tuned(NamedTuple):
    """An adapter in a folder, and PEFT's model with it."""

    adapter: Adapter
    model: Any

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> Tensor:
        """Return the logits [T, vocab] of PEFT's forward pass."""
        found: Tensor = self.model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
        return found

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Return PEFT's greedy tokens after a prompt, none of which ends it."""
        return greedy_of(self.logits, prompt, num_tokens, self.model.config.eos_token_id)


def greedy_of(logits: Any, prompt: list[int], num_tokens: int, eos_token_id: int) -> list[int]:
    """Return the greedy tokens after a prompt by a function that gives logits."""
    token_ids = [*prompt]
    for _ in range(num_tokens):
        last = logits(token_ids)[-1].clone()
        last[eos_token_id] = -torch.inf
        token_ids.append(int(last.argmax()))
    return token_ids[len(prompt) :]


def adapted(module: PreTrainedModel, **config: Any) -> Any:
    """Return PEFT's model over a module, whose linears are replaced. `config`: of PEFT's LoraConfig."""
    with warnings.catch_warnings(action="ignore"):  # of transformers about PEFT's code, and of PEFT about `config`
        return peft.get_peft_model(module, peft.LoraConfig(**config)).eval()


def tuned(
    module: PreTrainedModel,
    folder: Path,
    seed: int,
    *,
    size: float = 0.2,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Tuned:
    """Save an adapter of random weights for a module, which stays as it is. `config`: of PEFT's LoraConfig.

    `dtype`: of the file. PEFT's model has the same numbers in float32.
    """
    model = adapted(copy.deepcopy(module), **{"r": 4, "lora_alpha": 6, "target_modules": ALL} | config)
    generator = torch.Generator().manual_seed(seed)
    added = [parameter for name, parameter in model.named_parameters() if "lora_" in name]
    for parameter in added:
        parameter.data = (torch.randn(parameter.shape, generator=generator) * size).to(dtype)
    model.save_pretrained(folder)
    for parameter in added:
        parameter.data = parameter.data.float()
    return Tuned(read_adapter(folder, 64).adapter(folder.name), model)
