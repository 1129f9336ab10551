"""Texts that are cut have the vectors and labels that transformers computes with `truncation`: the end token stays."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from crossdock import LLM
from crossdock.cluster.api.body.score_body import RerankRequest
from crossdock.cluster.api.http.own_requests import own_request
from tests.cluster.offline.conftest import SIZES
from tests.cluster.offline.test_classify import saved

TEXTS = ["the quick brown fox jumps over the lazy dog and does not mind it at all", "a dog"]
QUERY = "where the brown fox and the lazy dog jumped over each other"


def with_end_token(folder: Path) -> Any:
    """Let a folder's tokenizer write an end token after each text, as Qwen3-Embedding's does, and return it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = ("<|endoftext|>", tokenizer.convert_tokens_to_ids("<|endoftext|>"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end[0]}", pair=f"$A {end[0]} $B {end[0]}", special_tokens=[end]
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture(scope="module")
def folder(small_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copied = tmp_path_factory.mktemp("vectors") / "model"
    shutil.copytree(small_model_dir, copied)
    with_end_token(copied)
    return copied


@pytest.fixture(scope="module")
def vectors(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), max_num_seqs=4, **SIZES) as llm:
        yield llm


@torch.inference_mode()
def sentence_vector(folder: Path, text: str, keep: int, side: str, pooling: str) -> torch.Tensor:
    """Return a vector as sentence-transformers computes it: cut, pooled, and made as long as 1."""
    tokenizer = AutoTokenizer.from_pretrained(folder, truncation_side=side)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval().base_model
    given = tokenizer(text, truncation=True, max_length=keep, return_tensors="pt").input_ids
    assert given[0, -1] == tokenizer.convert_tokens_to_ids("<|endoftext|>")
    states = model(given).last_hidden_state[0].double()
    vector = states[-1] if pooling == "last" else states.mean(0)
    return vector / vector.norm()


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("side", [None, "left"])
def test_vectors_of_cut_texts_are_sentence_transformers(
    vectors: LLM, folder: Path, side: str | None, pooling: str
) -> None:
    for keep in (7, 12):
        wanted = [sentence_vector(folder, text, keep, side or "right", pooling) for text in TEXTS]
        fields = {"truncate_prompt_tokens": keep, "truncation_side": side, "pooling": pooling}
        found = vectors.embed(TEXTS, use_tqdm=False, **{name: value for name, value in fields.items() if value})
        np.testing.assert_allclose([each.outputs.embedding for each in found], torch.stack(wanted), atol=2e-5)


def test_scores_of_cut_texts_are_cosines_of_these_vectors(vectors: LLM, folder: Path) -> None:
    query, *texts = (sentence_vector(folder, text, 6, "right", "last") for text in [QUERY, *TEXTS])
    found = vectors.score(QUERY, TEXTS, use_tqdm=False, truncate_prompt_tokens=6)
    np.testing.assert_allclose(
        [each.outputs.score for each in found], [float(query @ text) for text in texts], atol=2e-5
    )
    body = RerankRequest.of({"query": QUERY, "documents": TEXTS, "truncate_prompt_tokens": 6})
    answer = json.loads(vectors.run(vectors.routes.scores.rerank(own_request("a", vectors.memory), body)).body)
    scores = {each["index"]: each["relevance_score"] for each in answer["results"]}
    np.testing.assert_allclose([scores[0], scores[1]], [float(query @ text) for text in texts], atol=2e-5)


def test_labels_and_scores_of_a_head_are_those_of_cut_texts_and_pairs(small_model_dir: Path, tmp_path: Path) -> None:
    model = saved(tmp_path, small_model_dir, "Llama", 1)
    tokenizer = with_end_token(tmp_path)
    with LLM(str(tmp_path), max_num_seqs=4, **SIZES) as llm, torch.inference_mode():
        for side in ("right", "left"):
            tokenizer.truncation_side = side
            cut = {"truncate_prompt_tokens": 11, "truncation_side": side}

            def sigmoid(*texts: str) -> float:
                ids = tokenizer(*texts, truncation=True, max_length=11, return_tensors="pt").input_ids
                return float(model(ids).logits[0].double().sigmoid())

            labels = llm.classify(TEXTS, use_tqdm=False, **cut)
            np.testing.assert_allclose(
                [each.outputs.probs[0] for each in labels], [sigmoid(text) for text in TEXTS], atol=2e-5
            )
            scores = llm.score(QUERY, TEXTS, use_tqdm=False, **cut)
            np.testing.assert_allclose(
                [each.outputs.score for each in scores], [sigmoid(QUERY, text) for text in TEXTS], atol=2e-5
            )
