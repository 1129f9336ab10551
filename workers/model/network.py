"""A causal LM of transformers behind our attention: flat token ids in, logits out. Its own code runs unchanged."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from crossdock.kernels.backend import Attention
from crossdock.workers.model.architecture import is_indexed, text_config
from crossdock.workers.model.cut.part import ModelPart
from crossdock.workers.model.forward.forward_context import NO_MASK, ForwardContext, entered
from crossdock.workers.model.forward.step_pictures import PictureRows
from crossdock.workers.model.pooling import HiddenTap


@dataclass(frozen=True, eq=False)
class Network:
    """A module of transformers, or one rank's part, and the attention that its layers call."""

    module: Any
    config: PretrainedConfig
    max_model_len: int  # tokens
    part: ModelPart
    attention: Attention
    attention_chunks: Mapping[int, int]  # see `ForwardContext`
    tap: HiddenTap  # of the hidden states, for vectors of prompts

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.module.parameters()).device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = next(self.module.parameters()).dtype
        return dtype

    @property
    def vocab_size(self) -> int:
        """The width of the logits. It may exceed the tokenizer's vocabulary."""
        size: int = text_config(self.config).vocab_size
        return size

    def wait(self) -> None:
        """Wait until the device has finished all work queued so far: on a GPU, calls return before that."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def run(
        self,
        context: ForwardContext,
        token_ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        dtype: torch.dtype | None = None,
        entering: Tensor | None = None,
    ) -> Tensor:
        """Compute one flat batch with `context` for its attention; see `logits` and `LoadedModel.forward`.

        positions: [T], or [3, T] of a model with positions in time, height and width. entering: [T, E] in the place of
        the tokens' embeddings.
        """
        context = replace(context, attention_chunks=self.attention_chunks, positions=positions)
        with entered(context):
            inputs: dict[str, Any] = {"position_ids": positions[..., None, :], "logits_to_keep": rows}
            if is_indexed(text_config(self.config)):
                inputs["attention_mask"] = NO_MASK
            pictures = context.pictures if self.part.position.is_first_stage else None
            if pictures is not None and len(pictures.rows):
                inputs["inputs_embeds"] = self._embedded(token_ids, pictures)
            if entering is not None:
                inputs["inputs_embeds"] = entering[None]
            return self.logits(token_ids, dtype, **inputs)

    def _embedded(self, token_ids: Tensor, pictures: PictureRows) -> Tensor:
        """Return the inputs [1, T, E] of the first layer: embeddings of tokens, replaced in the rows of pictures."""
        embeddings: Tensor = self.module.get_input_embeddings()(token_ids[None]).clone()
        embeddings[0, pictures.rows] = pictures.embeddings[0]
        return embeddings

    def logits(self, token_ids: Tensor, dtype: torch.dtype | None = None, **inputs: Any) -> Tensor:
        """Return the logits [N, vocab] of transformers' own forward, or [0, vocab] on a stage that others follow.

        `dtype`: the dtype that the model computes in; None: the parameters' own. `inputs`: the forward's further
        arguments.
        """

        def forward(entering: Tensor | None) -> Tensor:
            is_ids = entering is None or stage is None or stage.needs_token_ids
            given = {"input_ids": token_ids[None]} if is_ids else {"inputs_embeds": entering}
            given = {} if "inputs_embeds" in inputs else given
            logits: Tensor = self.module(**given, **({"use_cache": False} | inputs)).logits[0]
            return logits

        stage = self.part.stage
        if stage is None:
            return forward(None)
        like = torch.empty(0, self.vocab_size, dtype=dtype or self.dtype, device=self.device)
        logits = stage.run(forward, len(token_ids), like)
        return logits if logits is not None else like
