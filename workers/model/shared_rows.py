"""The pictures of a step on several ranks: the driver encodes, and sends rows to the ranks that add them.

Only the driver has the encoder, and the embeddings by content. A row travels in the steps that read it. So a step sends
at most the bytes of its tokens' hidden states: once, and once more for each layer after which embeddings are added.
Tensor-parallel ranks exchange as many bytes twice in every layer.
"""

import numpy as np
import torch

from crossdock.kvtransfer.layout import layer_range
from crossdock.workers.model.architecture import num_deep_layers, text_config
from crossdock.workers.model.forward.step_pictures import PictureRows, StepPictures
from crossdock.workers.model.network import Network


def rows_of(model: Network, pictures: StepPictures) -> PictureRows | None:
    """Return the rows that this rank's part of a step reads; None: that part reads tokens alone.

    Collective in a step that reads pictures, after `send_rows` on the driver.
    """
    if pictures.prepared is not None or not pictures.is_read:
        return pictures.prepared
    links = model.part.collectives
    rank = model.part.position.rank
    assert links is not None, "this rank encodes, and has not prepared the step"
    num_rows = len(pictures.rows) if rank in _receivers(model) else 0
    shape = 1 + num_deep_layers(model.config), num_rows, text_config(model.config).hidden_size
    embeddings = torch.empty(shape, dtype=model.dtype, device=model.device)
    if num_rows:
        embeddings = links.receive_rows(embeddings)
    else:
        pictures.rows = np.zeros(0, np.int64)
    return PictureRows.of(pictures, embeddings)


@torch.inference_mode()
def send_rows(model: Network, pictures: StepPictures) -> None:
    """Send the rows of a step to the ranks that add them, each of which calls `rows_of`. The driver alone calls it."""
    if pictures.prepared is not None and len(pictures.rows) and model.part.collectives is not None:
        model.part.collectives.send_rows(pictures.prepared.embeddings, _receivers(model))


def _receivers(model: Network) -> list[int]:
    """Return the ranks beside the driver that add rows of pictures to hidden states.

    These ranks are in the first pipeline stage, and in stages with a layer after which embeddings are added.
    """
    position = model.part.position
    num_layers = text_config(model.config).num_hidden_layers
    first_layers = [layer_range(num_layers, position.num_stages, stage)[0] for stage in range(position.num_stages)]
    last = sum(first == 0 or first < num_deep_layers(model.config) for first in first_layers)
    return [rank for rank in range(last * position.tensor_size) if rank != position.driver]
