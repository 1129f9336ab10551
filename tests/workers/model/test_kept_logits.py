"""A start keeps the logits of a model's own code. Later starts of the same weights compare theirs with these."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from crossdock.workers.model import logits_check
from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.network import Network
from tests.workers.architectures import build


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Path], int]:
    """Return a function that loads a model and returns how often transformers' own code computed it."""
    count, logits = [0], Network.logits

    def counted(*args: object, **inputs: object) -> object:
        count[0] += 1
        return logits(*args, **inputs)  # type: ignore[arg-type]

    def load(path: Path) -> int:
        before = count[0]
        load_model(ModelSpec(str(path), dtype="float32", cpu_kernels="torch"))
        return count[0] - before

    monkeypatch.setattr(logits_check, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(Network, "logits", counted)
    return load


def test_later_start_does_not_compute_the_logits_that_an_earlier_one_kept(
    forwards: Callable[[Path], int], tmp_path: Path
) -> None:
    build("llama", {}).save_pretrained(tmp_path / "model")
    first, second = forwards(tmp_path / "model"), forwards(tmp_path / "model")
    assert first - second == 2


def test_other_weights_are_not_compared_with_logits_of_the_weights_before(
    forwards: Callable[[Path], int], tmp_path: Path
) -> None:
    module = build("llama", {})
    module.save_pretrained(tmp_path / "model")
    first = forwards(tmp_path / "model")
    with torch.no_grad():
        module.lm_head.weight.neg_()
    module.save_pretrained(tmp_path / "model")
    assert forwards(tmp_path / "model") == first
    assert len([*(tmp_path / "logits").iterdir()]) == 2


@pytest.mark.parametrize("harm", ["other numbers", "half of the file", "no logits"])
def test_kept_logits_that_are_wrong_refuse_no_model(forwards: Callable[[Path], int], tmp_path: Path, harm: str) -> None:
    build("llama", {}).save_pretrained(tmp_path / "model")
    first = forwards(tmp_path / "model")
    (file,) = (tmp_path / "logits").iterdir()
    if harm == "half of the file":
        file.write_bytes(file.read_bytes()[:-4096])
    else:
        logits = load_file(file)["logits"]
        save_file({"logits": -logits} if harm == "other numbers" else {"others": logits}, file)
    assert forwards(tmp_path / "model") == first
