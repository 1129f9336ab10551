"""Models that would produce wrong tokens are refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.load import load_model, wrap_module
from crossdock.workers.model.logits_check import UnsupportedModelError
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.probe import refuse_by_config
from tests.workers.architectures import RECURRENT, REFUSED, SERVED, build
from tests.workers.ranks import saved


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_architecture_is_refused_with_reason(name: str) -> None:
    options, reason = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=reason):
        wrap_module(build(name, options))


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_on_several_ranks_are_refused_before_weights_are_loaded(name: str) -> None:
    config = build(name, SERVED[name]).config
    refuse_by_config(config)
    with pytest.raises(UnsupportedModelError, match="states are not divided among ranks: set tensor_parallel_size"):
        refuse_by_config(config, num_ranks=2)


def test_several_ranks_of_a_recurrent_model_end_with_the_reason(tmp_path: Path) -> None:
    """Also where the model could not be cut for another reason, which would hide this one."""
    path = saved(build("qwen3_next", SERVED["qwen3_next"]), tmp_path)
    links = SimpleNamespace(position=RankPosition(0, 2, 1))
    with pytest.raises(UnsupportedModelError, match="states are not divided among ranks"):
        load_model(ModelSpec(str(path), "float32"), links=cast(Any, links))
