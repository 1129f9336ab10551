"""Weights as a checkpoint has them: in the dtype of the activations, or packed."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from crossdock.kernels.options import LoadFormat
from crossdock.workers.model.cut.collectives import Collectives
from crossdock.workers.model.cut.cut_model import cut_model
from crossdock.workers.model.cut.part import ModelPart
from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.weights.packed_layers import panel_bytes
from crossdock.workers.model.weights.weight_format import WeightBytes, WeightUse
from crossdock.workers.model.weights.weights import load_weights, model_on_meta, part_bytes


class PlainWeights:
    """The format of every weight that no other format is asked for."""

    name = "null"
    kernel = None
    tolerance = None
    is_cut = True

    def why_not(self, use: WeightUse) -> None:
        """Return None: everything computes such weights."""

    def read(
        self,
        config: PretrainedConfig,
        path: Path,
        dtype: torch.dtype,
        links: Collectives | None,
        device: str = "cpu",
        load_format: LoadFormat = "auto",
    ) -> tuple[Any, ModelPart | None]:
        if links is None or links.position.size == 1:
            return load_weights(config, path, dtype, device=device, load_format=load_format)
        cut = partial(cut_model, position=links.position, collectives=links)
        return load_weights(config, path, dtype, cut, device=device, load_format=load_format)

    def count_bytes(self, config: PretrainedConfig, position: RankPosition, dtype: torch.dtype) -> WeightBytes:
        module = model_on_meta(config, position, dtype)
        held = part_bytes(module)
        return WeightBytes(held, held, panel_bytes(module))
