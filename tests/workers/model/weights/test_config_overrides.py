"""Values in place of those of config.json: what they give transformers, and the folder of links that has them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from crossdock.cluster.config import ClusterConfig, ModelConfig
from crossdock.workers.model.weights.checkpoint import model_name, resolve_model
from crossdock.workers.model.weights.config_overrides import overridden
from crossdock.workers.model.weights.fingerprint import fingerprint
from crossdock.workers.model.weights.weights import read_config
from tests.workers.architectures import build

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
OLDER = {"model_type": "qwen3", "rope_theta": 5e5, "rope_scaling": None}
NEWER = {"model_type": "qwen3", "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
INSIDE = {"model_type": "qwen2_vl", "vision_config": {"depth": 2}, "text_config": {**NEWER, "model_type": "qwen2"}}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CROSSDOCK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def read_by_transformers(fields: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the rotation that transformers reads from a config.json."""
    (folder / "config.json").write_text(json.dumps(fields))
    found: dict[str, Any] = AutoConfig.from_pretrained(folder).get_text_config(decoder=True).rope_parameters
    return found


@pytest.mark.parametrize("found", [OLDER, NEWER, INSIDE], ids=["older form", "newer form", "in text_config"])
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_scaling_keeps_the_base_of_the_model_in_each_form(name: str, found: dict[str, Any], tmp_path: Path) -> None:
    asked = read_by_transformers(overridden(found, {name: YARN}), tmp_path)
    assert asked == {**YARN, "rope_theta": 5e5}
    named = read_by_transformers(overridden(found, {name: {**YARN, "rope_theta": 3.0}}), tmp_path)
    assert named == {**YARN, "rope_theta": 3.0}


@pytest.mark.parametrize("found", [OLDER, NEWER, INSIDE], ids=["older form", "newer form", "in text_config"])
@pytest.mark.parametrize("names", [("rope_scaling", "rope_theta"), ("rope_theta", "rope_scaling")])
def test_base_and_scaling_are_replaced_in_any_order(
    names: tuple[str, str], found: dict[str, Any], tmp_path: Path
) -> None:
    values = {"rope_scaling": YARN, "rope_theta": 7e6}
    asked = read_by_transformers(overridden(found, {name: values[name] for name in names}), tmp_path)
    assert asked == {**YARN, "rope_theta": 7e6}


def test_scaling_of_null_ends_that_of_the_model(tmp_path: Path) -> None:
    found = {**OLDER, "rope_scaling": YARN}
    assert read_by_transformers(overridden(found, {"rope_scaling": None}), tmp_path)["rope_type"] == "default"


def test_sections_of_pictures_stay_beside_a_scaling() -> None:
    sections = {"mrope_section": [2, 3, 3], "mrope_interleaved": True}
    found = {"text_config": {"rope_scaling": {"rope_type": "default", **sections}, "rope_theta": 9.0}}
    assert overridden(found, {"rope_scaling": YARN})["text_config"]["rope_scaling"] == {**sections, **YARN}


def test_kinds_of_layers_that_rotate_apart_are_named_one_by_one() -> None:
    slow, fast = ({"rope_type": "default", "rope_theta": base} for base in (1e6, 1e4))
    found = {"rope_parameters": {"full_attention": slow, "sliding_attention": fast}}
    changed = overridden(found, {"rope_parameters": {"full_attention": YARN}})
    assert changed["rope_parameters"] == {"full_attention": {**YARN, "rope_theta": 1e6}, "sliding_attention": fast}
    for name, value in (("rope_scaling", YARN), ("rope_theta", 1e6)):
        with pytest.raises(ValueError, match="full_attention, sliding_attention rotate in their own ways"):
            overridden(found, {name: value})


def test_field_is_replaced_wherever_it_stands_and_parts_keep_their_other_fields() -> None:
    found = {"a": 1, "both": 1, "text_config": {"b": 1, "both": 1, "c": 1}}
    asked = {"a": 2, "b": 2, "both": 2, "new": 2, "text_config": {"c": 2}}
    assert overridden(found, asked) == {"a": 2, "both": 2, "new": 2, "text_config": {"b": 2, "both": 2, "c": 2}}
    assert found == {"a": 1, "both": 1, "text_config": {"b": 1, "both": 1, "c": 1}}


def test_folder_has_links_to_all_files_and_is_made_again_when_the_model_changes(tmp_path: Path) -> None:
    model = tmp_path / "m"
    build("llama", {}).save_pretrained(model)
    (model / "1_Pooling").mkdir()
    folder = resolve_model(str(model), {"rms_norm_eps": 0.5})
    assert {file.name for file in folder.iterdir()} == {file.name for file in model.iterdir()}
    assert json.loads((folder / "config.json").read_text())["rms_norm_eps"] == 0.5
    assert (folder / "model.safetensors").samefile(model / "model.safetensors")
    assert folder == resolve_model(str(model), {"rms_norm_eps": 0.5})
    assert folder.name == model_name(str(model)) == "m"
    assert len({fingerprint(model), fingerprint(folder), fingerprint(resolve_model(str(model), {}))}) == 2
    (model / "tokenizer_config.json").write_text("{}")
    assert (resolve_model(str(model), {"rms_norm_eps": 0.5}) / "tokenizer_config.json").is_file()
    fields = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(fields | {"head_dim": 4}))
    assert json.loads((resolve_model(str(model), {"rms_norm_eps": 0.5}) / "config.json").read_text())["head_dim"] == 4


def test_override_that_a_refusal_names_leaves_the_field_out(tmp_path: Path) -> None:
    build("llama", {}).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"use_qk_norm": True}))
    with pytest.raises(ValueError, match="use_qk_norm is True") as refused:
        read_config(resolve_model(str(tmp_path)))
    overrides = json.loads(re.findall(r"--hf-overrides '(.*)'", str(refused.value))[0])
    assert read_config(resolve_model(str(tmp_path), overrides)).use_qk_norm is None


@pytest.mark.parametrize("name", ["model_type", "quantization_config"])
def test_what_the_files_of_weights_are_cannot_be_replaced(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} cannot be replaced"):
        ModelConfig(hf_overrides={name: "other"})


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_name_of_a_rotation_alone_is_refused(name: str) -> None:
    """TGI's --rope-scaling has a name, and its factor is another flag."""
    with pytest.raises(ValueError, match=f"{name} must be an object, such as .*\"factor\": 2.0.* not 'linear'"):
        ModelConfig(hf_overrides={name: "linear"})


def test_overrides_reach_the_replicas_of_every_pool_and_estimates_of_gpus(tmp_path: Path) -> None:
    build("llama", {"max_position_embeddings": 64}).save_pretrained(tmp_path / "m")
    text = {"path": str(tmp_path / "m"), "hf_overrides": {"sliding_window": None}}
    pools = [{"name": role, "emulated": "h200"} for role in ("prefill", "decode")]
    config = ClusterConfig.model_validate({"model": text, "pools": pools})
    assert [config.replica_spec(pool).model.hf_overrides for pool in config.pools] == [{"sliding_window": None}] * 2
    fewer = {"model": {**text, "hf_overrides": {"num_hidden_layers": 1}}, "pools": pools}
    other = ClusterConfig.model_validate(fewer)
    bytes_of_tokens = [each.replica_spec(each.pools[0]).emulated.profile.page_bytes for each in (config, other)]
    assert bytes_of_tokens[0] > bytes_of_tokens[1] > 0


def test_overrides_of_qwen3_reranker_are_read_as_its_judge() -> None:
    """https://huggingface.co/Qwen/Qwen3-Reranker-0.6B, with vLLM."""
    asked = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["no", "yes"],
        "is_original_qwen3_reranker": True,
    }
    config = ModelConfig(hf_overrides=asked)
    assert config.hf_overrides == {}
    assert config.pooler_config.classifier_from_token == ("no", "yes")
    with pytest.raises(ValueError, match="give one of them"):
        ModelConfig.model_validate({"hf_overrides": asked, "pooler_config": {"classifier_from_token": ["a", "b"]}})
