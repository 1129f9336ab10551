"""The logits that a model must give whatever is replaced in it: those of its own code with its eager attention."""

from dataclasses import dataclass

import torch
from torch import Tensor

from crossdock.workers.model.architecture import attention_names
from crossdock.workers.model.forward.forward_context import ForwardContext
from crossdock.workers.model.network import Network
from crossdock.workers.schedule.request import Request
from crossdock.workers.schedule.submission import SamplingParams

PROBE_LENGTHS = [5, 24]  # tokens of the two sequences that are computed


@dataclass(frozen=True, slots=True)
class ProbeBatch:
    """The flat batch of a check: two sequences of random tokens, every token's logits wanted."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    rows: Tensor  # [T]

    @classmethod
    def for_model(cls, model: Network) -> "ProbeBatch":
        """Return the batch on the model's device."""
        generator = torch.Generator().manual_seed(0)
        num_tokens, device = sum(PROBE_LENGTHS), model.device
        ids = torch.randint(0, min(model.vocab_size, 1000), (num_tokens,), generator=generator).to(device)
        positions = torch.cat([torch.arange(n) for n in PROBE_LENGTHS]).to(device)
        return cls(ids, positions, torch.arange(num_tokens, device=device))

    def request(self, number: int) -> Request:
        """Return a request of one of the sequences, every token's logits wanted."""
        token_ids = torch.split(self.token_ids, PROBE_LENGTHS)[number].tolist()
        return Request(f"probe-{number}", token_ids, SamplingParams(prompt_logprobs=0))

    def run(self, model: Network, context: ForwardContext) -> Tensor:
        """Return the logits [T, vocabulary] through our attention."""
        return model.run(context, self.token_ids, self.positions, self.rows)


@dataclass(frozen=True, slots=True)
class LogitsCheck:
    """Compares logits with those of transformers' own attention."""

    sequences: ProbeBatch
    theirs: Tensor  # [T, vocabulary]
    tolerance: float  # relative error, in norm

    @classmethod
    def of(cls, model: Network, sequences: ProbeBatch) -> "LogitsCheck":
        """Compute each sequence by the model's own code, with eager attention."""
        module = model.module
        module.set_attn_implementation(attention_names(model.config, "eager"))
        try:
            theirs = torch.cat([model.logits(sequence) for sequence in torch.split(sequences.token_ids, PROBE_LENGTHS)])
        finally:
            module.set_attn_implementation(attention_names(model.config))
        return cls(sequences, theirs, 2e-3 if model.dtype is torch.float32 else 0.1)

    def error(self, ours: Tensor) -> float:
        """Return the relative error of our logits, in norm."""
        difference = (ours.float() - self.theirs.float()).norm() / self.theirs.float().norm().clamp_min(1e-6)
        return float(difference)

    def passes(self, ours: Tensor) -> bool:
        """Return whether our logits are near enough; NaN never is."""
        return self.error(ours) <= self.tolerance
