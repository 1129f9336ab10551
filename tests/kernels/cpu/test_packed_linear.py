"""Products of packed weights against the dequantised weight in float64, on every path that this CPU has."""

import mmap
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from crossdock.kernels.cpu import build, linear, packed_linear
from crossdock.kernels.cpu.build import cpu_flags
from crossdock.kernels.cpu.linear import Weights, linear_cells, rounds_rows, usable_packed_kernels
from crossdock.kernels.cpu.packed_linear import (
    CodeForm,
    DequantisedProduct,
    PackedPanels,
    PackedProduct,
    in_int8,
    why_not_packed,
)
from crossdock.kernels.packed import Kind, PackedMatrix

ARM = "aarch64-linux-gnu-g++"
ROWS = (1, 2, 3, 5, 8, 9, 13, 17, 64, 65, 270)  # of AMX: a tile of rows and one more, blocks of 256 and some more
ROUNDED = 1.01 * 2**-8  # most of a number in bfloat16, and a little of its sum
FORMS: list[tuple[Kind, int, bool, int]] = [  # kind, columns of a group, offsets, rows of a block
    ("int4", 32, False, 1),
    ("int4", 16, True, 1),
    ("int4", 128, True, 1),
    ("int8", 32, False, 1),
    ("int8", 16, True, 1),
    ("int8", 80, False, 1),
    ("int8", 144, False, 1),
    ("int8", 10**6, False, 1),
    ("e2m1", 32, False, 1),
    ("e2m1", 16, False, 1),
    ("nf4", 64, False, 1),
    ("e4m3", 128, False, 128),
    ("e4m3", 10**6, False, 1),
    ("e4m3", 10**6, False, 10**6),
]
INTEGERS = [form for form in FORMS if form[0] not in ("e4m3", "nf4")]


def matrix(kind: Kind, rows: int, columns: int, group: int, offsets: bool = False, block: int = 1) -> PackedMatrix:
    """Return a matrix of random codes: of each kind all codes but NaN."""
    group, block = min(group, columns), min(block, rows)
    grid = -(-rows // block), -(-columns // group)
    per_code = 2 if kind in ("int4", "e2m1", "nf4") else 1
    codes = torch.randint(0, 256, (rows, columns // per_code), dtype=torch.uint8)
    if kind == "e4m3":
        codes = torch.where(codes & 127 == 127, 0, codes).view(torch.float8_e4m3fn)
    elif kind == "int8":
        codes = codes.view(torch.int8)
    scales = torch.rand(grid) * 0.01 + 1e-4
    zeros = -scales * torch.randint(0, 16, grid) if offsets else None
    return PackedMatrix(kind, codes, scales, zeros, group, block)


def relative_error(got: Tensor, x: Tensor, weight: PackedMatrix | Tensor) -> float:
    """Return the largest error of a row of got = x @ weight.T, in norm."""
    plain = weight.double() if isinstance(weight, Tensor) else weight.dequantise(torch.float64)
    exact = x.double() @ plain.T
    return float(((got.double() - exact).norm(dim=1) / exact.norm(dim=1).clamp_min(1e-30)).max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "group", "offsets", "block"), FORMS)
def test_product_is_exact_to_rounding_and_rows_are_independent(
    kind: Kind, group: int, offsets: bool, block: int, dtype: torch.dtype
) -> None:
    for rows, columns in ((16, 16), (48, 144), (80, 592)):
        if 16 < group < columns and group % 16:
            continue
        weight = matrix(kind, rows, columns, group, offsets, block)
        product = PackedProduct(PackedPanels.of(weight))
        x = torch.randn(max(ROWS), columns).to(dtype)
        x[3], x[5] = x[3] * 1e3, 0  # other rows do not notice; nothing is divided by zero
        whole = product(x)
        rounded = weight.dequantise(torch.float32).to(dtype)  # as the library multiplies
        most = ROUNDED if dtype is torch.bfloat16 else 2**-18
        assert relative_error(whole, x, weight) < most
        assert relative_error(DequantisedProduct(PackedPanels.of(weight))(x), x, rounded) < most
        assert not whole[5].any()
        for count in (0, *ROWS):
            assert torch.equal(product(x[:count]), whole[:count]), count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "group", "offsets", "block"), FORMS)
def test_errors_of_sums_are_those_of_any_count_of_rows(
    kind: Kind, group: int, offsets: bool, block: int, dtype: torch.dtype
) -> None:
    """All sums are zero, so that float32's errors are left, of which another order of a sum has others."""
    half = matrix(kind, 48, -(-256 // group) * group if group < 256 else 256, group, offsets, block)
    codes, *grids = (torch.cat([each, each], 1) for each in half.tensors)
    product = PackedProduct(
        PackedPanels.of(PackedMatrix(kind, codes, *grids, *[None] * (not offsets), half.group, half.block_rows))
    )
    x = torch.randn(max(ROWS), half.shape[1]) * 2.0 ** torch.randint(-6, 7, (max(ROWS), half.shape[1]))
    x = torch.cat([x, -x], 1).to(dtype)
    whole = product(x)
    assert whole.any()
    for count in ROWS:
        assert torch.equal(product(x[:count]), whole[:count]), count


@pytest.mark.parametrize(("kind", "group", "offsets", "block"), FORMS)
def test_plain_weight_is_that_of_the_codes(kind: Kind, group: int, offsets: bool, block: int) -> None:
    weight = matrix(kind, 48, 144, group, offsets, block)
    plain = DequantisedProduct(PackedPanels.of(weight)).weight(torch.float32)
    torch.testing.assert_close(plain, weight.dequantise(torch.float32), rtol=1e-6, atol=1e-6)


def test_all_codes_have_their_values_in_rows_of_one_number() -> None:
    """A row with one number that is not zero shows a column of the weight, exactly."""
    for kind in ("int4", "int8", "e2m1", "e4m3", "nf4"):
        weight = matrix(kind, 256, 16, 16)  # type: ignore[arg-type]
        weight = PackedMatrix(weight.kind, weight.codes, torch.ones(256, 1), None, 16)
        for dtype in (torch.float32, torch.bfloat16):
            seen = PackedProduct(PackedPanels.of(weight))(torch.eye(16, dtype=dtype))
            assert torch.equal(seen.T.float(), weight.dequantise(dtype).float()), (kind, dtype)


@pytest.mark.skipif(not rounds_rows(), reason="needs a CPU with AVX512-VNNI, or with AVX2 alone")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "group", "offsets", "block"), INTEGERS)
def test_rounded_rows_give_the_product_of_the_rounded_numbers(
    kind: Kind, group: int, offsets: bool, block: int, dtype: torch.dtype
) -> None:
    weight = matrix(kind, 48, 144, group, offsets, block)
    x = torch.randn(70, 144).to(dtype)
    product = PackedProduct(PackedPanels.of(weight), is_rounded=True)
    run = min(weight.group, 64) if weight.group != 80 else 16  # columns that share a scale
    rounded = torch.cat([_rounded(part) for part in x.double().split(run, 1)], 1)
    assert relative_error(product(x), rounded, weight) < 2 * ROUNDED  # float32 rounds a few ties to the other side
    assert relative_error(product(x), x, weight) < 0.03  # in float64 the rounded rows exceed 0.02 for 7 of 200 seeds
    for count in ROWS:
        assert torch.equal(product(x[:count]), product(x)[:count])


def _rounded(x: Tensor) -> Tensor:
    scale = x.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
    return (x / scale).round() * scale


def test_thread_count_changes_no_result() -> None:
    product = PackedProduct(PackedPanels.of(matrix("int4", 176, 64, 32)))
    x = torch.randn(70, 64)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(product(x))
    assert all(torch.equal(result, results[0]) for result in results)


def test_columns_in_an_order_of_their_own_meet_their_inputs() -> None:
    weight = matrix("int4", 32, 64, 16, offsets=True)
    shuffled = PackedMatrix(
        weight.kind, weight.codes, weight.scales, weight.offsets, weight.group, columns=torch.randperm(64)
    )
    x = torch.randn(3, 64)
    for product in (PackedProduct, DequantisedProduct):
        assert relative_error(product(PackedPanels.of(shuffled))(x), x, shuffled) < 2**-18


def test_joined_weights_give_the_outputs_of_all() -> None:
    parts = [matrix("int4", 32, 64, 32), matrix("int4", 48, 64, 32)]
    x = torch.randn(3, 64)
    alone = [PackedProduct(PackedPanels.of(part))(x) for part in parts]
    assert torch.equal(PackedProduct(PackedPanels.of(*parts))(x), torch.cat(alone, 1))
    gate, up = matrix("int4", 32, 64, 32), matrix("int4", 32, 64, 32)
    both = PackedProduct(PackedPanels.of(gate, up, every_panel=True))(x).view(3, 2, 2, 16)
    assert torch.equal(both[:, :, 0].flatten(1), PackedProduct(PackedPanels.of(gate))(x))
    assert torch.equal(both[:, :, 1].flatten(1), PackedProduct(PackedPanels.of(up))(x))
    with pytest.raises(ValueError, match="packed weights of one input are of unlike forms"):
        PackedPanels.of(*(matrix("int4", 32, 64, group) for group in (32, 16)))


def test_memory_of_matrices_goes_back_as_their_codes_are_copied() -> None:
    """Read zeros where memory went back to the machine: all but pages that other tensors may share."""
    codes, scales = torch.full((1024, 512), 0x37, dtype=torch.uint8), torch.full((1024, 8), 0.5)
    x, expected = torch.rand(3, 1024), PackedMatrix("int4", codes.clone(), scales.clone(), None, 128)  # no sum cancels
    panels = PackedPanels.of(PackedMatrix("int4", codes, scales, None, 128), frees=True)
    assert relative_error(PackedProduct(panels)(x), x, expected) < 2**-18
    pieces = 1024 * 512 // (1 << 20) + 1
    assert int((codes != 0).sum()) <= 2 * mmap.PAGESIZE * pieces
    assert int((scales != 0).sum()) * 4 <= 2 * mmap.PAGESIZE


def test_weight_rounded_to_int8_has_one_scale_for_each_output() -> None:
    weight = torch.randn(32, 48).bfloat16()
    weight[3] = 0
    rounded = in_int8(weight).dequantise(torch.float64)
    step = weight.double().abs().amax(1, keepdim=True) / 127
    assert ((rounded - weight.double()).abs() <= step / 2 * 1.0001).all()


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (matrix("int8", 24, 32, 32), r"its shape \[24, 32\] has a size that is no multiple of 16"),
        (matrix("int8", 16, 48, 24), "its groups of 24 columns are no multiples of 16"),
    ],
)
def test_shapes_that_have_no_panels_are_refused(weight: PackedMatrix, reason: str) -> None:
    assert why_not_packed(weight) is not None
    with pytest.raises(ValueError, match=reason):
        PackedPanels.of(weight)


def test_kernels_of_packed_weights_follow_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_packed_kernels(torch.float32) == ("native", "torch")
    assert usable_packed_kernels(torch.float32, "torch") == ("torch",)
    with pytest.raises(
        ValueError, match="cpu_kernels onednn: the weights are packed; native, int8 and torch read them"
    ):
        usable_packed_kernels(torch.float32, "onednn")
    monkeypatch.setattr(linear, "rounds_rows", lambda: True)
    assert usable_packed_kernels(torch.bfloat16, "int8") == usable_packed_kernels(torch.float32, "int8") == ("int8",)
    assert usable_packed_kernels(torch.float16) == ()
    monkeypatch.setattr(linear, "rounds_rows", lambda: False)
    with pytest.raises(ValueError, match="cpu_kernels int8: rows are rounded to int8 on CPUs with AVX512-VNNI"):
        usable_packed_kernels(torch.float32, "int8")


def test_measured_calls_compute_packed_weights_of_the_form() -> None:
    form = CodeForm("e2m1", 32, has_offsets=False)
    cells = linear_cells(Weights(64, 96, count=5), torch.float32, ["native", "torch"], (1, 64), form)
    for rows in (1, 64):
        own, plain = (cells[kernel, rows][0]() for kernel in ("native", "torch"))  # type: ignore[index]
        torch.testing.assert_close(own, plain)


SOURCE = Path(build.__file__).with_name("packed.cpp")
# With -O1 the libraries of test_older_cpus_compute_the_same take 22 s of a core (Zen 5), and a third of that without.
QUICK = [flag for flag in build.FLAGS if not flag.startswith(("-march", "-O"))] + ["-O0"]


@pytest.mark.skipif(not shutil.which(ARM), reason="needs a compiler for Arm: apt-get install g++-aarch64-linux-gnu")
def test_kernels_compile_for_arm() -> None:
    for source in (SOURCE, SOURCE.with_name("layer_steps.cpp"), SOURCE.with_name("attention.cpp")):
        done = subprocess.run([ARM, *QUICK, "-Wall", "-fsyntax-only", source], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), source


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a compiler: apt-get install g++")
@pytest.mark.parametrize("target", ["x86-64", "haswell", "icelake-server", "cooperlake"])
def test_older_cpus_compute_the_same(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same file compiled for AVX2 alone, and for AVX512 without bfloat16 or without AMX, where this CPU runs it.

    x86-64 without either runs the code of Arm: the compiler's own vectors.
    """
    needed = {
        "x86-64": {"sse2"},
        "haswell": {"avx2", "fma"},
        "icelake-server": {"avx512bw", "avx512_vnni", "avx512_vbmi2"},
        "cooperlake": {"avx512bw", "avx512_vnni", "avx512_bf16"},
    }[target]
    if not needed <= cpu_flags():
        pytest.skip(f"needs a CPU that runs code for {target}")
    monkeypatch.setattr(build, "FLAGS", (*QUICK, "-Wno-psabi", f"-march={target}"))
    library = build.cpu_library.__wrapped__("packed")
    monkeypatch.setattr(packed_linear, "cpu_library", lambda _: library)
    monkeypatch.setattr(linear, "cpu_library", lambda _: library)
    assert rounds_rows() == (target != "x86-64")
    for kind, group, offsets, block in FORMS:
        if group == 80:
            continue
        weight = matrix(kind, 48, 144, group, offsets, block)
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(9, 144).to(dtype)
            got = PackedProduct(PackedPanels.of(weight))(x)
            assert relative_error(got, x, weight) < (ROUNDED if dtype is torch.bfloat16 else 2**-18), (kind, group)
            assert torch.equal(PackedProduct(PackedPanels.of(weight))(x[:2]), got[:2])
            rounding = PackedProduct(PackedPanels.of(weight), is_rounded=True)
            assert relative_error(rounding(x), x, weight) < 0.06, (
                "0.026 at most for 60 seeds; a wrong order of columns has 1"
            )
            assert torch.equal(rounding(x[:2]), rounding(x)[:2])
