"""A checkpoint that cannot be served is refused from its files, before Ray starts."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from crossdock.cluster.serve import lifetime
from crossdock.cluster.serve.checkpoint_check import check_checkpoint, describe_weights
from tests.cluster.ports import free_port
from tests.cluster.watch.terminal import run
from tests.workers.text_encoders import FAMILIES


def folder_of(path: Path, config: Any) -> Path:
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("{", "config.json is not JSON"),
        ([], "config.json is not JSON of an object"),
        ({"model_type": 5}, "has no model_type"),
        ({"model_type": "kimi_k2"}, "has model_type 'kimi_k2', which transformers "),
        (
            {"model_type": "llama", "quantization_config": {"quant_method": "quark"}},
            "quant_method 'quark', which is not read",
        ),
        ({"model_type": "llama"}, "has no tokenizer.json and no other tokenizer; name one with --tokenizer"),
    ],
)
def test_checkpoint_that_lacks_something_is_refused_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Any, reason: str
) -> None:
    monkeypatch.setattr(lifetime, "serve_forever", lambda *_: pytest.fail("Ray would have started"))
    result = run("serve", str(folder_of(tmp_path, config)), "--port", str(free_port()))
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert reason in line


def test_model_types_pass_that_transformers_has_a_class_for_that_generates_text(tmp_path: Path) -> None:
    tables = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    served = {kind for table in tables for kind in table}
    assert served
    served |= set(FAMILIES)  # text encoders, which generate none
    for kind in CONFIG_MAPPING:
        folder = folder_of(tmp_path, {"model_type": kind})
        if kind in served:
            check_checkpoint(folder, needs_tokenizer=False)
        else:
            with pytest.raises(ValueError, match=f"model_type '{kind}', for which transformers .* has no model that"):
                check_checkpoint(folder, needs_tokenizer=False)


def test_checkpoint_with_tokenizer_passes(model_dir: Path, tmp_path: Path) -> None:
    check_checkpoint(model_dir)
    shutil.copy(model_dir / "config.json", tmp_path)
    check_checkpoint(tmp_path, needs_tokenizer=False)
    (tmp_path / "vocab.json").touch()  # as GPT-2 has it
    scheme = check_checkpoint(tmp_path)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(1 << 28)
    assert describe_weights(tmp_path, scheme) == "plain floats, 0.25 GiB in files"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"text_config": {"hidden_size": 8}}, "pools: checkpoint of 'small': .* has hidden_size 8 and .* None"),
        ({"rope_theta": 1e6}, "pools: checkpoint of 'small': .* has rope_theta 1000000.0 and .* 10000.0"),
        ({"vocab_size": 64}, "pools: checkpoint of 'small': .* has vocab_size 64 and .* 32; pools serve one model"),
        (
            {"quantization_config": {"quant_method": "quark"}},
            "pools: checkpoint of 'small': .*'quark', which is not read",
        ),
    ],
)
def test_checkpoint_of_a_pool_is_checked_and_printed_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reason: str
) -> None:
    started = []
    monkeypatch.setattr(lifetime, "serve_forever", lambda *_: started.append(True))
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    for name, config in (("plain", {}), ("fp8", quantised | changes)):
        (tmp_path / name).mkdir()
        folder_of(tmp_path / name, {"model_type": "llama", "vocab_size": 32, "rope_theta": 1e4} | config)
        save_file({}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "vocab.json").touch()
    pools = ["--pools", "large=1,small=1", "--set", f"pools.small.checkpoint={tmp_path / 'fp8'}"]
    result = run("serve", str(tmp_path / "plain"), *pools, "--port", str(free_port()))
    assert bool(started) == (not reason)
    if reason:
        assert (result.exit_code, bool(re.search(reason, result.stderr))) == (2, True), result.stderr
    else:
        assert f"Pool small: {tmp_path / 'fp8'}: fp8 (e4m3, a scale for each tensor), 0.00 GiB" in result.stdout
