"""The steps between products, compiled for this CPU and for older ones, against torch in float64."""

import platform
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from crossdock.kernels.attention import AttentionBatch
from crossdock.kernels.cpu import build, layer_steps
from crossdock.kernels.cpu.layer_steps import HeadSteps, add_and_norm, finish_heads, silu_and_multiply
from crossdock.kernels.cpu.row_deltas import RowDeltas, StackDeltas, adapted

pytestmark = pytest.mark.skipif(not build.shutil.which("g++"), reason="needs a compiler: apt-get install g++")
_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86 CPUs")
CPUS = ["native", pytest.param("x86-64-v3", marks=_x86), pytest.param("x86-64", marks=_x86)]  # AVX2; SSE2


@pytest.fixture(params=CPUS, scope="module")
def cpu(request: pytest.FixtureRequest) -> Iterator[str]:
    """Compile for a CPU, or take what an earlier run compiled of the same source and flags."""
    flags = [f"-march={request.param}" if flag == "-march=native" else flag for flag in build.FLAGS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "FLAGS", tuple(flags))
        _forget()
        yield request.param
        assert layer_steps.steps_library.cache_info().misses == 1, "the tests called what was compiled here"
    _forget()


def _forget() -> None:
    layer_steps.steps_library.cache_clear()
    build.cpu_library.cache_clear()


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def test_steps_match_torch(cpu: str, seed: int) -> None:
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 4e-2)):
        for rows in (1, 5, 700):  # 700: more than one thread
            _check_steps(rows, dtype, tolerance, torch.Generator().manual_seed(seed))


def test_steps_with_adapters_match_torch(cpu: str, seed: int) -> None:
    """Rows of one adapter come alone, in blocks that are computed together, and as what is left of a block."""
    rng, rows, widths, size = torch.Generator().manual_seed(seed), 700, {"gate": 80, "up": 80}, 112
    for dtype, tolerance in ((torch.float32, 2e-4), (torch.bfloat16, 4e-2)):
        pairs = [  # of two adapters
            {name: (torch.randn(rank, size, generator=rng) / 16, torch.randn(rank, n, generator=rng).T / 4)
             for name, n in widths.items()}
            for rank in (6, 9)
        ]  # fmt: skip
        for narrow in {torch.bfloat16, dtype}:
            own = [{name: (a.to(narrow), b.to(narrow)) for name, (a, b) in each.items()} for each in pairs]
            groups = [slice(2, 15), torch.tensor([0, *range(20, 690)])]
            deltas = RowDeltas([(StackDeltas([{}, one]), numbers) for one, numbers in zip(own, groups, strict=True)])
            x, y = (torch.randn(rows + 3, width, generator=rng).to(dtype) for width in (size, 160))
            exact = y.double().view(-1, 5, 2, 16)
            for one, numbers in zip(own, groups, strict=True):
                for side, (a, b) in enumerate(one.values()):
                    exact[numbers, :, side] += (x.double()[numbers] @ a.double().T @ b.double().T).view(-1, 5, 16)
            kept, out = y[rows:].clone(), torch.empty(rows, 80, dtype=dtype)
            pointers = deltas.pointers(rows)
            silu_and_multiply(y, rows, out, adapted(pointers, 1, x, **widths))
            torch.testing.assert_close(y.double()[:rows], exact.flatten(1)[:rows], rtol=tolerance, atol=tolerance)
            assert torch.equal(y[rows:], kept)


def _check_steps(rows: int, dtype: torch.dtype, tolerance: float, rng: torch.Generator) -> None:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(dtype)

    def close(ours: Tensor, exact: Tensor, scale: Tensor | None = None) -> None:
        """Compare element by element, allowing `tolerance` of `scale` (of the exact values unless given) and of 1."""
        allowed = tolerance * (1 + (exact if scale is None else scale).abs())
        worst = ((ours.double() - exact).abs() / allowed).max()
        assert worst <= 1, f"off by {float(worst):.2f} times what {dtype} may be"

    x, addend, weight = random(rows, 112), random(rows + 3, 112), random(112)
    out, sum_ = random(rows + 3, 112), x.double() + addend[:rows].double()
    kept = out[rows:].clone()
    add_and_norm(x, addend, weight, 1e-5, out)
    close(x, sum_)
    close(out[:rows], norm(x.double(), weight.double()))
    assert torch.equal(out[rows:], kept)
    add_and_norm(x, None, weight, 1e-5, out)
    close(out[:rows], norm(x.double(), weight.double()))

    both, activated = random(rows + 3, 160) * 8, random(rows + 3, 80)
    gate, up = both.double().view(-1, 5, 2, 16).unbind(2)
    silu_and_multiply(both, rows, activated)
    close(activated[:rows], (gate / (1 + torch.exp(-gate)) * up).flatten(1)[:rows])

    Hq, Hkv, D, page_size = 6, 2, 32, 4
    qkv, bias, q_norm, k_norm = random(rows + 3, (Hq + 2 * Hkv) * D), random((Hq + 2 * Hkv) * D), random(D), random(D)
    angles = torch.randn(rows, D // 2, generator=rng).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    pool = torch.zeros(rows, Hkv, 2, page_size, D, dtype=dtype)
    keys, values = pool[:, :, 0], pool[:, :, 1]
    slots = torch.randperm(rows * page_size, generator=rng)[:rows]
    slots[0] = -1 if rows > 1 else slots[0]
    q, k, v = (qkv.double() + bias.double())[:rows].view(rows, -1, D).split([Hq, Hkv, Hkv], 1)
    q, k = norm(q, q_norm.double()), norm(k, k_norm.double())
    # Rounding goes by the length of a rotated pair.
    lengths_of_pairs = [x.view(*x.shape[:2], 2, -1).norm(dim=2).repeat(1, 1, 2) for x in (q, k)]
    q, k = (rotated(x, cos.double()[:, None], sin.double()[:, None]) for x in (q, k))
    lengths = torch.zeros(1, dtype=torch.int32)
    batch = AttentionBatch(lengths, lengths, lengths[None], slots, rows, rows, 0)
    steps = HeadSteps(
        *(Hq, Hkv, D, page_size, pool.stride(0), pool.stride(1), 1e-5),
        *(bias.data_ptr(), q_norm.data_ptr(), k_norm.data_ptr(), keys.data_ptr(), values.data_ptr()),
    )
    finish_heads(steps, qkv, cos, sin, batch)
    close(qkv[:rows, : Hq * D].view(rows, Hq, D), q, lengths_of_pairs[0])
    stored = slots >= 0
    at, offsets = slots[stored] // page_size, slots[stored] % page_size
    close(keys[at, :, offsets], k[stored], lengths_of_pairs[1][stored])
    close(values[at, :, offsets], v[stored])
    assert int(pool.any(-1).sum()) == 2 * Hkv * int(stored.sum())  # nothing else is written
