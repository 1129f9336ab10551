"""The encoder of a model without its decoder: what it loads, and what it refuses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from crossdock.workers.model.encoder_model import EncoderModel, load_encoder
from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.weights.packed_layers import PackedLinear
from crossdock.workers.schedule.request import Request
from crossdock.workers.schedule.submission import InvalidField, SamplingParams
from tests.sweeps import rest_in_soak
from tests.workers.architectures import build
from tests.workers.multimodal import FAMILIES, IMAGE, TEXT, build_multimodal, picture
from tests.workers.quantised import CASES, pack

PAGE_SIZE = 4
_MARK = 1234.5  # the value of every weight of the decoder in these checkpoints


def save_without_decoder(module: Any, path: Path) -> None:
    """Save a checkpoint that lacks the weights of the decoder and of the output projection: who reads one fails."""
    with torch.no_grad():
        for part in (module.get_decoder(), module.get_output_embeddings()):
            for parameter in part.parameters():
                parameter.fill_(_MARK)
    module.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not (tensor == _MARK).all()}
    assert 0 < len(kept) < len(tensors)
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module", params=rest_in_soak(FAMILIES, "llava", "qwen3_vl"))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str, tmp_path_factory: pytest.TempPathFactory) -> EncoderModel:
    path = tmp_path_factory.mktemp(family)
    save_without_decoder(build_multimodal(family), path)
    return load_encoder(ModelSpec(str(path), "float32"), kv_bytes=1 << 20)


def test_encoder_holds_its_own_weights_alone(family: str, model: EncoderModel) -> None:
    module = build_multimodal(family)
    with_decoder = {id(p) for part in (module.get_decoder(), module.lm_head) for p in part.parameters()}
    expected = {name: p.shape for name, p in module.named_parameters() if id(p) not in with_decoder}
    assert {name: p.shape for name, p in model.module.named_parameters()} == expected
    tensors = [*model.module.parameters(), *model.module.buffers()]
    assert not any(tensor.is_meta for tensor in tensors)
    assert model.weight_bytes == sum(4 * shape.numel() for shape in expected.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_rows": 3}, "has 3 rows, and 4 tokens"),
        ({"num_rows": 0, "length": 0}, "has 0 rows"),
        ({"start": 1}, "must begin at 0, with pages of 4 rows"),
        ({"kind": "sound"}, "kind that this model does not take"),
        ({"num_rows": 5, "length": 5}, "need a prompt of 9 tokens, and this one has 5"),
    ],
)
def test_items_that_are_not_the_prompt_are_an_error(
    family: str, model: EncoderModel, change: Any, message: str
) -> None:
    item = replace(picture(family, 1)[1], start=0, length=4, num_rows=4)
    assert model.encoder is not None
    model.allocate_pool(4, 4)
    model.encoder.locate(Request("a", [0] * 5, SamplingParams(), items=[item]))
    with pytest.raises(InvalidField, match=message):
        model.encoder.locate(Request("a", [0] * 5, SamplingParams(), items=[replace(item, **change)]))


def test_model_of_text_alone_is_refused_with_the_reason(tmp_path: Path) -> None:
    build("llama", {}).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="needs a model that takes pictures: the model takes text alone"):
        load_encoder(ModelSpec(str(tmp_path)))


def test_model_whose_pictures_are_not_supported_is_refused_with_the_reason(tmp_path: Path) -> None:
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(
        "aya_vision",
        text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "siglip_vision_model", **vision, "image_size": 32, "patch_size": 8},
        image_token_index=IMAGE,
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="pictures of aya_vision are not supported; supported are"):
        load_encoder(ModelSpec(str(tmp_path)))


def test_pages_and_weights_that_exceed_the_memory_are_refused(tmp_path: Path) -> None:
    build_multimodal("llava").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"1048576\.00 GiB for pages of embeddings"):
        load_encoder(ModelSpec(str(tmp_path), "float32"), kv_bytes=1 << 50)


def test_settings_that_do_not_fit_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    build_multimodal("llava").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"max_model_len \(513\) is more than the model's own 512 positions"):
        load_encoder(ModelSpec(str(tmp_path), max_model_len=513))
    with pytest.raises(ValueError, match=r"has no weights in \*\.safetensors"):
        load_encoder(ModelSpec(str(tmp_path)))


def test_encoder_beside_a_packed_decoder_is_loaded_as_it_is(tmp_path: Path) -> None:
    module: Any = pack(tmp_path, CASES["fp8 uneven blocks"], build_multimodal("qwen3_vl"))
    found = load_encoder(ModelSpec(str(tmp_path), "float32")).module.state_dict()
    expected = {name: each for name, each in module.state_dict().items() if "visual" in name}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    model = load_model(ModelSpec(str(tmp_path), "float32"))
    linears = [each for each in model.module.modules() if isinstance(each, PackedLinear)]
    assert len(linears) == 7 * module.config.text_config.num_hidden_layers
