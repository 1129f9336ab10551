"""Text encoders over flat batches: hidden states and labels are those of transformers, text by text."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.text_encoder import TextEncoder, load_text_encoder
from crossdock.workers.model.text_files import text_answer
from tests.workers.text_encoders import FAMILIES, POSITIONS, TYPED, VECTORS, hidden_of, logits_of, saved


def load(folder: Path, max_model_len: int | None = None, dtype: str = "float32") -> TextEncoder:
    return load_text_encoder(ModelSpec(str(folder), dtype, max_model_len))


def texts_of(seed: int) -> list[list[int]]:
    """Return texts of all lengths, one of which has a padding token inside."""
    rng = random.Random(seed)
    lengths = [1, 2, 17, 33, POSITIONS, *(rng.randint(1, POSITIONS) for _ in range(4))]
    texts = [[rng.randrange(4, 128) for _ in range(length)] for length in lengths]
    texts[2][5] = 1
    return texts


@pytest.mark.parametrize("family", VECTORS)
def test_hidden_states_of_texts_in_one_batch_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = saved(tmp_path, family)
    encoder = load(tmp_path)
    assert (encoder.answer, encoder.max_model_len) == ("vectors", POSITIONS)
    texts = texts_of(1)
    parts = encoder.hidden(encoder.batch(texts, [0] * len(texts))).split([len(text) for text in texts])
    for text, part in zip(texts, parts, strict=True):
        torch.testing.assert_close(part, hidden_of(model, text), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("family", "pooling"), [*((name, "cls") for name in FAMILIES), ("modernbert", "mean")])
def test_labels_are_those_of_transformers(family: str, pooling: str, tmp_path: Path) -> None:
    is_read = family == "modernbert"  # heads of the others read the first token alone
    model = saved(tmp_path, family, 3, **({"classifier_pooling": pooling} if is_read else {}))
    encoder = load(tmp_path)
    assert encoder.labels_of_mean == (is_read and pooling == "mean")
    texts = texts_of(2)
    parts = encoder.hidden(encoder.batch(texts, [0] * len(texts))).split([len(text) for text in texts])
    found = encoder.labels(torch.stack([part.mean(0) if encoder.labels_of_mean else part[0] for part in parts]))
    wanted = torch.stack([logits_of(model, text) for text in texts])
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", TYPED)
def test_second_text_of_a_pair_has_the_second_type(family: str, tmp_path: Path) -> None:
    model = saved(tmp_path, family)
    encoder = load(tmp_path)
    text = [0, 5, 6, 2, 7, 8, 2]
    types = torch.tensor([[0, 0, 0, 0, 1, 1, 1]])
    found = encoder.hidden(encoder.batch([text, text], [4, 0]))
    torch.testing.assert_close(found[:7], hidden_of(model, text, token_type_ids=types), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(found[7:], hidden_of(model, text), atol=2e-5, rtol=1e-4)
    assert not torch.allclose(found[:7], found[7:], atol=1e-3)


def test_encoder_in_bfloat16_is_near_that_in_float32(tmp_path: Path) -> None:
    model = saved(tmp_path, "bert")
    encoder = load(tmp_path, dtype="bfloat16")
    found = encoder.hidden(encoder.batch([[5, 6, 7]], [0]))
    assert found.dtype is torch.bfloat16
    wanted = hidden_of(model, [5, 6, 7])
    assert (found.float() - wanted).norm() < 0.05 * wanted.norm()


def edit(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_length_of_texts_is_that_of_sentence_transformers_files(tmp_path: Path) -> None:
    saved(tmp_path, "roberta")
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 40, "do_lower_case": false}')
    assert load(tmp_path).max_model_len == 40
    assert load(tmp_path, POSITIONS).max_model_len == POSITIONS
    with pytest.raises(ValueError, match=rf"max_model_len \({POSITIONS + 1}\) is more than .* {POSITIONS} positions"):
        load(tmp_path, POSITIONS + 1)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 40, "do_lower_case": true}')
    with pytest.raises(ValueError, match=r"sentence_bert_config\.json has do_lower_case"):
        load(tmp_path)


def test_head_for_another_task_is_refused_by_its_class(tmp_path: Path) -> None:
    saved(tmp_path, "bert")
    edit(tmp_path, architectures=["BertForTokenClassification"])
    with pytest.raises(ValueError, match="BertForTokenClassification"):
        text_answer(tmp_path)


@pytest.mark.parametrize("fields", [{"architectures": ["BertLMHeadModel"]}, {"is_decoder": True}])
def test_berts_decoder_is_no_text_encoder(fields: dict[str, Any], tmp_path: Path) -> None:
    saved(tmp_path, "bert")
    edit(tmp_path, **fields)
    assert text_answer(tmp_path) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: tensors.pop("encoder.layer.1.output.dense.bias"), "layer.1.output.dense.bias missing"),
        (lambda tensors: tensors.update({"encoder.more.weight": torch.zeros(2)}), "more.weight without a place"),
        (lambda tensors: tensors.update({"embeddings.LayerNorm.bias": torch.zeros(2)}), "of another shape"),
        (lambda tensors: tensors["embeddings.LayerNorm.bias"].fill_(torch.nan), "NaN or infinity"),
    ],
)
def test_wrong_tensors_are_refused_by_name(change: Any, reason: str, tmp_path: Path) -> None:
    saved(tmp_path, "bert")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=reason):
        load(tmp_path)


def test_attention_that_is_not_transformers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias that a model type has in attention makes hidden states differ from ours in the same way."""
    saved(tmp_path, "bert")
    from crossdock.workers.model import text_encoder

    own = text_encoder.scaled_dot_product_attention
    monkeypatch.setattr(text_encoder, "scaled_dot_product_attention", lambda *given, **more: 1.1 * own(*given, **more))
    with pytest.raises(ValueError, match="hidden states of texts in one batch differ"):
        load(tmp_path)
