"""`LLM.score`: cosines of vectors, and the probability of yes of a model that judges pairs; both are transformers'."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from crossdock import LLM
from crossdock.cluster.api.body.score_body import INSTRUCTION, RerankRequest
from crossdock.cluster.api.http.own_requests import own_request
from tests.cluster.offline.conftest import SIZES, reference

QUERY, DOCUMENTS = "the dog", ["a lazy dog", "the quick brown fox", "jumps over"]
NO, YES = "n", "y"
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)


@torch.inference_mode()
def cosine(llm: LLM, folder: Path, left: str, right: str) -> float:
    vectors = []
    for text in (left, right):
        ids = torch.tensor([llm.get_tokenizer().encode(text)])
        vector = reference(folder).base_model(ids).last_hidden_state[0, -1].double()
        vectors.append(vector / vector.norm())
    return float(vectors[0] @ vectors[1])


@torch.inference_mode()
def probability(llm: LLM, folder: Path, query: str, document: str) -> float:
    """Return the softmax of the two words' logits, after a pair in Qwen3-Reranker's form."""
    user = f"<Instruct>: {INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode(tokenizer.render_chat(chat), add_special_tokens=False)
    logits = reference(folder)(torch.tensor([ids])).logits[0, -1].double()
    words = [tokenizer.encode(word, add_special_tokens=False)[0] for word in (NO, YES)]
    return float(logits[words].softmax(0)[1])


def test_model_of_vectors_gives_cosines(llm: LLM, small_model_dir: Path) -> None:
    wanted = [cosine(llm, small_model_dir, QUERY, text) for text in DOCUMENTS]
    found = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
    np.testing.assert_allclose([each.outputs.score for each in found], wanted, atol=2e-4)
    with pytest.raises(ValueError, match="text_2"):
        llm.score(["a", "b"], ["a", "b", "c"])


def test_model_that_judges_pairs_gives_probabilities_of_yes(small_model_dir: Path) -> None:
    config = json.dumps({"classifier_from_token": [NO, YES]})
    with LLM(str(small_model_dir), pooler_config=config, max_num_seqs=4, **SIZES) as judge:
        wanted = [probability(judge, small_model_dir, QUERY, text) for text in DOCUMENTS]
        found = judge.score([QUERY] * 3, DOCUMENTS, use_tqdm=False)
        np.testing.assert_allclose([each.outputs.score for each in found], wanted, atol=2e-4)
        body = RerankRequest.of({"query": QUERY, "documents": [{"text": text} for text in DOCUMENTS]})
        answer = json.loads(judge.run(judge.routes.scores.rerank(own_request("a", judge.memory), body)).body)
        assert [each["index"] for each in answer["results"]] == sorted(range(3), key=lambda i: -wanted[i])
    assert len({round(score, 3) for score in wanted}) == 3
