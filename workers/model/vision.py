"""Pictures and videos: the encoder of a multimodal model, its embeddings by content, and the positions of a prompt.

transformers' own code encodes: `get_image_features` and `get_video_features` of the model, with its own attention. Only
the text part computes through our attention, from embeddings in which the encoder's rows replace the placeholders.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PretrainedConfig

from crossdock.workers.model.forward_context import ATTENTION_NAME, ForwardContext, context_or_none
from crossdock.workers.schedule.batch import Batch
from crossdock.workers.schedule.encoding import EncoderWork
from crossdock.workers.schedule.items import Item
from crossdock.workers.schedule.request import InvalidField, Request

_FAMILIES = {"idefics3", "smolvlm", "llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "mistral3", "internvl"}
"""Models whose pictures were compared with transformers' own pass, chunk by chunk. Others take text alone."""

_BOTH_WAYS = {"gemma3", "gemma3n", "gemma4", "paligemma"}  # attention within a picture is not causal
_KINDS = {"image": ("image_token_id", "get_image_features"), "video": ("video_token_id", "get_video_features")}
_NOT_ENCODED = {"second_per_grid_ts"}  # of positions alone


def is_multimodal(config: PretrainedConfig) -> bool:
    """Return whether a model has an encoder of pictures beside its decoder."""
    return getattr(config, "vision_config", None) is not None


def attention_names(config: PretrainedConfig, name: str = ATTENTION_NAME) -> "str | dict[str, str]":
    """Return the attention of each part of a model, as transformers wants it: `name` for the decoder.

    An encoder of pictures never has ours: it would write to the KV pages.
    """
    return {"text_config": name, "vision_config": "sdpa"} if is_multimodal(config) else name


def num_deep_layers(config: PretrainedConfig) -> int:
    """Return after how many layers embeddings of pictures are added to the hidden states (Qwen3-VL's DeepStack)."""
    return len(getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ())


def why_text_alone(config: PretrainedConfig, num_ranks: int, device: str) -> str:
    """Return why a model takes no pictures here; empty: it takes them."""
    if not is_multimodal(config):
        return "the model takes text alone"
    if config.model_type in _BOTH_WAYS:
        return f"{config.model_type} attends in both directions within a picture, which paged attention does not"
    if config.model_type not in _FAMILIES:
        return f"pictures of {config.model_type} are not supported; supported are {', '.join(sorted(_FAMILIES))}"
    if num_ranks > 1:
        return "the replica has several ranks, and only one of them would encode"
    if device != "cpu":
        return "on GPUs no memory is set aside for encoding yet"
    return ""


@dataclass(slots=True)
class StepPictures:
    """The pictures of one step: what to encode first, and which rows of the flat batch are embeddings of items."""

    work: EncoderWork
    rows: NDArray[np.int64]  # [R], among the T of the step
    parts: Sequence[tuple[bytes, int, int]]  # (content hash, first row, end) of the embeddings, in the order of `rows`
    positions: NDArray[np.int64] | None = None  # [3, T]; None: one for each token, which the step has
    seconds: float = 0.0  # that encoding took
    failures: Mapping[bytes, str] = field(default_factory=dict)  # why items of `parts` have no embeddings, by content


class PictureRows:
    """The rows of a flat batch that are embeddings of items, on the device."""

    __slots__ = ("embeddings", "positions", "rows")

    def __init__(self, rows: Tensor, embeddings: Tensor, positions: Tensor | None) -> None:
        self.rows = rows  # [R]
        self.embeddings = embeddings  # [1 + L, R, E]: of the input, and added after each of the first L layers
        self.positions = positions  # [3, T]; None: the step's own


@dataclass(slots=True)
class PromptPictures:
    """Where the items of one request are, and the positions of its tokens."""

    places: Sequence[tuple[bytes, NDArray[np.int64]]]  # of each item: content hash, positions of its placeholders
    positions: NDArray[np.int64] | None  # [3, n] of the prompt; None: each token has its own place
    delta: int = 0  # from a token's place to its position, after the prompt


@dataclass(slots=True, eq=False)
class PictureEncoder:
    """Encodes the items of one model, and keeps their embeddings until the scheduler lets them go."""

    module: Any  # transformers' model, with its decoder behind our attention
    config: PretrainedConfig
    clock: Callable[[], float] = time.perf_counter
    _embeddings: dict[bytes, Tensor] = field(default_factory=dict)  # [1 + L, rows, E], by content
    _failed: dict[bytes, str] = field(default_factory=dict)  # why, by content; the embeddings are zeros
    _prompts: dict[str, PromptPictures] = field(default_factory=dict)  # by request, of those with items

    def __post_init__(self) -> None:
        for layer, module in enumerate(self._deep_layers()):
            module.register_forward_hook(partial(_add_deep, layer))

    @property
    def num_deep(self) -> int:
        """Return after how many layers embeddings of items are added to the hidden states (DeepStack)."""
        return num_deep_layers(self.config)

    @property
    def _parameter(self) -> Tensor:
        """Return a parameter, which has the model's dtype and device."""
        parameter: Tensor = next(self.module.parameters())
        return parameter

    def _zeros(self, num_rows: int) -> Tensor:
        """Return embeddings [1 + L, R, E] of zeros."""
        width: int = self.config.get_text_config(decoder=True).hidden_size
        return self._parameter.new_zeros(1 + self.num_deep, num_rows, width)

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row of embeddings."""
        return self._zeros(1).nbytes

    # -- requests --------------------------------------------------------------------------------------------------

    def locate(self, request: Request) -> PromptPictures:
        """Check the items of a request against its tokens, and compute the positions of its prompt.

        Raises:
            InvalidField: placeholders and rows do not match, or the grids are not those of the placeholders.
        """
        ids, end = np.array(request.prompt_token_ids, np.int64), 0
        is_taken, places = np.zeros(len(ids), bool), list[tuple[bytes, NDArray[np.int64]]]()
        for number, item in enumerate(request.items):
            where = f"item {number} of the prompt, {item.kind} at token {item.start},"
            if item.kind not in _KINDS or not hasattr(self.module, _KINDS[item.kind][1]):
                raise InvalidField(f"{where} is of a kind that this model does not take", "prompt")
            if item.start < end or item.end > len(ids):
                raise InvalidField(f"{where} overlaps the item before, or ends after the prompt", "prompt")
            end = item.end
            found = item.start + np.flatnonzero(ids[item.start : item.end] == self._placeholder(item.kind))
            if len(found) != item.num_rows or not item.num_rows:
                raise InvalidField(
                    f"{where} has {item.num_rows} rows of embeddings and {len(found)} placeholders", "prompt"
                )
            is_taken[found] = True
            places.append((item.content_hash, found))
        for kind in _KINDS:
            if (surplus := np.flatnonzero((ids == self._placeholder(kind)) & ~is_taken)).size:
                raise InvalidField(f"token {surplus[0]} is a placeholder of {kind} that no item has", "prompt")
        return PromptPictures(places, *self._rope(request, places))

    def add(self, request_id: str, pictures: PromptPictures) -> None:
        """Keep what `locate` found for the steps of a request, until `remove`."""
        self._prompts[request_id] = pictures

    def remove(self, request_id: str) -> None:
        """Forget what a request needed. Its embeddings stay for others."""
        self._prompts.pop(request_id, None)

    def clear(self) -> None:
        """Forget all embeddings, as the scheduler does after a step has failed."""
        self._embeddings.clear()
        self._failed.clear()

    def _placeholder(self, kind: str) -> int:
        name = _KINDS[kind][0]
        token: int | None = getattr(self.config, name, None)
        return -1 if token is None else token

    @torch.inference_mode()
    def _rope(
        self, request: Request, places: Sequence[tuple[bytes, NDArray[np.int64]]]
    ) -> tuple[NDArray[np.int64] | None, int]:
        """Return the positions [3, n] of a prompt, and what is added to places after it; (None, 0) without mrope."""
        index = getattr(self.module.model, "get_rope_index", None)
        if index is None:
            return None, 0
        kinds = np.zeros(request.num_prompt_tokens, np.int64)
        given: dict[str, list[NDArray[Any]]] = {}
        for item, (_, found) in zip(request.items, places, strict=True):
            kinds[found] = 1 if item.kind == "image" else 2
            for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts"):
                if name in item.tensors:
                    given.setdefault(name, []).append(np.atleast_1d(item.tensors[name]))
        ids = torch.tensor([request.prompt_token_ids])
        tensors = {name: torch.from_numpy(np.concatenate(arrays)) for name, arrays in given.items()}
        try:
            positions, delta = index(ids, mm_token_type_ids=torch.from_numpy(kinds)[None], **tensors)
        except (RuntimeError, ValueError, TypeError, IndexError, StopIteration) as error:
            raise InvalidField(
                f"the grids of the prompt's items do not match its placeholders: {error}", "prompt"
            ) from error
        return positions[:, 0].numpy().astype(np.int64), int(delta)

    # -- steps -----------------------------------------------------------------------------------------------------

    def of_step(self, batch: Batch, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], StepPictures | None]:
        """Return the positions [T] of a step's tokens, and its pictures; None: it needs nothing of this encoder.

        `positions`: the place of each token in its request.
        """
        rows, parts = list[NDArray[np.int64]](), list[tuple[bytes, int, int]]()
        axes: NDArray[np.int64] | None = None
        first = 0
        for part in batch.scheduled:
            prompt, last = self._prompts.get(part.request.id), first + part.num_tokens
            if prompt is not None:
                start, end = part.start, part.start + part.num_tokens
                if prompt.positions is not None:
                    axes = np.tile(positions, (3, 1)) if axes is None else axes
                    axes[:, first:last] += prompt.delta
                    known = prompt.positions[:, start:end]
                    axes[:, first : first + known.shape[1]] = known
                for content_hash, places in prompt.places:
                    low, high = (int(place) for place in np.searchsorted(places, (start, end)))
                    if high > low:
                        rows.append(places[low:high] - start + first)
                        parts.append((content_hash, low, high))
            first = last
        if axes is not None and (axes == axes[0]).all():
            positions, axes = axes[0], None
        if not parts and axes is None and not batch.encoder.items and not batch.encoder.evicted:
            return positions, None
        flat = np.concatenate(rows) if rows else np.zeros(0, np.int64)
        return positions, StepPictures(batch.encoder, flat, parts, axes)

    @torch.inference_mode()
    def prepare(self, pictures: StepPictures, device: torch.device) -> PictureRows | None:
        """Do the encoder's work of a step, and return the step's rows; None: there are none. Steps come in order."""
        for content_hash in pictures.work.evicted:
            self._embeddings.pop(content_hash, None)
            self._failed.pop(content_hash, None)
        if pictures.work.items:
            started = self.clock()
            self.encode(pictures.work.items)
            pictures.seconds = self.clock() - started
        positions = None if pictures.positions is None else torch.from_numpy(pictures.positions).to(device)
        if not pictures.parts and positions is None:
            return None
        needed = [content_hash for content_hash, _, _ in pictures.parts]
        pictures.failures = {each: self._failed[each] for each in needed if each in self._failed}
        rows = torch.from_numpy(pictures.rows).to(device)
        parts = [self._embeddings[content_hash][:, first:end] for content_hash, first, end in pictures.parts]
        return PictureRows(rows, torch.cat(parts, 1) if parts else self._zeros(0), positions)

    # -- encoding --------------------------------------------------------------------------------------------------

    def embeddings_of(self, item: Item) -> Tensor:
        """Return the embeddings [1 + L, rows, E] of an item that is in memory."""
        return self._embeddings[item.content_hash]

    def encode(self, items: Sequence[Item]) -> None:
        """Compute and keep the embeddings of `items`. One that cannot be encoded fails its own requests alone."""
        for batch in _batches(items):
            try:
                self._keep(batch)
                continue
            except Exception as error:  # the encoder may raise anything at tensors that are not its own
                failure = error
            for item in batch:
                try:
                    if len(batch) == 1:
                        raise failure
                    self._keep([item])
                except Exception as error:
                    self._embeddings[item.content_hash] = self._zeros(item.num_rows)
                    self._failed[item.content_hash] = f"a picture cannot be encoded: {type(error).__name__}: {error}"

    def _keep(self, batch: Sequence[Item]) -> None:
        embeddings = self.features(batch)
        wanted = [item.num_rows for item in batch]
        if embeddings.shape[1] != sum(wanted):
            raise ValueError(f"the encoder made {embeddings.shape[1]} rows for {sum(wanted)} placeholders")
        for item, own in zip(batch, torch.split(embeddings, wanted, 1), strict=True):
            self._embeddings[item.content_hash] = own if len(batch) == 1 else own.clone()  # else no part is freed alone

    @torch.inference_mode()
    def features(self, items: Sequence[Item]) -> Tensor:
        """Return the embeddings [1 + L, R, E] of items of one kind and shape, computed at once."""
        encode = getattr(self.module, _KINDS[items[0].kind][1])
        found = encode(**self._arguments(items))
        layers = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
        flat = [each if isinstance(each, Tensor) else torch.cat(list(each)) for each in layers]
        return torch.stack([each.reshape(-1, each.shape[-1]) for each in flat]).to(self._parameter.dtype)

    def measure(self, items: Sequence[Item]) -> float:
        """Encode items that may be in memory already, keep nothing, and return the seconds that this took."""
        started = self.clock()
        for batch in _batches(items):
            self.features(batch)
        return self.clock() - started

    def _arguments(self, items: Sequence[Item]) -> dict[str, Tensor]:
        """Return the arguments of one call for several items, on the encoder's device and in its dtype."""
        like, is_nested = self._parameter, self.config.model_type in ("idefics3", "smolvlm")
        parts, joined = [_by_picture(item.tensors) for item in items], dict[str, Tensor]()
        for name in parts[0]:
            tensor = torch.from_numpy(np.concatenate([part[name] for part in parts])).to(like.device)
            tensor = tensor.to(like.dtype) if tensor.is_floating_point() else tensor
            joined[name] = tensor[None] if is_nested and name in _PER_PICTURE else tensor
        return joined

    def _deep_layers(self) -> Sequence[nn.Module]:
        return list(self.module.get_decoder().layers)[: self.num_deep] if self.num_deep else []

    # -- measurements ----------------------------------------------------------------------------------------------

    def example(self, size: int) -> Item:
        """Return an item of noise, to measure with. A larger `size` is a larger picture, if the model has several."""
        vision, model = self.config.vision_config, self.config.model_type
        generator, grid = np.random.default_rng(size), None
        if model.startswith("qwen"):
            merged = vision.spatial_merge_size
            grid = np.array([[1, size * merged, size * merged]])
            depth = vision.temporal_patch_size * vision.patch_size**2
            shape: tuple[int, ...] = (int(grid.prod()), getattr(vision, "in_channels", 3) * depth)
        elif vision.model_type == "pixtral":
            merged = vision.patch_size * getattr(self.config, "spatial_merge_size", 1)
            side = min(size, vision.image_size // merged) * merged
            shape = (1, 3, side, side)
        else:
            sides = vision.image_size if isinstance(vision.image_size, Sequence) else (vision.image_size,) * 2
            shape = (*((1,) if model in ("idefics3", "smolvlm") else ()), 1, 3, *sides)
        tensors: dict[str, NDArray[Any]] = {"pixel_values": generator.standard_normal(shape, np.float32)}
        if grid is not None:
            tensors["image_grid_thw"] = grid
        elif vision.model_type == "pixtral":
            tensors["image_sizes"] = np.array([shape[-2:]])
        rows = self.features([Item(0, 1, 1, "image", b"", tensors)]).shape[1]
        return Item(0, rows, rows, "image", size.to_bytes(16, "little"), tensors)


def _add_deep(layer: int, module: nn.Module, args: object, output: Tensor) -> Tensor | None:
    """Add the embeddings of items that belong behind a layer to its output [1, T, E]. A hook of that layer."""
    context: ForwardContext | None = context_or_none()
    pictures = context.pictures if context is not None else None
    if pictures is None or not len(pictures.rows):
        return None
    output = output.clone()
    output[0, pictures.rows] += pictures.embeddings[1 + layer]
    return output


def _batches(items: Sequence[Item]) -> list[list[Item]]:
    """Divide items into those that one call encodes: of one kind, with the same tensors of shapes that can be joined.

    Pixtral's encoder is given one at a time: it would compute the attention of each picture to all others.
    """

    def key(item: Item) -> tuple[Any, ...]:
        alone = item.content_hash if "image_sizes" in item.tensors else b""
        return (item.kind, alone, *((name, tensor.shape[1:]) for name, tensor in _by_picture(item.tensors).items()))

    ordered = sorted(items, key=lambda item: repr(key(item)))
    return [list(batch) for _, batch in groupby(ordered, key=lambda item: repr(key(item)))]


_PER_PICTURE = {"pixel_values": 3, "pixel_values_videos": 3, "pixel_attention_mask": 2}
"""Dimensions of one picture in an argument that has three or more; Qwen's are rows of patches, [patches, depth]."""
_PER_ITEM = {"image_grid_thw": 1, "video_grid_thw": 1, "image_sizes": 1}


def _by_picture(tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the encoder's arguments with pictures, tiles, patches or grids along the first dimension alone."""
    found = {}
    for name, tensor in sorted(tensors.items()):
        array = np.asarray(tensor)
        if name in _PER_ITEM:
            array = array.reshape(-1, array.shape[-1])
        elif name in _PER_PICTURE and array.ndim >= 3:
            array = array.reshape(-1, *array.shape[-_PER_PICTURE[name] :])
        if name not in _NOT_ENCODED:
            found[name] = array
    return found
