"""A model for tests of whole deployments, whose time should be that of processes that start, not of tokens."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tests.workers.architectures import build


@pytest.fixture(scope="session")
def small_model_dir(tmp_path_factory: pytest.TempPathFactory, tokenizers: dict[str, PreTrainedTokenizerFast]) -> Path:
    """A random Llama in float32 with 640 tokens and 17 million parameters: an eighth of the embedded model's.

    Its streams hardly repeat a token. On prompts without meaning the embedded model soon repeats a few tokens, so that
    wrong contents of a page could go unnoticed.
    """
    folder = tmp_path_factory.mktemp("small-model")
    tokenizers["byte_level"].save_pretrained(folder)
    settings = {
        "vocab_size": 640,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 10,
        "head_dim": 96,
        "max_position_embeddings": 4096,
    }
    build("llama", settings).save_pretrained(folder)
    return folder
