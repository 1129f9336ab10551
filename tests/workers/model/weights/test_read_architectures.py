"""The weights of every architecture pass the checks of a load, and are read as transformers saved them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from crossdock.workers.model.weights.formats import PlainWeights
from tests.workers.architectures import RECURRENT, SERVED, build
from tests.workers.multimodal import CONFIGS, build_multimodal

MODULES: dict[str, Callable[[], Any]] = {
    **{name: partial(build, name, options) for name, options in (SERVED | RECURRENT).items()},
    **{name: partial(build_multimodal, name) for name in CONFIGS},
}


@pytest.mark.parametrize("share", [*range(4), *(pytest.param(share, marks=pytest.mark.soak) for share in range(4, 8))])
def test_architectures_are_read_as_transformers_saves_them(share: int, tmp_path: Path) -> None:
    for name in list(MODULES)[share::8]:
        module = MODULES[name]()
        module.save_pretrained(tmp_path)
        expected = module.state_dict()
        if name == "youtu":  # transformers zeroes the row of the padding token after each load
            expected["model.embed_tokens.weight"][0] = 0
        found = PlainWeights().read(module.config, tmp_path, torch.float32, None)[0].state_dict()
        assert all(torch.equal(value, expected[key]) for key, value in found.items()), name
