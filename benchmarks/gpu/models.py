"""Models with random weights in the shapes of known ones, and the least that their steps must read and compute."""

import string
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from gpu.cases import Bench
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from crossdock.kernels.backend import choose_attention
from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.model.model import LoadedModel


@dataclass(frozen=True)
class Weights:
    """Bytes of a module's weights by the part that reads them."""

    dense: int
    head: int
    experts: int
    expert_share: float  # of the experts: the share that one token uses
    itemsize: int

    @classmethod
    def of(cls, module: Any) -> "Weights":
        """Return the bytes of a transformers causal LM; embeddings are looked up, not read."""
        sizes = {name: parameter.nbytes for name, parameter in module.named_parameters() if "embed_tokens" not in name}
        experts = sum(size for name, size in sizes.items() if ".experts." in name)
        head = module.get_output_embeddings().weight
        config = module.config
        names = "num_experts", "num_local_experts", "n_routed_experts"
        num_experts = next((count for name in names if (count := getattr(config, name, None))), 0)
        share = config.num_experts_per_tok / num_experts if experts else 0.0
        return cls(sum(sizes.values()) - experts - head.nbytes, head.nbytes, experts, share, head.itemsize)

    def read(self, num_tokens: int) -> float:
        """Return the bytes that a step must read, if tokens choose all experts equally often."""
        return self.dense + self.head + self.experts * (1 - (1 - self.expert_share) ** num_tokens)

    def flop(self, num_tokens: int, num_rows: int) -> float:
        """Return the FLOP of a step's products: two for each weight. `num_rows` have logits."""
        layers = (self.dense + self.experts * self.expert_share) * num_tokens
        return 2 * (layers + self.head * num_rows) / self.itemsize


def random_module(bench: Bench, name: str, **changes: Any) -> Any:
    """Return transformers' model of this shape with random weights on the device. `changes`: of its configuration."""
    sizes = bench.sizes
    values = {**(sizes.models | sizes.coded | sizes.served | sizes.latent)[name], **changes}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device(bench.device.name):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, bench.sizes.dtype))


def paged(bench: Bench, module: Any, max_model_len: int | None = None, **options: Any) -> LoadedModel:
    """Put the module behind the attention that a replica would choose; in a dry run Triton's, interpreted."""
    attention = choose_attention("triton", torch.device("cpu")) if bench.sizes.is_dry else None
    return wrap_module(module, LoadOptions(max_model_len, attention=attention, **options))


def write_tokenizer(folder: Path, num_tokens: int) -> None:
    """Write a tokenizer of all bytes, of words of two to four letters, and of an end as its last token."""
    words = ("".join(letters) for size in (2, 3, 4) for letters in product(string.ascii_lowercase, repeat=size))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *islice(words, num_tokens - len(alphabet) - 1)]
    backend = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>").save_pretrained(folder)
