"""Decoders with a head for labels: probabilities, logits and scores are those of transformers' own classes."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from crossdock import LLM
from crossdock.cluster.api.body.classifier_head import ClassifierHead
from crossdock.cluster.api.body.embedding_body import ClassifyRequest
from crossdock.cluster.api.http.own_requests import own_request
from tests.cluster.offline.conftest import SIZES

TEXTS = ["the quick brown fox", "a lazy dog", "jumps over the lazy dog"]
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


def saved(folder: Path, small_model_dir: Path, family: str, num_labels: int, **config: Any) -> Any:
    """Write a random classifier with the tokenizer of the small model, and return transformers' model."""
    size = json.loads((small_model_dir / "config.json").read_text())["vocab_size"]
    shape = {**SHAPE, "num_key_value_heads": 2, "vocab_size": size, "pad_token_id": 0, "num_labels": num_labels}
    torch.manual_seed(num_labels)
    config_class = getattr(transformers, f"{family}Config")
    model = getattr(transformers, f"{family}ForSequenceClassification")(config_class(**shape, **config)).eval()
    model.to(torch.bfloat16).save_pretrained(folder)  # whose head numpy cannot read
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(small_model_dir / name, folder)
    return type(model).from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    found: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return found


@pytest.mark.parametrize(("family", "activation"), [("Qwen3", "softmax"), ("Llama", "sigmoid")])
def test_probabilities_of_labels_are_those_of_transformers(
    family: str, activation: str, small_model_dir: Path, tmp_path: Path
) -> None:
    kind = {"problem_type": "multi_label_classification"} if activation == "sigmoid" else {}
    model = saved(tmp_path, small_model_dir, family, 3, id2label={0: "bad", 1: "fair", 2: "good"}, **kind)
    with LLM(str(tmp_path), max_num_seqs=4, max_num_batched_tokens=32, **SIZES) as llm:
        wanted = [logits(model, llm.get_tokenizer().encode(text)) for text in TEXTS]
        found = llm.classify(TEXTS, use_tqdm=False)
        probabilities = [each.softmax(0) if activation == "softmax" else each.sigmoid() for each in wanted]
        np.testing.assert_allclose([each.outputs.probs for each in found], torch.stack(probabilities), atol=2e-5)
        body = ClassifyRequest.of({"input": TEXTS, "use_activation": False})
        answer = llm.run(llm.routes.classification.create(own_request("a", llm.memory), body))
        data = json.loads(answer.body)["data"]
        np.testing.assert_allclose([each["probs"] for each in data], torch.stack(wanted), atol=2e-5)
        assert [each["label"] for each in data] == [["bad", "fair", "good"][int(each.argmax())] for each in wanted]
        for ask, why in ((lambda: llm.generate("a"), "generates none"), (lambda: llm.score("a", "b"), "3 labels")):
            with pytest.raises(ValueError, match=why):
                ask()


def test_model_with_one_label_scores_pairs_as_transformers_reads_them(small_model_dir: Path, tmp_path: Path) -> None:
    model = saved(tmp_path, small_model_dir, "Qwen3", 1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    with LLM(str(tmp_path), max_num_seqs=4, **SIZES) as llm:
        wanted = [float(logits(model, tokenizer(TEXTS[0], text)["input_ids"]).sigmoid()) for text in TEXTS]
        found = llm.score(TEXTS[0], TEXTS, use_tqdm=False)
        np.testing.assert_allclose([each.outputs.score for each in found], wanted, atol=2e-5)


def test_heads_that_are_not_a_decoders_are_refused_by_name(small_model_dir: Path, tmp_path: Path) -> None:
    config = {"architectures": ["BertForSequenceClassification"]}
    with pytest.raises(ValueError, match="BertForSequenceClassification is served where a decoder's head is score"):
        ClassifierHead.read(small_model_dir, config)
    saved(tmp_path, small_model_dir, "Qwen3", 3)
    own = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ValueError, match="id2label must name labels 0 to 2"):
        ClassifierHead.read(tmp_path, own | {"id2label": {"0": "a", "2": "b", "3": "c"}})
    assert ClassifierHead.read(small_model_dir, {"architectures": ["LlamaForCausalLM"]}) is None
