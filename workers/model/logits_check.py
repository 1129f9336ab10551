"""The logits that a model must give whatever is replaced in it: those of its own code with its eager attention.

They are kept in the cache directory: a later start of the same weights by the same code compares with these, and reads
the weights two times less.
"""

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from crossdock.kernels.cache import cache_dir, replacing
from crossdock.workers.model.architecture import attention_names
from crossdock.workers.model.forward.forward_context import ForwardContext
from crossdock.workers.model.network import Network
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.submission import SamplingParams, Submission

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
        num_tokens = sum(PROBE_LENGTHS)
        device = model.device
        ids = torch.randint(0, min(model.vocab_size, 1000), (num_tokens,), generator=generator).to(device)
        positions = torch.cat([torch.arange(n) for n in PROBE_LENGTHS]).to(device)
        return cls(ids, positions, torch.arange(num_tokens, device=device))

    def request(self, number: int) -> Request:
        """Return a request of one of the sequences, every token's logits wanted."""
        token_ids = torch.split(self.token_ids, PROBE_LENGTHS)[number].tolist()
        return Request(Submission(f"probe-{number}", token_ids, SamplingParams(prompt_logprobs=0)))

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
    def of(cls, model: Network, sequences: ProbeBatch, checkpoint: str = "") -> "LogitsCheck":
        """Compute each sequence by the model's own code, with eager attention.

        `checkpoint`: a name for the weights, under which the logits are kept or have been; empty: they are not.
        """
        tolerance = 2e-3 if model.dtype is torch.float32 else 0.1
        file = _file(model, checkpoint) if checkpoint else None
        if file is not None and (kept := _read(file)) is not None:
            return cls(sequences, kept, tolerance)
        module = model.module
        module.set_attn_implementation(attention_names(model.config, "eager"))
        try:
            theirs = torch.cat([model.logits(sequence) for sequence in torch.split(sequences.token_ids, PROBE_LENGTHS)])
        finally:
            module.set_attn_implementation(attention_names(model.config))
        if file is not None:
            with suppress(OSError), replacing(file) as new:  # without a cache directory each start computes them
                save_file({"logits": theirs.contiguous()}, new)
        return cls(sequences, theirs, tolerance)

    def error(self, ours: Tensor) -> float:
        """Return the relative error of our logits, in norm."""
        difference = (ours.float() - self.theirs.float()).norm() / self.theirs.float().norm().clamp_min(1e-6)
        return float(difference)

    def error_of(self, model: Network) -> float:
        """Return the error of the logits of a model, each sequence attended to as a whole."""
        return self.error(self.sequences.run(model, ForwardContext(model.attention, probe_lengths=PROBE_LENGTHS)))

    def passes(self, ours: Tensor) -> bool:
        """Return whether our logits are near enough; NaN never is."""
        return self.error(ours) <= self.tolerance


def _file(model: Network, checkpoint: str) -> Path:
    """Return the file of a model's logits, whose name has all that they depend on."""
    parts = [checkpoint, model.config.to_json_string(use_diff=False), str(model.max_model_len), str(model.dtype)]
    parts += [torch.__version__, transformers.__version__, str(PROBE_LENGTHS)]
    digest = hashlib.sha256("\n".join(parts).encode())
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return cache_dir() / "logits" / f"{digest.hexdigest()[:32]}.safetensors"


def _read(file: Path) -> Tensor | None:
    """Return the logits in a file; None: there is no file, or no whole one."""
    try:
        logits: Tensor = load_file(file)["logits"]
        return logits
    except (OSError, SafetensorError, KeyError):
        return None
