"""Pictures on a GPU: logits of transformers' one pass on the CPU, and pages that leave room for encoding."""

from typing import Any

import pytest
import torch

from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.runner import Runner
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.calibrate import warm_up
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.schedule.request.submission import SamplingParams, Submission
from tests.workers.model.pictures.test_vision import logits_of
from tests.workers.multimodal import (
    FAMILIES,
    NO_PLACEHOLDERS,
    PicturePrompt,
    assert_continues,
    build_multimodal,
    one_pass,
    picture,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
NUM_TOKENS = 6


def on_gpu(family: str) -> Any:
    return wrap_module(build_multimodal(family).to("cuda"))


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_with_pictures_on_a_gpu_equals_one_pass_on_the_cpu(family: str) -> None:
    prompt = PicturePrompt.of(3, picture(family, 1), 2, picture(family, 2, (1, 2)), 3)
    expected, length = one_pass(build_multimodal(family), prompt), len(prompt.token_ids)
    model = on_gpu(family)
    for cut in range(1, length, 3):
        (logits,) = logits_of(model, [prompt], [[(0, 0, cut)], [(0, cut, length)]])
        torch.testing.assert_close(logits, expected, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "smolvlm"])
def test_engine_on_a_gpu_runs_ahead_beside_graphs_and_leaves_room_for_encoding(family: str) -> None:
    """Pages are measured: the pool, the cache and the encoder's largest calls fit, and tokens are transformers'."""
    module, prompts = build_multimodal(family), dict[str, PicturePrompt]()
    for number in range(12):
        prompts[str(number)] = PicturePrompt.of(5 + number, picture(family, number, (2, 3)), 9, seed=number)
    config = EngineConfig(gpu_memory_utilization=0.2, max_num_batched_tokens=128, max_num_seqs=12)
    engine = new_engine(on_gpu(family), config)
    assert engine.pipeline.is_ahead
    warm_up(engine)
    assert engine.encoder_fit is not None
    assert engine.encoder_fit.cost.seconds([next(iter(prompts.values())).items[0]]) > 0
    sampling = SamplingParams(NUM_TOKENS, temperature=0.0, ignore_eos=True, logit_bias=NO_PLACEHOLDERS)
    for name, prompt in prompts.items():
        engine.add(Submission(name, prompt.token_ids, sampling, items=prompt.items))
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    encoder_seconds = 0.0
    while engine.has_work:
        step = engine.step()
        encoder_seconds += step.encoder_seconds
        for delta in step.deltas:
            tokens[delta.request_id] += delta.token_ids
    assert encoder_seconds > 0
    for name, prompt in prompts.items():
        assert len(tokens[name]) == NUM_TOKENS
        assert_continues(module, prompt, tokens[name])


def test_step_with_pictures_on_a_gpu_is_not_what_others_of_its_size_take() -> None:
    """Graphs compute those; decodes after a prompt with pictures are graphs as well."""
    engine = new_engine(
        on_gpu("qwen2_vl"), EngineConfig(max_num_batched_tokens=128, max_num_seqs=12, kv_cache_memory=64 << 20)
    )
    runner: Runner = engine.pipeline.runner
    prompt = PicturePrompt.of(5, picture("qwen2_vl", 1), 9)
    sampling = SamplingParams(NUM_TOKENS, temperature=0.0, ignore_eos=True, logit_bias=NO_PLACEHOLDERS)
    engine.add(Submission("a", prompt.token_ids, sampling, items=prompt.items))
    usual = []
    is_usual = Runner.is_usual
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "is_usual", lambda self, inputs: usual.append(is_usual(self, inputs)) or usual[-1])
        while engine.has_work:
            engine.step()
    assert runner.graphs
    assert usual == [False, *[True] * (len(usual) - 1)]
