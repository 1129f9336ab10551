"""The end token of the tokenizer ends an answer, also where config.json names another one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crossdock import LLM, SamplingParams, StructuredOutputsParams
from tests.cluster.small_tokenizers import byte_level
from tests.workers.architectures import build


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("end") / "model"
    tokenizer = byte_level()
    ends = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    build("llama", {"vocab_size": len(tokenizer), "eos_token_id": ends}).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), dtype="float32", kv_cache_memory="64MiB") as llm:
        yield llm


def outcome(llm: LLM, token: str, **params: Any) -> tuple[str | None, int]:
    token_id = byte_level().convert_tokens_to_ids(token)
    sampling = SamplingParams(temperature=0, max_tokens=5, logit_bias={token_id: 100}, **params)
    (one,) = llm.generate([{"prompt_token_ids": [3, 4]}], sampling, use_tqdm=False)
    return one.outputs[0].finish_reason, len(one.outputs[0].token_ids)


@pytest.mark.parametrize("token", ["<|endoftext|>", "<|im_end|>"])
def test_end_tokens_of_the_configuration_and_of_the_tokenizer_end_an_answer(llm: LLM, token: str) -> None:
    assert outcome(llm, token) == ("stop", 1)
    assert outcome(llm, token, ignore_eos=True) == ("length", 5)
    assert outcome(llm, token, min_tokens=3)[1] >= 3


def test_grammar_that_is_complete_is_ended_by_the_token_of_the_tokenizer(llm: LLM) -> None:
    assert outcome(llm, "<|im_end|>", structured_outputs=StructuredOutputsParams(choice=["a"]))[0] == "stop"
