"""Text encoders behind the API: vectors, scores and labels are those of transformers, and nothing else is answered."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoTokenizer

from crossdock import LLM
from crossdock.cluster.api.body.embedding_body import ClassifyRequest, EmbeddingRequest
from crossdock.cluster.api.body.pooler_config import EmbeddingDefaults
from crossdock.cluster.api.body.score_body import RerankRequest
from crossdock.cluster.api.http.own_requests import own_request
from tests.workers.text_encoders import FAMILIES, POSITIONS, TEXTS, TYPED, VECTORS, hidden_of, logits_of, pooled, saved

LONG = "dog " * POSITIONS  # and two tokens around it


def asked(llm: LLM, path: str, body: Any) -> Any:
    """Return the answer of an endpoint, as JSON."""
    answer = llm.run(llm.routes.creates()[path](own_request("a", llm.memory), body))
    return json.loads(answer.body)


def embed(llm: LLM, **fields: Any) -> Any:
    return asked(llm, "/v1/embeddings", EmbeddingRequest.of(fields))


def unit(vector: torch.Tensor) -> list[float]:
    found: list[float] = (vector / vector.norm()).tolist()
    return found


@pytest.mark.parametrize("pooling", ["cls_token", "mean_tokens"])
@pytest.mark.parametrize("family", VECTORS)
def test_vectors_are_those_of_sentence_transformers_files(family: str, pooling: str, tmp_path: Path) -> None:
    model = saved(tmp_path, family, pooling=pooling)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with LLM(str(tmp_path), dtype="float32") as llm:
        hidden = [hidden_of(model, tokenizer(text)["input_ids"]) for text in TEXTS]
        wanted = [unit(pooled(each, pooling.partition("_")[0])) for each in hidden]
        found = llm.embed(TEXTS, use_tqdm=False)
        np.testing.assert_allclose([each.outputs.embedding for each in found], wanted, atol=5e-5)
        answer = embed(llm, input=TEXTS, use_activation=False, pooling="last")
        lasts = [each[-1] for each in hidden]
        np.testing.assert_allclose([each["embedding"] for each in answer["data"]], torch.stack(lasts), atol=5e-5)
        tokens = sum(len(tokenizer(text)["input_ids"]) for text in TEXTS)
        assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == tokens
        scores = llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)
        cosines = np.array(wanted[1:]) @ np.array(wanted[0])
        np.testing.assert_allclose([each.outputs.score for each in scores], cosines, atol=1e-4)


@torch.inference_mode()
def test_dense_layers_of_sentence_transformers_files_are_computed(tmp_path: Path) -> None:
    """The files of EmbeddingGemma: two layers behind the mean, one without bias."""
    torch.manual_seed(3)
    layers = (nn.Linear(48, 80, bias=False), nn.Linear(80, 32))
    dense = {"2_Dense": (layers[0], "Identity"), "3_Dense": (layers[1], "Tanh")}
    model = saved(tmp_path, "gemma3_text", pooling="mean_tokens", dense=dense)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    hidden = [hidden_of(model, tokenizer(text)["input_ids"]).mean(0) for text in TEXTS]
    wanted = [torch.tanh(layers[1](layers[0](each))) for each in hidden]
    with LLM(str(tmp_path), dtype="float32", pooler_config={"matryoshka_dimensions": [8]}) as llm:
        found = llm.embed(TEXTS, use_tqdm=False)
        np.testing.assert_allclose([each.outputs.embedding for each in found], list(map(unit, wanted)), atol=5e-5)
        answer = embed(llm, input=TEXTS, dimensions=8)
        cut = [unit(each[:8]) for each in wanted]
        np.testing.assert_allclose([each["embedding"] for each in answer["data"]], cut, atol=5e-5)
        plain = embed(llm, input=TEXTS, use_activation=False)
        np.testing.assert_allclose([each["embedding"] for each in plain["data"]], torch.stack(wanted), atol=5e-5)
        scores = llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)
        cosines = torch.nn.functional.cosine_similarity(wanted[0][None], torch.stack(wanted[1:]))
        np.testing.assert_allclose([each.outputs.score for each in scores], cosines, atol=1e-4)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"activation_function": "torch.nn.modules.activation.GLU"}, "activation 'GLU' is not computed"),
        ({"module_input_name": "token_embeddings"}, "module_input_name is 'token_embeddings'"),
        ({"out_features": 33}, r"tensors are \[\[32, 48\], \[32\]\]"),
        ({"bias": None}, "linear.weight cannot be read"),
        ({"in_features": 40}, "the layer takes 40 numbers, and gets 48"),
    ],
)
def test_dense_layer_that_is_not_computed_is_refused_at_the_start(
    fault: dict[str, Any], message: str, tmp_path: Path
) -> None:
    size = fault.get("in_features", 48)
    saved(tmp_path, "bert", pooling="mean_tokens", dense={"2_Dense": (nn.Linear(size, 32), "Tanh")})
    file = tmp_path / "2_Dense" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fault))
    if "bias" in fault:
        (tmp_path / "2_Dense" / "model.safetensors").rename(tmp_path / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(ValueError, match=message):
        EmbeddingDefaults.read(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_of_pairs_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = saved(tmp_path, family, 1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    takes_types = family in TYPED
    wanted = []
    for text in TEXTS:
        pair = tokenizer(TEXTS[0], text, return_token_type_ids=takes_types)
        given = {"token_type_ids": torch.tensor([pair["token_type_ids"]])} if takes_types else {}
        wanted.append(float(logits_of(model, pair["input_ids"], **given).sigmoid()))
    with LLM(str(tmp_path), dtype="float32") as llm:
        found = llm.score(TEXTS[0], TEXTS, use_tqdm=False)
        np.testing.assert_allclose([each.outputs.score for each in found], wanted, atol=2e-5)
        ranked = asked(llm, "/v1/rerank", RerankRequest.of({"query": TEXTS[0], "documents": TEXTS, "top_n": 2}))
        assert [each["index"] for each in ranked["results"]] == list(np.argsort(wanted)[::-1][:2])


@pytest.mark.parametrize(
    ("name", "activate"),
    [("linear.Identity", lambda logits: logits), ("activation.Sigmoid", torch.sigmoid), (None, torch.sigmoid)],
)
def test_score_has_the_activation_that_config_json_names(name: str | None, activate: Any, tmp_path: Path) -> None:
    named = {} if name is None else {"sentence_transformers": {"activation_fn": f"torch.nn.modules.{name}"}}
    model = saved(tmp_path, "roberta", 1, **named)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with LLM(str(tmp_path), dtype="float32") as llm:
        [found] = llm.score(TEXTS[0], TEXTS[1], use_tqdm=False)
        wanted = activate(logits_of(model, tokenizer(TEXTS[0], TEXTS[1])["input_ids"]))
        assert found.outputs.score == pytest.approx(float(wanted), abs=2e-5)


def test_unknown_activation_is_refused_by_name(tmp_path: Path) -> None:
    saved(tmp_path, "roberta", 1, sbert_ce_default_activation_function="torch.nn.modules.activation.Mish")
    with pytest.raises(ValueError, match=r"activation of scores is .*Mish"):
        LLM(str(tmp_path), dtype="float32")


def test_labels_of_texts_are_those_of_transformers(tmp_path: Path) -> None:
    model = saved(tmp_path, "bert", 3, id2label={0: "bad", 1: "fair", 2: "good"})
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with LLM(str(tmp_path), dtype="float32") as llm:
        wanted = torch.stack([logits_of(model, tokenizer(text)["input_ids"]) for text in TEXTS])
        data = asked(llm, "/classify", ClassifyRequest.of({"input": TEXTS}))["data"]
        np.testing.assert_allclose([each["probs"] for each in data], wanted.softmax(-1), atol=2e-5)
        assert [each["label"] for each in data] == [["bad", "fair", "good"][int(each.argmax())] for each in wanted]
        for ask, why in (
            (lambda: llm.generate("a"), "makes labels of texts, and generates none"),
            (lambda: llm.score("a", "b"), "3 labels"),
            (lambda: llm.embed("a"), "makes labels of texts, and no vectors"),
        ):
            with pytest.raises(ValueError, match=why):
                ask()


def test_encoder_of_vectors_refuses_what_it_does_not_make(tmp_path: Path) -> None:
    saved(tmp_path, "bert")
    with LLM(str(tmp_path), dtype="float32") as llm:
        for ask, why in (
            (lambda: llm.generate("a"), "makes vectors of texts, and generates none"),
            (lambda: llm.classify("a"), "no classification head"),
            (lambda: llm.embed("a", dimensions=8), "not made for vectors of 8 numbers"),
        ):
            with pytest.raises(ValueError, match=why):
                ask()


def test_text_beyond_the_positions_is_refused_or_cut_to_all_of_them(tmp_path: Path) -> None:
    model = saved(tmp_path, "bert")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with LLM(str(tmp_path), dtype="float32") as llm:
        reason = f"maximum context length is {POSITIONS} tokens.*your input resulted in {POSITIONS + 2} tokens"
        with pytest.raises(ValueError, match=reason):
            embed(llm, input=LONG)
        answer = embed(llm, input=LONG, truncate_prompt_tokens=-1, pooling="cls")
        assert answer["usage"]["prompt_tokens"] == POSITIONS
        cut = tokenizer(LONG, truncation=True, max_length=POSITIONS)["input_ids"]
        np.testing.assert_allclose(answer["data"][0]["embedding"], unit(hidden_of(model, cut)[0]), atol=5e-5)


def add_prompts(folder: Path, **fields: Any) -> None:
    (folder / "config_sentence_transformers.json").write_text(json.dumps(fields))


def test_text_has_the_prompt_that_its_request_names_or_the_models_default(tmp_path: Path) -> None:
    model = saved(tmp_path, "bert", pooling="mean_tokens")
    add_prompts(tmp_path, prompts={"query": "dog ", "document": "", "other": "fox over "}, default_prompt_name="query")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)

    def wanted(text: str) -> list[float]:
        return unit(hidden_of(model, tokenizer(text)["input_ids"]).mean(0))

    with LLM(str(tmp_path), dtype="float32") as llm:
        for name, prompt in ((None, "dog "), ("query", "dog "), ("document", ""), ("other", "fox over ")):
            for given in (TEXTS, TEXTS[0]):
                data = embed(llm, input=given, prompt_name=name)["data"]
                texts = [given] if isinstance(given, str) else given
                vectors = [wanted(prompt + text) for text in texts]
                np.testing.assert_allclose([each["embedding"] for each in data], vectors, atol=5e-5)
        [score] = llm.score(TEXTS[0], TEXTS[1], use_tqdm=False)
        cosine = np.dot(wanted("dog " + TEXTS[0]), wanted("dog " + TEXTS[1]))
        assert score.outputs.score == pytest.approx(cosine, abs=1e-4)
        ids = tokenizer(TEXTS[0])["input_ids"]
        vector = embed(llm, input=ids, add_special_tokens=False)["data"][0]["embedding"]
        np.testing.assert_allclose(vector, wanted(TEXTS[0]), atol=5e-5)
        for fields, why in (
            ({"input": TEXTS, "prompt_name": "passage"}, "names these prompts: 'document', 'other', 'query'"),
            ({"input": ids, "prompt_name": "query"}, "'prompt_name' needs texts"),
        ):
            with pytest.raises(ValueError, match=why):
                embed(llm, **fields)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompts": ["a"]}, "prompts must be an object of texts"),
        ({"prompts": {"query": "a"}, "default_prompt_name": "passage"}, "default_prompt_name 'passage' is no name"),
        ({"prompts": {"query": "dog "}, "default_prompt_name": "query"}, "include_prompt: false"),
    ],
)
def test_prompts_that_cannot_be_followed_are_refused_at_the_start(
    fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    saved(tmp_path, "bert", pooling="mean_tokens")
    file = tmp_path / "1_Pooling" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"include_prompt": False}))
    add_prompts(tmp_path, **fields)
    with pytest.raises(ValueError, match=reason):
        LLM(str(tmp_path), dtype="float32")


def test_pooling_that_is_not_served_is_refused_until_a_request_names_another(tmp_path: Path) -> None:
    saved(tmp_path, "bert", pooling="max_tokens")
    with LLM(str(tmp_path), dtype="float32") as llm:
        with pytest.raises(ValueError, match=r"pooling_mode_max_tokens.* name one of 'cls', 'mean' and 'last'"):
            llm.embed("a")
        assert len(llm.embed("a", pooling="cls")[0].outputs.embedding) == 48
