"""A text encoder of transformers over flat batches: the texts of a step one after the other, without padding.

transformers' own modules compute. Only attention is ours: it keeps the texts of a batch apart.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModel, AutoModelForSequenceClassification
from transformers.utils import logging

from crossdock.workers.model.load import dtype_of
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.text_distances import attend_by_distance
from crossdock.workers.model.text_files import TextAnswer, answer_of, begins_behind_padding, longest_text
from crossdock.workers.model.weights.finite import check_finite, weights_of
from crossdock.workers.model.weights.untrusted import naming
from crossdock.workers.model.weights.weights import read_config

_ATTENTION = "crossdock texts"  # under which transformers knows the attention below
_BY_DISTANCE = "mpnet"  # the model type whose code lets no other attention in
_BLOCK = 256  # queries of a layer with a window that are computed at once
_UNREAD = (
    *("cls.", "lm_head.", "head.", "decoder.", "vocab_"),
    *("generator_predictions.", "generator_lm_head.", "discriminator_predictions."),
)
"""Beginnings of tensors of heads that guess masked or replaced tokens."""
_WITH_POOLER = ("bert", "roberta", "xlm-roberta", _BY_DISTANCE)  # whose classes make a pooler by default
_TOLERANCE = {torch.float32: 1e-3}  # of the probe, relative in norm
_TOLERANCE_16_BITS = 0.05


class TextBatch(NamedTuple):
    """The texts of one step, one after the other, on the device of the model."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    token_types: Tensor  # [T] int64: 1 from the second of two texts on
    lengths: Sequence[int]  # of each text


@dataclass(frozen=True, eq=False)
class TextEncoder:
    """A text encoder that is loaded and proven."""

    module: Any
    config: Any
    answer: TextAnswer
    max_model_len: int  # tokens of a text
    checks_pads: bool = False  # positions leave out padding tokens that a text has, as RoBERTa's do

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
        size: int = self.config.vocab_size
        return size

    @property
    def labels_of_mean(self) -> bool:
        """Return whether the head reads the mean of a text's hidden states; else those of its first token."""
        return getattr(self.config, "classifier_pooling", "cls") == "mean"

    def batch(self, texts: Sequence[Sequence[int]], seconds: Sequence[int]) -> TextBatch:
        """Return texts as one flat batch. `seconds`: where the second of two texts begins in each; 0: there is one."""
        ids = torch.tensor([token for text in texts for token in text], dtype=torch.int64)
        lengths = [len(text) for text in texts]
        positions = torch.cat([self._positions(text) for text in torch.split(ids, lengths)])
        types = torch.cat([_types(n, second) for n, second in zip(lengths, seconds, strict=True)])
        return TextBatch(ids.to(self.device), positions.to(self.device), types.to(self.device), lengths)

    @torch.inference_mode()
    def hidden(self, batch: TextBatch) -> Tensor:
        """Return the last hidden states [T, E] of a batch, in the model's dtype."""
        given = {"input_ids": batch.token_ids[None], "position_ids": batch.positions[None]}
        if getattr(self.config, "type_vocab_size", 1) > 1:
            given["token_type_ids"] = batch.token_types[None]
        found: Tensor = self.module.base_model(**given, text_lengths=tuple(batch.lengths)).last_hidden_state[0]
        return found

    @torch.inference_mode()
    def labels(self, pooled: Tensor) -> Tensor:
        """Return the number of each label [N, L], without activation, for the pooled hidden states [N, E] of texts."""
        found: Tensor = _HEADS[self.config.model_type](self.module, pooled)
        return found

    def wait(self) -> None:
        """Wait until the device has finished all work queued so far."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _positions(self, text: Tensor) -> Tensor:
        """Return the positions [n] of a text's tokens."""
        if not self.checks_pads:
            return torch.arange(len(text))
        padding: int = self.config.pad_token_id
        is_text = (text != padding).long()
        return is_text.cumsum(0) * is_text + padding


_HEADS: Mapping[str, Callable[[Any, Tensor], Tensor]] = {
    **dict.fromkeys(
        ("bert", "gte", "nomic_bert"),
        lambda module, pooled: module.classifier(module.base_model.pooler(pooled[:, None])),
    ),
    "distilbert": lambda module, pooled: module.classifier(module.pre_classifier(pooled).relu()),
    "modernbert": lambda module, pooled: module.classifier(module.head(pooled)),
    **dict.fromkeys(
        ("roberta", "xlm-roberta", "electra", "mpnet"), lambda module, pooled: module.classifier(pooled[:, None])
    ),
}
"""From the pooled hidden states of texts to their labels, by transformers' own modules of a model type."""


def load_text_encoder(spec: ModelSpec, device: str = "cpu") -> TextEncoder:
    """Load the text encoder in a Hugging Face directory.

    Raises:
        ValueError: it is none, or `max_model_len` is more than its positions, or tensors are missing or others than the
            model's, or a number is NaN or infinite, or a batch is not computed as transformers computes its texts.
    """
    path = spec.folder()
    config = read_config(path)
    fields = config.to_dict() | {"architectures": config.architectures}
    answer = answer_of(fields, path)
    if answer is None:
        raise ValueError(f"model: {path} holds no text encoder that is served")
    longest = longest_text(path, fields, spec.max_model_len)
    module = _load(path, config, answer, dtype_of(spec, config, device)).to(device).eval().requires_grad_(False)
    check_finite(weights_of(module), f"model {path}")
    if config.model_type == _BY_DISTANCE:
        attend_by_distance(module.base_model)
    encoder = TextEncoder(module, module.config, answer, longest, begins_behind_padding(config.model_type))
    _prove(encoder)
    return encoder


def _load(path: Path, config: Any, answer: TextAnswer, dtype: torch.dtype) -> Any:
    """Return transformers' module. ValueError: the files have not the model's tensors."""
    own: dict[str, Any] = (
        {"add_pooling_layer": False} if answer == "vectors" and config.model_type in _WITH_POOLER else {}
    )
    config.update({"use_cache": False})  # no token follows that would read keys again
    kind = AutoModelForSequenceClassification if answer == "labels" else AutoModel
    if not any(path.glob("*.safetensors")):
        raise ValueError(f"model directory {path} has no weights in *.safetensors, the only format that is loaded")
    with naming(path, kept=(ValueError,)), _quiet():
        module, report = kind.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=_ATTENTION,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below
            **own,
        )
    others = [
        name
        for name in report["unexpected_keys"]
        if not name.startswith(_UNREAD) and "pooler." not in name and not name.endswith("position_ids")
    ]
    shapes = [str(each[0] if isinstance(each, tuple) else each) for each in report["mismatched_keys"]]
    faults = {"missing": report["missing_keys"], "without a place in the model": others, "of another shape": shapes}
    if texts := [f"{', '.join(sorted(found)[:3])} {fault}" for fault, found in faults.items() if found]:
        raise ValueError(f"model: {path} would give wrong results: tensors {'; '.join(texts)}")
    return module


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from logging tensors without a place: heads that are not read, or a reason for an error."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _types(num_tokens: int, second: int) -> Tensor:
    types = torch.zeros(num_tokens, dtype=torch.int64)
    if second:
        types[second:] = 1
    return types


@torch.inference_mode()
def _prove(encoder: TextEncoder) -> None:
    """Check that a flat batch has the hidden states that transformers' eager attention gives each text alone.

    Raises:
        ValueError: they differ.
    """
    window = getattr(encoder.config, "sliding_window", None) or 0
    lengths = [min(length, encoder.max_model_len) for length in (5, 1, 2 * window + 9)]
    ids = torch.arange(sum(lengths)).mul(7919).remainder(encoder.vocab_size)
    texts: list[list[int]] = [text.tolist() for text in torch.split(ids, lengths)]
    ours = encoder.hidden(encoder.batch(texts, [0] * len(texts))).float()
    takes_attention = encoder.config.model_type != _BY_DISTANCE  # else its own code computes a text that is alone
    if takes_attention:
        encoder.module.set_attn_implementation("eager")
    alone = [encoder.hidden(encoder.batch([text], [0])).float() for text in texts]
    if takes_attention:
        encoder.module.set_attn_implementation(_ATTENTION)
    theirs = torch.cat(alone)
    error = ((ours - theirs).norm() / theirs.norm()).item()
    if not error <= _TOLERANCE.get(encoder.dtype, _TOLERANCE_16_BITS):  # NaN is refused too
        raise ValueError(
            f"{encoder.config.model_type}: hidden states of texts in one batch differ from those of each text alone by "
            f"{error:.1%} in norm"
        )


def _attend(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, K, T, D]: each of K heads is read by as many of H
    value: Tensor,  # [1, K, T, D]
    attention_mask: Tensor | None,
    text_lengths: Sequence[int],
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend within each text, in both directions. Returns [1, T, H, D].

    `sliding_window`: as transformers passes it to such layers, one more than the distance that a token sees.
    """
    assert attention_mask is None, (
        "transformers makes masks for the implementations in its mask interface alone; ours is none of them"
    )
    attend = partial(scaled_dot_product_attention, scale=scaling, enable_gqa=query.shape[1] != key.shape[1])
    parts = []
    for q, k, v in zip(*(torch.split(each, list(text_lengths), 2) for each in (query, key, value)), strict=True):
        if sliding_window is None or q.shape[2] < sliding_window:
            parts.append(attend(q, k, v))
        else:
            parts += _in_windows(attend, q, k, v, sliding_window - 1)
    return torch.cat(parts, 2).transpose(1, 2), None


def _in_windows(
    attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, distance: int
) -> list[Tensor]:
    """Return the attention of blocks of one text's tokens, each of which sees tokens up to `distance` away."""
    length = query.shape[2]
    places = torch.arange(length, device=query.device)
    parts = []
    for start in range(0, length, _BLOCK):
        stop = min(start + _BLOCK, length)
        first, last = max(start - distance, 0), min(stop + distance, length)
        is_seen = (places[start:stop, None] - places[first:last]).abs() <= distance
        rows = query[:, :, start:stop], key[:, :, first:last], value[:, :, first:last]
        parts.append(attend(*rows, attn_mask=is_seen))
    return parts


AttentionInterface.register(_ATTENTION, _attend)
