"""One model in this process for all tests of a file, and transformers' own for what it must say."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from crossdock import LLM

SIZES = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory": "16MiB", "device": "cpu"}


@pytest.fixture(scope="module")
def llm(small_model_dir: Path) -> Iterator[LLM]:
    with LLM(str(small_model_dir), max_num_seqs=4, max_num_batched_tokens=64, **SIZES) as llm:
        yield llm
        assert not llm.engine.scheduler.table.requests()
        assert llm.engine.pages.block_pool.num_available == llm.engine.pages.num_pages


@cache
def reference(folder: Path) -> Any:
    """Return transformers' model of a folder, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
