"""Pictures and videos: the encoder of a multimodal model, its embeddings by content, and the positions of a prompt.

transformers' own code encodes: `get_image_features` and `get_video_features` of the model, with its own attention. Only
the text part computes through our attention, from embeddings in which the encoder's rows replace the placeholders.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PretrainedConfig

from crossdock.kernels.backend import CPP, Attention
from crossdock.workers.model.architecture import is_multimodal, num_deep_layers
from crossdock.workers.model.device_copies import timed
from crossdock.workers.model.forward.forward_context import context_or_none
from crossdock.workers.model.forward.step_pictures import PictureRows, StepPictures
from crossdock.workers.model.pictures.encoder_calls import (
    arguments_of,
    batches_of,
    is_passing,
    item_failure,
    layers_of,
)
from crossdock.workers.schedule.pictures.encoding import ItemFailure
from crossdock.workers.schedule.pictures.families import PictureFamily, picture_family
from crossdock.workers.schedule.pictures.whole_items import key_end
from crossdock.workers.schedule.request.batch import Batch
from crossdock.workers.schedule.request.items import LEVELS, Item
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.submission import InvalidField

_KINDS = {"image": ("image_token_id", "get_image_features"), "video": ("video_token_id", "get_video_features")}


def why_text_alone(config: PretrainedConfig, attention: Attention = CPP) -> str:
    """Return why a model takes no pictures here; empty: it takes them."""
    if not is_multimodal(config):
        return "the model takes text alone"
    try:
        family = _family(config)
    except ValueError as error:
        return str(error)
    if family.attends_both_ways and not attention.takes_key_end:
        return f"attention_backend {attention.name} is causal, and {config.model_type} is not within a picture"
    return ""


def _family(config: PretrainedConfig) -> PictureFamily:
    return picture_family(config.model_type, getattr(config.vision_config, "model_type", None))


@dataclass(slots=True)
class PromptPictures:
    """Where the items of one request are, and the positions of its tokens."""

    places: Sequence[tuple[bytes, NDArray[np.int64]]]  # of each item: content hash, positions of its placeholders
    positions: NDArray[np.int64] | None  # [3, n] of the prompt; None: each token has its own place
    delta: int = 0  # from a token's place to its position, after the prompt
    key_end: NDArray[np.int32] | None = None  # [n] of the prompt; see `AttentionBatch`


@dataclass(slots=True, eq=False)
class PictureEncoder:
    """Encodes the items of one model, and keeps their embeddings until the scheduler lets them go."""

    module: Any  # transformers' model, with its decoder behind our attention
    config: PretrainedConfig
    clock: Callable[[], float] = time.perf_counter
    most_embedding_tokens: int | None = None  # encoded by one call, unless one item has more; None: no matter how many
    _embeddings: dict[bytes, Tensor] = field(default_factory=dict)  # [1 + L, rows, E], by content
    _failed: dict[bytes, ItemFailure] = field(default_factory=dict)  # by content; the embeddings are zeros
    _prompts: dict[str, PromptPictures] = field(default_factory=dict)  # by request, of those with items

    def __post_init__(self) -> None:
        if num_deep := num_deep_layers(self.config):
            add_after(list(self.module.get_decoder().layers)[:num_deep])

    @property
    def family(self) -> PictureFamily:
        """Return the record of the model's family among the models that read pictures."""
        return _family(self.config)

    @property
    def attends_both_ways(self) -> bool:
        """Return whether a row of an item sees the item's later rows: then one step computes the whole item."""
        return self.family.attends_both_ways

    @property
    def _parameter(self) -> Tensor:
        """Return a parameter, which has the model's dtype and device."""
        parameter: Tensor = next(self.module.parameters())
        return parameter

    def _zeros(self, num_embedding_tokens: int) -> Tensor:
        """Return embeddings [1 + L, R, E] of zeros."""
        width: int = self.config.get_text_config(decoder=True).hidden_size
        return self._parameter.new_zeros(1 + num_deep_layers(self.config), num_embedding_tokens, width)

    @property
    def embedding_token_bytes(self) -> int:
        """Return the bytes of one embedding token."""
        return self._zeros(1).nbytes

    def limit_calls(self, most_embedding_tokens: int) -> None:
        """Encode at most so many rows by one call, unless one item has more."""
        self.most_embedding_tokens = most_embedding_tokens

    # -- requests --------------------------------------------------------------------------------------------------

    def locate(self, request: Request) -> PromptPictures:
        """Check the items of a request against its tokens, and compute the positions of its prompt.

        Raises:
            InvalidField: placeholders and rows do not match, or the grids are not those of the placeholders.
        """
        ids = np.array(request.submission.prompt_token_ids, np.int64)
        end = 0
        is_taken = np.zeros(len(ids), bool)
        places = list[tuple[bytes, NDArray[np.int64]]]()
        for number, item in enumerate(request.items):
            where = f"item {number} of the prompt, {item.kind} at token {item.start},"
            if not self.takes(item.kind):
                raise InvalidField(f"{where} is of a kind that this model does not take", "prompt")
            if item.start < end or item.end > len(ids):
                raise InvalidField(f"{where} overlaps the item before, or ends after the prompt", "prompt")
            end = item.end
            found = item.start + np.flatnonzero(ids[item.start : item.end] == self._placeholder(item.kind))
            if len(found) != item.num_embedding_tokens or not item.num_embedding_tokens:
                raise InvalidField(
                    f"{where} has {item.num_embedding_tokens} embedding tokens and {len(found)} placeholders", "prompt"
                )
            if self.attends_both_ways and found[0] and is_taken[found[0] - 1]:
                raise InvalidField(f"{where} follows the item before without a token between them", "prompt")
            is_taken[found] = True
            places.append((item.content_hash, found))
        for kind in _KINDS:
            if (surplus := np.flatnonzero((ids == self._placeholder(kind)) & ~is_taken)).size:
                raise InvalidField(f"token {surplus[0]} is a placeholder of {kind} that no item has", "prompt")
        ends = key_end(is_taken) if self.attends_both_ways else None
        return PromptPictures(places, *self._rope(request, places), ends)

    def add(self, request_id: str, pictures: PromptPictures) -> None:
        """Keep the result of `locate` for the steps of a request, until `remove`."""
        self._prompts[request_id] = pictures

    def remove(self, request_id: str) -> None:
        """Forget the items and positions of a request. Its embeddings stay for others."""
        self._prompts.pop(request_id, None)

    def clear(self) -> None:
        """Forget all embeddings, as the scheduler does after a step has failed."""
        self._embeddings.clear()
        self._failed.clear()

    def takes(self, kind: str) -> bool:
        """Return whether the model has an encoder for items of a kind."""
        return kind in _KINDS and hasattr(self.module, _KINDS[kind][1])

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
        ids = torch.tensor([request.submission.prompt_token_ids])
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
        rows = list[NDArray[np.int64]]()
        parts = list[tuple[bytes, int, int]]()
        axes: NDArray[np.int64] | None = None
        key_end: NDArray[np.int32] | None = None
        first = 0
        for part in batch.scheduled:
            prompt = self._prompts.get(part.request.id)
            last = first + part.num_tokens
            if prompt is not None:
                start = part.start
                end = part.start + part.num_tokens
                if prompt.positions is not None:
                    axes = np.tile(positions, (3, 1)) if axes is None else axes
                    axes[:, first:last] += prompt.delta
                    known = prompt.positions[:, start:end]
                    axes[:, first : first + known.shape[1]] = known
                if prompt.key_end is not None:
                    ends = prompt.key_end[start:end]
                    if (ends > np.arange(start + 1, start + 1 + len(ends))).any():
                        key_end = positions.astype(np.int32) + 1 if key_end is None else key_end
                        key_end[first : first + len(ends)] = ends
                for content_hash, places in prompt.places:
                    low, high = (int(place) for place in np.searchsorted(places, (start, end)))
                    if high > low:
                        rows.append(places[low:high] - start + first)
                        parts.append((content_hash, low, high))
            first = last
        if axes is not None and (axes == axes[0]).all():
            positions = axes[0]
            axes = None
        if not parts and axes is None and not any(batch.encoder):
            return positions, None
        flat = np.concatenate(rows) if rows else np.zeros(0, np.int64)
        return positions, StepPictures(batch.encoder, flat, parts, axes, key_end)

    @torch.inference_mode()
    def prepare(self, pictures: StepPictures, device: torch.device) -> None:
        """Do the encoder's work of a step, and set `prepared` if the step reads pictures. Steps come in order."""
        for content_hash in pictures.work.evicted:
            self._embeddings.pop(content_hash, None)
            self._failed.pop(content_hash, None)
        if pictures.work.items:
            pictures.timer = timed(device, self.clock, partial(self.encode, pictures.work.items))
        if not pictures.is_read:
            return
        needed = [content_hash for content_hash, _, _ in pictures.parts]
        pictures.failures = {each: self._failed[each] for each in needed if each in self._failed}
        parts = [self._embeddings[content_hash][:, first:end] for content_hash, first, end in pictures.parts]
        pictures.prepared = PictureRows.of(pictures, torch.cat(parts, 1) if parts else self._zeros(0))

    # -- encoding --------------------------------------------------------------------------------------------------

    def embeddings_of(self, item: Item) -> Tensor:
        """Return the embeddings [1 + L, rows, E] of an item that is in memory."""
        return self._embeddings[item.content_hash]

    def encode(self, items: Sequence[Item]) -> None:
        """Compute and keep the embeddings of `items`. One that cannot be encoded fails its own requests alone.

        Where memory is short, each item is tried once more, alone.
        """
        for batch in batches_of(items, self.most_embedding_tokens):
            try:
                self._keep(batch)
                continue
            except Exception as error:  # the encoder may raise anything at tensors that are not its own
                failure = error.with_traceback(None)  # its frames hold the memory of the call
            if is_passing(failure) and self._parameter.is_cuda:
                torch.cuda.empty_cache()
            for item in batch:
                try:
                    if len(batch) == 1 and not is_passing(failure):
                        raise failure
                    self._keep([item])
                except Exception as error:
                    self._embeddings[item.content_hash] = self._zeros(item.num_embedding_tokens)
                    self._failed[item.content_hash] = item_failure(error)

    def _keep(self, batch: Sequence[Item]) -> None:
        embeddings = self.features(batch)
        wanted = [item.num_embedding_tokens for item in batch]
        if embeddings.shape[1] != sum(wanted):
            raise ValueError(f"the encoder made {embeddings.shape[1]} rows for {sum(wanted)} placeholders")
        for item, own in zip(batch, torch.split(embeddings, wanted, 1), strict=True):
            self._embeddings[item.content_hash] = own if len(batch) == 1 else own.clone()  # else no part is freed alone

    @torch.inference_mode()
    def features(self, items: Sequence[Item]) -> Tensor:
        """Return the embeddings [1 + L, R, E] of items of one kind and shape, computed at once."""
        encode = getattr(self.module, _KINDS[items[0].kind][1])
        found = encode(**arguments_of(items, self._parameter, self.family.pixels == "tiles"))
        return layers_of(found).to(self._parameter.dtype)

    def measure(self, items: Sequence[Item]) -> float:
        """Encode items that may be in memory already, keep nothing, and return the seconds that this took."""

        def encode() -> None:
            for batch in batches_of(items, self.most_embedding_tokens):
                self.features(batch)

        return timed(self._parameter.device, self.clock, encode)()

    # -- measurements ----------------------------------------------------------------------------------------------

    def example(self, size: int) -> Item:
        """Return an item of noise, to measure with. A larger `size` is a larger picture, if the model has several."""
        vision = self.config.vision_config
        family = self.family
        channels = getattr(vision, "in_channels", getattr(vision, "num_channels", 3))
        generator = np.random.default_rng(size)
        grid = None
        if family.pixels == "patches":
            merged = vision.spatial_merge_size
            grid = np.array([[1, size * merged, size * merged]])
            depth = vision.temporal_patch_size * vision.patch_size**2
            shape: tuple[int, ...] = (int(grid.prod()), getattr(vision, "in_channels", 3) * depth)
        elif family.writing == "pixtral":
            merged = vision.patch_size * getattr(self.config, "spatial_merge_size", 1)
            side = min(size, vision.image_size // merged) * merged
            shape = (1, 3, side, side)
        else:
            sides = vision.image_size if isinstance(vision.image_size, Sequence) else (vision.image_size,) * 2
            shape = (*((1,) if family.pixels == "tiles" else ()), 1, 3, *sides)
        tensors: dict[str, NDArray[Any]] = {
            "pixel_values": generator.integers(0, 256, shape, np.uint8),
            LEVELS: np.tile(np.linspace(-2, 2, 256, dtype=np.float32), (channels, 1)),
        }
        if grid is not None:
            tensors["image_grid_thw"] = grid
        elif family.writing == "pixtral":
            tensors["image_sizes"] = np.array([shape[-2:]])
        rows = self.features([Item(0, 1, 1, "image", b"", tensors)]).shape[1]
        return Item(0, rows, rows, "image", size.to_bytes(16, "little"), tensors)


def add_after(layers: Sequence[nn.Module]) -> None:
    """Add the step's embeddings `[1 + l]` to the output of each of `layers`, numbered l from 0, in every forward pass.

    A layer of another pipeline stage is a placeholder without weights. It stays as it is.
    """
    for layer, module in enumerate(layers):
        if any(True for _ in module.parameters()):
            # Before all other hooks: one of them leaves a pipeline stage after its last layer.
            module.register_forward_hook(partial(_add, layer), prepend=True)


def _add(layer: int, module: nn.Module, args: object, output: Tensor) -> Tensor | None:
    """Add the embeddings of items that belong behind a layer to its output [1, T, E]."""
    context = context_or_none()
    pictures = context.pictures if context is not None else None
    if pictures is None or not len(pictures.rows):
        return None
    output = output.clone()
    output[0, pictures.rows] += pictures.embeddings[1 + layer]
    return output
