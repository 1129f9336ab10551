"""Cut a model for one rank while it is on the meta device, so that no rank ever holds more than its share."""

from typing import Any

from torch import nn

from crossdock.workers.model.cut.collectives import Collectives
from crossdock.workers.model.cut.part import ModelPart
from crossdock.workers.model.cut.plan import TensorPlan
from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.cut.stage import PipelineStage
from crossdock.workers.model.pictures.vision import why_text_alone


def cut_model(model: Any, position: RankPosition, collectives: Collectives | None) -> ModelPart:
    """Cut a transformers causal LM on the meta device down to the part that the rank at `position` holds.

    `collectives` may be None if the part is only measured.

    Raises:
        CannotCut: fewer heads than ranks, fewer layers than stages, or state that layers share across stages.
    """
    config = model.config.get_text_config(decoder=True)
    part = ModelPart(position, num_layers=config.num_hidden_layers, collectives=collectives)
    if position.tensor_size > 1:
        TensorPlan(model, config, part, collectives).apply()
    if position.num_stages > 1:
        part.stage = PipelineStage(model, config, position, collectives)
        part.first_layer = part.stage.first_layer
        part.num_layers = part.stage.num_layers
        part.first_place = part.stage.first_place
    if not position.is_driver and not why_text_alone(model.config):
        _drop_encoder(model)
    held = model.state_dict()
    part.slices = {name: kept for name, kept in part.slices.items() if name in held}  # without other stages' tensors
    part.slots = [each for each in part.slots if any(name.startswith(f"{each.name}.") for name in held)]
    return part


def _drop_encoder(model: Any) -> None:
    """Leave the encoder of pictures, with its projector, to the driver, which encodes for all ranks."""
    decoder = model.get_decoder()
    for name, module in list(model.model.named_children()):
        if module is not decoder:
            setattr(model.model, name, nn.Identity())
