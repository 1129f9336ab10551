"""A head of EAGLE-3 over pages of its own, beside the target whose states and embedding it reads."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from crossdock.workers.draft.eagle_head import EagleHead
from crossdock.workers.model.architecture import text_config
from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.model.kv_pool import KVPool, one_layer
from crossdock.workers.model.layers.native_products import use_native_products
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.sampling.sampler import argmax
from crossdock.workers.model.weights.checkpoint import resolve_model
from crossdock.workers.schedule.cost.cost import NO_LIMIT


@dataclass(slots=True, eq=False)
class PagedEagle:
    """Computes the rows of an EAGLE-3 head: a `DraftingHead`."""

    head: EagleHead
    target: LoadedModel
    layers: Sequence[int]  # of the target, whose inputs the head reads
    fingerprint: bytes  # differs where states mean something else
    _pool: KVPool = field(default_factory=KVPool)

    @classmethod
    def load(cls, name: str, target: LoadedModel) -> Self:
        """Load the head onto the device of `target`, in the same dtype, and have `target` keep its states.

        Raises:
            ValueError: the head is not of this target, or of a form that is not computed here; or the target's states
                cannot be taken.
        """
        head = EagleHead.load(resolve_model(name), target.dtype, target.device)
        layers = head.config.layers_of(target.num_hidden_layers)
        target.tap_layers(layers)
        _check_fits(head, target, name)
        fingerprint = f"{layers}".encode() + head.fc.weight.cpu().view(torch.uint8).numpy().tobytes()
        if target.device.type == "cpu" and "native" in target.kernels:  # else the operator chose other kernels
            use_native_products(head, head.dtype)
        return cls(head, target, layers, fingerprint)

    @property
    def width(self) -> int:
        """Return the numbers of a state, H."""
        return self.head.width

    @property
    def most_context(self) -> float:
        """Return that rows attend to all tokens before them."""
        return NO_LIMIT

    @property
    def shares_choice(self) -> bool:
        """Return False: nothing chooses tokens."""
        return False

    def page_bytes(self, page_size: int) -> int:
        """Return the bytes of a page of so many tokens."""
        return one_layer(*self.head.kv_shape, page_size, self.head.dtype).page_bytes

    def allocate(self, num_pages: int, page_size: int) -> None:
        """Allocate the pages."""
        layout = one_layer(*self.head.kv_shape, page_size, self.head.dtype)
        self._pool.allocate([layout], [0], num_pages, self.head.dtype, self.target.device)

    @property
    def reads_last_states(self) -> bool:
        """Return False: the head reads states between layers."""
        return False

    def states_of(self, hidden: Tensor | None) -> Tensor:
        """Return the states [T, H] of the target's newest step, as rows read them."""
        return self.head.combined(self.target.layer_tap.take(self.layers))

    def compute(
        self, inputs: StepInputs, states: Tensor, follows: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute one pass over rows with `states` [T, H]; see `DraftingHead`."""
        tensors = inputs.on(self.target.device)
        batch = inputs.attention(tensors)
        attention = self.target.attention
        k_pages, v_pages = self._pool.pages[0]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
            attention.store_kv(k, v, k_pages, v_pages, batch.slots)
            if not len(inputs.wanted):
                return None
            return attention.paged_attention(q, k_pages, v_pages, batch, scale=self.head.scale)

        own = self.head.embed_tokens
        embedding = self.target.module.get_input_embeddings() if own is None else own
        embeddings = embedding(tensors.token_ids[None])[0]
        logits, own_states = self.head(states, embeddings, tensors.positions, attend, tensors.wanted)
        return self.head.tokens_of(argmax(logits)), own_states


def _check_fits(head: EagleHead, target: LoadedModel, name: str) -> None:
    """Check that a head is of this target. ValueError: it is not, or ranks divide the embedding that it would read."""
    width = text_config(target.config).hidden_size
    config = head.config
    if (config.target_hidden_size, config.layer.vocab_size) != (width, target.vocab_size):
        raise ValueError(
            f"model: {name} is a head for hidden states of {config.target_hidden_size} numbers and a vocabulary of "
            f"{config.layer.vocab_size} tokens; the model that is served has {width} and {target.vocab_size}"
        )
    if head.embed_tokens is not None:
        return
    if head.width != width:
        raise ValueError(f"model: {name} has no embed_tokens, and its width is {head.width}, not the target's {width}")
    if not target.has_whole_embedding:
        raise ValueError(
            f"model: {name} has no embed_tokens, and the ranks of this model divide its own among them: "
            f"tensor_parallel_size must be 1, or the head must have embed_tokens"
        )
