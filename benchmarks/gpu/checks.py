"""Compare kernels and whole models with references in float32, and run the tests that are marked gpu."""

import copy
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from gpu.attention import PagedLayers, batch_of, kernels_of, random_pages
from gpu.cases import Bench, Case, Section
from gpu.models import paged, random_module
from gpu.rows import Figures
from gpu.sizes import Lengths

from crossdock.kernels.attention import reference_paged_attention, reference_store_kv

ROOT = Path(__file__).resolve().parents[2]
ATTENTION_BOUND = 1e-2
"""Relative error in norm. Outputs and weights are rounded to bfloat16, 2^-9 each; their sum and the order of additions
stay below half of this bound."""
LOGITS_BOUND = 3e-2
"""Likewise of two decoder layers and the output projection: some ten roundings to bfloat16 one after the other."""
TEST_FOLDERS = {"kernels": "tests/kernels", "models": "tests/workers"}
_COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped)")


def checks(bench: Bench) -> Iterator[Case]:
    """Yield errors against references, then the tests."""
    for name, lengths in bench.sizes.checked.items():
        yield Case(f"attention, {name}", partial(_attention, bench, lengths))
    yield Case("store_kv", partial(_store, bench))
    for name, values in bench.sizes.models.items():
        if "num_experts" not in values:  # rounding sends a token to other experts, which is no error
            yield Case(f"logits, two layers of {name}", partial(_logits, bench, name))
    for name, folder in TEST_FOLDERS.items():
        if not (bench.sizes.is_dry and name == "models"):  # to import them takes seconds, and all are skipped
            yield Case(f"tests of {name}", partial(_tests, bench, name, folder))


def _attention(bench: Bench, lengths: Lengths) -> Figures:
    layers = PagedLayers(bench, lengths)
    keys, values = (pages.float() for pages in layers.pages[0])
    ours = layers.attention(kernels_of(bench).paged_attention)[0]().float()
    scale = layers.q.shape[-1] ** -0.5
    theirs = reference_paged_attention(layers.q.float(), keys, values, layers.batch, scale=scale)
    return {"relative_error": float((ours - theirs).norm() / theirs.norm()), "bound": ATTENTION_BOUND}


def _store(bench: Bench) -> Figures:
    sizes = bench.sizes
    layers = PagedLayers(bench, [(1, 5), (sizes.stored, sizes.stored)])
    k, v = (torch.randn_like(layers.q[:, : sizes.kv_heads]) for _ in range(2))
    expected = [pages.clone() for pages in layers.pages[0]]
    layers.batch.slots[::3] = -1  # not stored
    reference_store_kv(k, v, expected[0], expected[1], layers.batch.slots)
    kernels_of(bench).store_kv(k, v, *layers.pages[0], layers.batch.slots)
    differing = sum(int((ours != theirs).sum()) for ours, theirs in zip(layers.pages[0], expected, strict=True))
    return {"relative_error": float(differing), "bound": 0.0}


@torch.inference_mode()
def _logits(bench: Bench, name: str) -> Figures:
    """Compare a prompt in two chunks beside a decode with transformers' own attention in float32."""
    module = random_module(bench, name, num_hidden_layers=2)
    exact = copy.deepcopy(module).float()
    exact.set_attn_implementation("eager")
    model, sizes, device = paged(bench, module), bench.sizes, bench.device.name
    model.allocate_pool(64, sizes.page_size)
    end, start = (20, 17) if sizes.is_dry else (63, 40)
    ids = torch.randint(0, model.vocab_size, (end + 10,), device=device)
    chunked, decoded = ids[:end], ids[end:]
    expected = torch.stack([exact(decoded[None]).logits[0, -1], exact(chunked[None]).logits[0, -1]])
    of_chunked, of_decoded = random_pages([(end, end), (10, 10)], sizes.page_size, 64)

    def run(lengths: Lengths, pages: list[list[int]], token_ids: torch.Tensor) -> torch.Tensor:
        batch, positions = batch_of(lengths, pages, sizes.page_size, device)
        return model.forward(token_ids, positions, batch, batch.query_start[1:].long() - 1)

    run([(start, start), (9, 9)], [of_chunked, of_decoded], torch.cat([chunked[:start], decoded[:9]]))
    last = [(1, 10), (end - start, end)]
    ours = run(last, [of_decoded, of_chunked], torch.cat([decoded[9:], chunked[start:]])).float()
    return {"relative_error": float((ours - expected).norm() / expected.norm()), "bound": LOGITS_BOUND}


def _tests(bench: Bench, name: str, folder: str) -> Figures:
    """Run the tests marked gpu of one folder; their output goes to a file beside the rows."""
    files = sorted(str(path) for path in (ROOT / folder).rglob("test_*.py") if "mark.gpu" in path.read_text())
    if bench.sizes.is_dry:
        files = files[:1]  # all are skipped without a GPU: one shows that pytest runs
    log = bench.rows.path.with_suffix(f".{name}.log")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider"]
    if name == "kernels" and importlib.util.find_spec("xdist") is not None:
        command += ["-n", "8"]  # they wait for the compiler; those of models measure the GPU's memory: one at a time
    with log.open("w") as output:
        code = subprocess.run(
            [*command, "--continue-on-collection-errors", *files],
            cwd=ROOT,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    last = log.read_text().splitlines()[-1:]
    return {"exit_code": code, **{word: int(count) for count, word in _COUNT.findall("".join(last))}}


SECTIONS = [Section("checks", 300.0, checks)]
