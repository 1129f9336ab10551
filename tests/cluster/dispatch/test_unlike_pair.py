"""A prefill replica in FP8 and a decode replica in plain weights, as `router.unlike_weights: mixed` allows."""

from pathlib import Path
from typing import Any

import torch
from pydantic import ByteSize
from transformers import DynamicCache, PreTrainedModel

from crossdock.cluster.dispatch.dispatcher import Dispatcher
from crossdock.router.fleet import RouterConfig
from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.schedule.request.submission import SamplingParams, Submission
from tests.cluster.dispatch.in_process import InProcess, serving
from tests.workers.architectures import build
from tests.workers.quantised import CASES, SIZES, pack

PROMPT = [3 + i * i % 100 for i in range(75)]  # four pages and a part
SHAPE = SIZES | {"vocab_size": 128, "max_position_embeddings": 512}


def engine_of(path: Path) -> Engine:
    config = EngineConfig(kv_cache_memory=ByteSize(4 << 20), admission="queue")
    return new_engine(load_model(ModelSpec(str(path), "float32")), config)


@torch.inference_mode()
def continued(prefill: PreTrainedModel, decode: PreTrainedModel, count: int) -> list[int]:
    """Return greedy tokens: the first by `prefill`, the others by `decode` over the keys and values of `prefill`."""
    cache: Any = DynamicCache(config=prefill.config)
    logits = prefill(torch.tensor([PROMPT]), past_key_values=cache, use_cache=True).logits
    tokens = [int(logits[0, -1].argmax())]
    while len(tokens) < count:
        logits = decode(torch.tensor([tokens[-1:]]), past_key_values=cache, use_cache=True).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


async def test_pair_of_unlike_weights_gives_the_tokens_of_the_plain_model_over_pages_of_the_other(
    tmp_path: Path,
) -> None:
    folders = [tmp_path / name for name in ("plain", "fp8")]
    plain = build("llama", SHAPE)
    plain.save_pretrained(folders[0])
    fp8 = pack(folders[1], CASES["compressed-tensors fp8"], build("llama", SHAPE))
    expected = continued(fp8.eval(), plain.eval(), 30)
    assert expected != continued(plain, plain, 30)
    assert expected != continued(fp8, fp8, 30)
    decode = InProcess(role="decode", engine=engine_of(folders[0]))
    prefill = InProcess(role="prefill", engine=engine_of(folders[1]))
    router = RouterConfig(shipping="always", unlike_weights="mixed")
    async with serving(Dispatcher("tiny", router), d=decode, p=prefill) as dispatcher:
        params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
        deltas = [delta async for delta in dispatcher.generate(Submission("r", PROMPT, params))]
    assert [token for delta in deltas for token in delta.token_ids] == expected
