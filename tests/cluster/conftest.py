"""Small tokenizers and a small model. They import transformers and torch, which other tests here do without."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def tokenizers() -> "dict[str, PreTrainedTokenizerFast]":
    from tests.cluster.small_tokenizers import TOKENIZERS

    return {name: build() for name, build in TOKENIZERS.items()}


@pytest.fixture(scope="session")
def small_model_dir(tmp_path_factory: pytest.TempPathFactory, tokenizers: "dict[str, PreTrainedTokenizerFast]") -> Path:
    """A random Llama in float32 with 640 tokens and 2.7 million parameters, a fiftieth of the embedded model's: the
    time of whole deployments should be that of processes that start, not of tokens.

    Its streams hardly repeat a token. On prompts without meaning the embedded model soon repeats a few tokens, so that
    wrong contents of a page could go unnoticed.
    """
    from tests.workers.architectures import build

    folder = tmp_path_factory.mktemp("small-model")
    tokenizers["byte_level"].save_pretrained(folder)
    settings = {
        "vocab_size": 640,
        "eos_token_id": tokenizers["byte_level"].eos_token_id,  # else a character of text ends answers
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "head_dim": 64,
        "max_position_embeddings": 4096,
    }
    build("llama", settings).save_pretrained(folder)
    return folder
