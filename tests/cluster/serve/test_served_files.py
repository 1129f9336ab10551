"""`crossdock serve --tp 2 --kv-cache-files` on a Ray of its own, and again: the second finds the pages of the first."""

import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from transformers import PreTrainedTokenizerFast

from tests.cluster.serve.pools.served_pools import metric
from tests.cluster.serve.served_command import serving
from tests.sweeps import SOAK
from tests.waiting import eventually
from tests.workers.architectures import build

NUM_TOKENS = 400
PAGE = 16


@SOAK
def test_ranks_that_are_served_again_load_the_files_of_the_ranks_before(
    tmp_path: Path, tokenizers: dict[str, PreTrainedTokenizerFast]
) -> None:
    """Take a model whose pages take so long to compute that their files are worth it on a busy machine too."""
    model = tmp_path / "model"
    tokenizers["byte_level"].save_pretrained(model)
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "head_dim": 64}
    build("llama", {"vocab_size": 640, "max_position_embeddings": 1024, **sizes}).save_pretrained(model)
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 600) for _ in range(NUM_TOKENS)] for _ in range(3)]
    flags = (
        "--tp",
        "2",
        "--kv-cache-files",
        f"{tmp_path / 'kv'},1GiB",
        "--dtype",
        "float32",
        "--kv-cache-memory",
        "64MiB",
    )

    @contextmanager
    def server(name: str) -> Iterator[str]:
        with serving(tmp_path / name, str(model), *flags) as (process, url):
            yield url
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=240) == 0

    def answers(url: str) -> list[list[int]]:
        found = []
        for prompt in prompts:
            body = {"model": "model", "prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
            answer = httpx.post(f"{url}/v1/completions", json=body | {"ignore_eos": True}, timeout=240).json()
            found.append(answer["choices"][0]["token_ids"])
        return found

    whole = NUM_TOKENS // PAGE * len(prompts)
    with server("first") as url:
        wanted = answers(url)
        eventually(lambda: metric(url, "crossdock_tier_pages") >= whole, "an idle replica writes its pages to files")
    parts = [sorted(file.name for file in own.glob("*/*")) for own in (tmp_path / "kv").iterdir()]
    assert len(parts) == 2
    assert parts[0] == parts[1]
    with server("second") as url:
        assert metric(url, "crossdock_tier_pages") >= whole
        assert answers(url) == wanted
        assert metric(url, "crossdock_tier_loaded_pages_total") > 0
        assert metric(url, "crossdock_tier_missed_pages_total") == 0
        assert metric(url, 'crossdock_cached_tokens_total{source="files"') > 0
        assert metric(url, "crossdock_prompt_tokens_total") < whole * PAGE
