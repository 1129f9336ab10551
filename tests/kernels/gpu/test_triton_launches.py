"""Launches of attention on a GPU, recorded without one: compiled variants, programs, and how contexts are cut."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton: pip install triton")

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from crossdock.kernels.attention import AttentionBatch
from crossdock.kernels.gpu import triton_attention
from crossdock.kernels.gpu.triton_attention import num_joins, num_parts, paged_attention, store_kv
from crossdock.kernels.gpu.triton_decodes import num_shares, share_kernel
from crossdock.kernels.latent_attention import UpProjections, latent_attention
from crossdock.workers.replica.engine.calibrate import _LENGTHS_OF_TILES
from tests.first_files import compile_for_gpus

KERNELS = (
    *("share_kernel", "decode_kernel", "join_kernel", "block_kernel", "chunk_kernel", "chunk_join_kernel"),
    "store_kernel",
)
WARM_UP = (64, *_LENGTHS_OF_TILES)  # tokens of prompts
HEADS, KV_HEADS, DIM, PAGE_SIZE = 32, 8, 128, 16  # of Llama-3.1-8B


class Launched:
    """Record launches: the keys under which Triton looks for compiled variants, and programs by kernel."""

    def __init__(self) -> None:
        self.keys: set[tuple[str, str]] = set()
        self.programs: Counter[str] = Counter()


class Recorded:
    """In place of a kernel: notes its launches and computes nothing."""

    def __init__(self, kernel: Any, launched: Launched) -> None:
        function = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self._bind = create_function_from_signature(function.signature, function.params, backend)
        self._name, self._launched = kernel.fn.__name__.removesuffix("_kernel"), launched

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(size > 0 for size in grid)

        def launch(*args: Any, **kwargs: Any) -> None:
            _, specialization, options = self._bind(*args, **kwargs)
            self._launched.keys.add((self._name, str((specialization, options))))
            self._launched.programs[self._name] += math.prod(grid)

        return launch


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Kernels that are recorded, on a device of 132 multiprocessors."""
    launched = Launched()
    for name in KERNELS:
        monkeypatch.setattr(triton_attention, name, Recorded(getattr(triton_attention, name), launched))
    monkeypatch.setattr(triton_attention, "_num_multiprocessors", lambda _: 132)
    return launched


def batch_of(lengths: Sequence[tuple[int, int]], max_kv_len: int | None = None) -> AttentionBatch:
    """Return the step of sequences of (query_len, kv_len). Its tensors begin on multiples of 16 bytes."""
    lens = torch.tensor([kv for _, kv in lengths]).int()
    queries = torch.tensor([q for q, _ in lengths])
    num_decodes = next((s for s, (n, _) in enumerate(lengths) if n > 1), len(lengths))
    return AttentionBatch(
        query_start=torch.nn.functional.pad(queries.cumsum(0).int(), (1, 0)),
        kv_len=lens,
        page_table=torch.zeros(len(lengths), -(-(max_kv_len or int(lens.max())) // PAGE_SIZE), dtype=torch.int32),
        slots=torch.zeros(int(queries.sum()), dtype=torch.int64),
        max_query_len=int(queries.max()),
        max_kv_len=max_kv_len or int(lens.max()),
        num_decodes=num_decodes,
        max_chunk_kv_len=max((kv for _, kv in lengths[num_decodes:]), default=0),
    )


def launch(lengths: Sequence[tuple[int, int]], max_kv_len: int | None = None, **options: Any) -> None:
    """Launch the layer of a step of (query_len, kv_len), as the model does."""
    batch = batch_of(lengths, max_kv_len)
    T = len(batch.slots)
    pool = torch.zeros(4, KV_HEADS, 2, PAGE_SIZE, DIM, dtype=torch.bfloat16)[:, :, 0]
    rows = torch.zeros(T, (HEADS + 2 * KV_HEADS) * DIM, dtype=torch.bfloat16)  # a joined projection
    q, k, v = (x.view(T, -1, DIM) for x in rows.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], 1))
    store_kv(k, v, pool, pool, batch.slots)
    paged_attention(q, pool, pool, batch, scale=DIM**-0.5, **options)


def launch_latents(lengths: Sequence[tuple[int, int]]) -> None:
    """Launch a layer over latents of 64 elements with 16 rotated ones. From 22 rows on, a chunk's are expanded."""
    batch = batch_of(lengths)
    pages = torch.zeros(4, 1, PAGE_SIZE, 80, dtype=torch.bfloat16)
    up = UpProjections(torch.zeros(4, 32, 64, dtype=torch.bfloat16), 16)
    q = torch.zeros(len(batch.slots), 4, 32, dtype=torch.bfloat16)
    latent_attention(paged_attention, q, pages, batch, up, scale=0.2)


@pytest.mark.parametrize("options", [{}, {"window": 4096}, {"softcap": 50.0}], ids=str)
def test_served_mix_launches_only_variants_compiled_by_warm_up(
    launched: Launched, options: dict[str, Any], seed: int
) -> None:
    """The warm-up runs prompts of `WARM_UP` tokens and their decodes, before any other step."""
    for lengths in (*([(length, length)] for length in WARM_UP), [(1, 65)]):
        launch(lengths, **options)
    found = Counter(name for name, _ in launched.keys)
    assert found == {"block": 3, "chunk": 3, "chunk_join": 3, "decode": 1, "join": 1, "share": 1, "store": 1}
    warm = set(launched.keys)
    rng = random.Random(seed)
    for streams in (0, 1, 2, 3, 16, 17, 64, 255, 256):
        for context in (1, 15, 16, 1000, 32_768, 131_072):
            decodes = [(1, rng.randint(1, context)) for _ in range(streams)]
            chunks = [(rng.randint(1, min(context, 512)), context) for _ in range(rng.choice([0, 1, 3]))]
            if decodes + chunks:
                launch(decodes + chunks, **options)
    for size in (1, 2, 4, 64, 256):  # graphs
        launch([(1, 1)] * size, max_kv_len=131_072, **options)
    assert launched.keys == warm


def test_served_mix_over_latents_launches_only_variants_compiled_by_warm_up(launched: Launched, seed: int) -> None:
    """After the warm-up, chunks follow any number of decodes: the step's tensors of the chunks begin anywhere."""
    for lengths in (*([(length, length)] for length in WARM_UP), [(1, 17)]):
        launch_latents(lengths)
    warm, rng = set(launched.keys), random.Random(seed)
    assert len([name for name, _ in warm if name == "chunk"]) == 3, (
        "over latents, and of two sizes over keys and values"
    )
    for streams in (0, 1, 2, 3, 5, 17):
        for tokens in (2, 16, 30, 200):
            launch_latents([(1, rng.randint(1, 900))] * streams + [(tokens, rng.randint(tokens, 900))])
    assert launched.keys == warm


@pytest.mark.parametrize(
    ("lengths", "max_kv_len", "programs"),
    [
        ([(8192, 8192)], None, 2057),
        ([(1, 1024)] * 64, None, 768),
        ([(1, 1024)] * 256, None, 3072),
        ([(1, 1024)] * 256, 131_072, 3072),  # a graph launches no more
        ([(1, 131_072)], None, 536),
        ([*[(1, 1024)] * 64, (512, 32_768)], None, 1977),
        ([(64, 122_880)], None, 649),
    ],
)
def test_programs_of_a_step_are_few_more_than_have_something_to_do(
    launched: Launched, lengths: list[tuple[int, int]], max_kv_len: int | None, programs: int
) -> None:
    launch(lengths, max_kv_len=max_kv_len)
    del launched.programs["store"], launched.programs["share"]
    assert launched.programs.total() == programs


def shares_of(lengths: Sequence[int], parts: int, *, min_tiles: int = 1, tile: int = 16, window: int = 0) -> list[int]:
    """Compute the shares with the kernel, in Triton's interpreter."""
    shares = torch.full((num_shares(parts),), -7, dtype=torch.int32)
    share_kernel[1,](
        *(shares, torch.tensor(lengths).int(), len(lengths), parts),
        MIN_TILES=min_tiles,
        BLOCK_N=tile,
        WINDOW=window,
        ATTENTION_CHUNK=0,
        BLOCK_S=4,  # several blocks of sequences
    )
    return [int(share) for share in shares]


def longhand(lengths: Sequence[int], parts: int, *, min_tiles: int, tile: int, window: int) -> list[list[int]]:
    """Return the tiles of the parts of each sequence: the longest part as short as `parts` parts allow."""
    tiles = [max(1, -(-n // tile) - (max(n - window, 0) // tile if window else 0)) for n in lengths]
    share = min_tiles
    while sum(-(-n // share) for n in tiles) > parts:
        share += 1
    return [[min(share, n - i) for i in range(0, n, share)] for n in tiles]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("window", [0, 40])
def test_shares_are_the_shortest_that_the_parts_allow(window: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(8):
        lengths = [rng.choice([0, 1, 16, 17, rng.randint(1, 900)]) for _ in range(rng.randint(1, 11))]
        parts, min_tiles = len(lengths) + rng.randint(1, 9), rng.choice([1, 3])
        expected = longhand(lengths, parts, min_tiles=min_tiles, tile=16, window=window)
        D, shares = len(lengths), shares_of(lengths, parts, min_tiles=min_tiles, window=window)
        first = shares[2 : 3 + D]
        assert [b - a for a, b in itertools.pairwise(first)] == [len(part) for part in expected]
        assert first[0] == 0
        assert shares[3 + D : 3 + D + first[-1]] == [s for s, part in enumerate(expected) for _ in part]
        several = [s for s, part in enumerate(expected) if len(part) > 1]
        assert shares[3 + D + parts :][: shares[1]] == several
        assert len(several) <= num_joins(D, parts)
        assert all(part[0] == shares[0] for part in expected if len(part) > 1)


@pytest.mark.usefixtures("interpreted")
def test_one_long_context_among_many_gets_the_spare_parts() -> None:
    parts = num_parts(256, KV_HEADS, 132)
    longest = longhand([1024] * 255 + [131_072], parts, min_tiles=4, tile=64, window=0)
    assert parts == 320
    assert [len(part) for part in longest] == [1] * 255 + [64]
    assert shares_of([1024] * 7 + [131_072], 16, min_tiles=4, tile=64)[0] == -(-2048 // 9)


@pytest.fixture
def interpreted() -> None:
    if isinstance(share_kernel, JITFunction):
        pytest.skip("Triton compiles here: test_triton.py tests the kernel by its results")


def test_kernels_compile_within_the_registers_and_shared_memory_of_gpus(tmp_path: Path) -> None:
    """The next run compiles changed kernels alone: binaries stay in its cache. Other files are temporary."""
    process = compile_for_gpus(tmp_path)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
