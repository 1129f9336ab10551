"""Weights come from safetensors only: other formats are pickles, which run code when they are loaded. A loaded model
names the files that it came from."""

import json
from pathlib import Path

import pytest
import torch

from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.weights.fingerprint import fingerprint
from tests.workers.architectures import build


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return Path.touch, (self.path,)


def test_checkpoint_with_pickled_weights_alone_is_refused_unread(tmp_path: Path) -> None:
    module, trap = build("llama", {}), tmp_path / "unpickled"
    model = tmp_path / "model"
    module.save_pretrained(model)
    torch.save({**module.state_dict(), "lm_head.bias": Trap(trap)}, model / "pytorch_model.bin")
    assert load_model(ModelSpec(str(model))).module is not None, "beside safetensors they are ignored"
    (model / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no weights in \*\.safetensors, the only format that is loaded"):
        load_model(ModelSpec(str(model)))
    assert not trap.exists()


def test_checkpoint_that_brings_code_is_refused(tmp_path: Path) -> None:
    module, trap = build("llama", {}), tmp_path / "run"
    model = tmp_path / "model"
    module.save_pretrained(model)
    own = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    config = json.loads((model / "config.json").read_text()) | {"model_type": "own", "auto_map": own}
    (model / "config.json").write_text(json.dumps(config))
    (model / "own.py").write_text(f"open({str(trap)!r}, 'w')\n")
    with pytest.raises(ValueError, match=r"config.json cannot be read: .* contains custom code"):
        load_model(ModelSpec(str(model)))
    assert not trap.exists()


def test_loaded_model_has_the_fingerprint_of_its_files(tmp_path: Path) -> None:
    build("llama", {}).save_pretrained(tmp_path)
    assert load_model(ModelSpec(str(tmp_path))).checkpoint == fingerprint(tmp_path)
