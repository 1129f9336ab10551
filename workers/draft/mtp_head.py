"""The head of multi-token prediction (MTP) that a checkpoint brings: one more decoder layer, over pages of its own.

The row of position p reads the target's last hidden state at p, after the final norm, and the embedding of the token at
p + 1: norm each, put the embedding first, project both to one width, and compute the layer, its norm and the target's
output projection. The row of a further draft reads the head's own state, after its norm, in the place of the target's.
Where config.json has `index_share_for_mtp_iteration`, it attends to the tokens that the first draft's indexer chose.
(DeepSeek-V3, arXiv 2412.19437, section 2.2; `MtpModel` of transformers.)
"""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from crossdock.workers.draft.mtp_weights import MtpWeights, load_mtp
from crossdock.workers.model.architecture import text_config
from crossdock.workers.model.forward.shared_choice import SharedChoice, shared_choice
from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.sampling.sampler import argmax


@dataclass(slots=True, eq=False)
class MtpHead:
    """Computes the rows of an MTP head: a `DraftingHead`. Its layer is a model of its own, proven like any other."""

    target: LoadedModel
    layer: LoadedModel  # of the head's layers alone
    embedding_norm: nn.Module
    hidden_norm: nn.Module
    projection: Tensor  # [E, 2 E]
    choice: SharedChoice | None  # None: the row of each draft chooses its tokens, or the head has no indexer

    @classmethod
    def load(cls, name: str | None, target: LoadedModel) -> Self:
        """Load the head. `name`: see `load_mtp`.

        Raises:
            ValueError: the checkpoint has no such head, or it is not computed here.
        """
        return cls.of(load_mtp(name, target), target)

    @classmethod
    def of(cls, weights: MtpWeights, target: LoadedModel) -> Self:
        """Put a head behind the attention of `target`. ValueError: it would not be computed right."""
        options = LoadOptions(max_model_len=target.max_model_len, attention=target.attention)
        of_embeddings = _with_weight(weights.norm, weights.embedding_norm)
        of_states = _with_weight(weights.norm, weights.hidden_norm)
        layer = wrap_module(weights.module, options)
        return cls(target, layer, of_embeddings, of_states, weights.projection, shared_choice(weights.module))

    @property
    def width(self) -> int:
        """Return the numbers of a state, E."""
        width: int = text_config(self.target.config).hidden_size
        return width

    @property
    def fingerprint(self) -> bytes:
        """Return bytes that differ where states mean something else."""
        rows = self.projection[:16]  # a few tell heads apart: all are 200 MB for DeepSeek-V3
        return b"mtp" + rows.cpu().contiguous().view(torch.uint8).numpy().tobytes()

    @property
    def most_context(self) -> float:
        """Return the most tokens that a row attends to: as many as the head's indexer chooses, if it has one."""
        return self.layer.most_context

    @property
    def shares_choice(self) -> bool:
        """Return whether the first draft's indexer chooses for all."""
        return self.choice is not None

    def page_bytes(self, page_size: int) -> int:
        """Return the bytes of a page of so many tokens."""
        return self.layer.layout(page_size).page_bytes

    def allocate(self, num_pages: int, page_size: int) -> None:
        """Allocate the pages."""
        self.layer.allocate_pool(num_pages, page_size)

    @property
    def reads_last_states(self) -> bool:
        """Return True."""
        return True

    def states_of(self, hidden: Tensor | None) -> Tensor:
        """Return a copy of the last hidden states [T, E], which the target's next step may write over."""
        assert hidden is not None, "the head reads the last states"
        return hidden.clone()

    def compute(
        self, inputs: StepInputs, states: Tensor, follows: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute one pass over rows with `states` [T, E]; see `DraftingHead`."""
        tensors = inputs.on(self.target.device)
        embeddings = self.layer.module.get_input_embeddings()(tensors.token_ids[None])[0]
        entering = linear(torch.cat([self.embedding_norm(embeddings), self.hidden_norm(states)], -1), self.projection)
        batch = inputs.attention(tensors)
        rows = tensors.wanted
        with self.layer.tap.opened(), self.choice.held(batch, rows, follows) if self.choice else nullcontext():
            logits = self.layer.forward(tensors.token_ids, tensors.positions, batch, rows, entering=entering)
            hidden = self.layer.tap.hidden
        assert hidden is not None, "every layer that is served gives its last states"
        return argmax(logits), hidden[rows]


def _with_weight(norm: Any, weight: Tensor) -> nn.Module:
    """Return a norm of the same kind with another weight."""
    other: nn.Module = copy.deepcopy(norm)
    other.weight = nn.Parameter(weight, requires_grad=False)
    return other
