"""How large steps are where the configuration leaves it to the device."""

import pytest
from pydantic import ValidationError

from crossdock.workers.model.load import wrap_module
from crossdock.workers.replica.config import EngineConfig, StepSizes
from crossdock.workers.schedule.request.submission import SamplingParams, Submission
from tests.workers.architectures import build
from tests.workers.replica.engines import engine_on

GIB = 1 << 30


@pytest.mark.parametrize(
    ("name", "memory", "tokens", "requests"),
    [
        ("CPU", 0, 2048, 64),
        ("NVIDIA L4", 22 * GIB, 2048, 256),
        ("NVIDIA A100-SXM4-80GB", 79 * GIB, 2048, 256),
        ("NVIDIA H100 80GB HBM3", 79 * GIB, 8192, 1024),
        ("NVIDIA H200", 140 * GIB, 8192, 1024),
        ("NVIDIA B200", 178 * GIB, 16384, 1024),
    ],
)
def test_defaults_follow_the_device_as_in_vllm(name: str, memory: int, tokens: int, requests: int) -> None:
    config = EngineConfig().sized(StepSizes.of_device(name, memory), 4096)
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (tokens, requests)


def test_given_numbers_stay_and_the_others_fit_them() -> None:
    h100 = StepSizes.of_device("NVIDIA H100", 80 * GIB)
    both = EngineConfig(max_num_batched_tokens=512, max_num_seqs=8)
    assert both.sized(h100, 4096) == both
    few_tokens = EngineConfig(max_num_batched_tokens=512).sized(h100, 4096)
    assert (few_tokens.max_num_batched_tokens, few_tokens.max_num_seqs) == (512, 512 - 16)
    many = EngineConfig(max_num_seqs=9000).sized(h100, 4096)
    assert (many.max_num_batched_tokens, many.max_num_seqs) == (9016, 9000)


def test_step_without_chunks_holds_the_whole_context() -> None:
    whole = EngineConfig(enable_chunked_prefill=False)
    assert whole.sized(StepSizes(2048, 64), 32_768).max_num_batched_tokens == 32_768
    assert whole.sized(StepSizes(2048, 64), 512).max_num_batched_tokens == 2048


def test_numbers_that_do_not_fit_are_refused_at_once() -> None:
    with pytest.raises(ValidationError, match="max_num_batched_tokens"):
        EngineConfig(max_num_batched_tokens=64, max_num_seqs=64)


def test_engine_runs_with_the_numbers_of_its_device() -> None:
    model = wrap_module(build("llama", {"max_position_embeddings": 4096}))
    engine = engine_on(model, enable_chunked_prefill=False)
    assert (engine.config.max_num_batched_tokens, engine.config.max_num_seqs) == (4096, 64)
    prompt = [position % model.vocab_size for position in range(4000)]
    engine.add(Submission("long", prompt, SamplingParams(max_tokens=1)))
    assert engine.step().batch.num_tokens == 4000
