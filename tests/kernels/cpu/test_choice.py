"""The choice between kernels, for tables of real machines and of imagined ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.kernels.cpu.choice import MARGIN, PREFERENCE, KernelChoice, choose, of_plain_weights, only
from crossdock.kernels.options import Kernel

ROWS = (1, 4, 8, 16, 32, 64, 256, 1024)
# ms, two threads, all linears of SmolLM2-135M in bfloat16
INTEL_AMX: dict[Kernel, list[float]] = {
    "torch": [27, 30, 29, 31, 33, 38, 57, 128],
    "onednn": [21, 22, 22, 23, 26, 30, 45, 133],
    "native": [15, 17, 23, 35, 57, 96, 264, 1021],
}
ZEN_4_ROWS = (1, 8, 32, 1024)
ZEN_4: dict[Kernel, list[float]] = {
    "torch": [31.9, 38.7, 67.0, 1094],
    "onednn": [18.2, 19.9, 49.6, 1064],
    "native": [11.2, 15.0, 44.9, 1019],
}


def test_amx_machine_takes_onednn_from_8_rows() -> None:
    choice = choose(INTEL_AMX, ROWS)
    assert choice == KernelChoice("native", "onednn", 8)
    assert [choice.at(rows) for rows in (1, 7, 8, 2000)] == ["native", "native", "onednn", "onednn"]
    assert str(choice) == "native below 8 rows, onednn from there"


def test_zen_machine_takes_own_products_for_all_rows() -> None:
    assert choose(ZEN_4, ZEN_4_ROWS) == only("native")
    assert str(only("native")) == "native"


def test_equal_kernels_need_only_one_copy_of_the_weights() -> None:
    table: dict[Kernel, list[float]] = {"onednn": [1.0, 1.05], "native": [1.09, 1.0], "torch": [1.0, 1.0]}
    assert choose(table, (1, 64)) == only("native")


# ms for all layers of SmolLM2-135M with attention, as in benchmarks/records/cpu-kernels.md
RECORDED: dict[str, dict[Kernel, list[float]]] = {
    "avx512_bf16, Zen 5": {
        "native": [3.5, 6.1, 11.3, 63.6, 307],
        "onednn": [14.5, 17.2, 26.1, 87.2, 339],
        "torch": [16.0, 18.9, 28.2, 91.3, 352],
    },
    "avx512_bf16, Zen 4": ZEN_4,
    "avx2, Zen 3": {
        "native": [7.3, 7.7, 13.8, 23.7, 45.6, 78.3, 312],
        "onednn": [30.8, 38.1, 44.5, 60.2, 88.2, 142, 438],
    },
    "amx_bf16": {
        "native": [9.0, 10.6, 12.4, 16.8, 17.8, 25.2, 51, 481],
        "onednn": [29.5, 31.5, 35.5, 44.9, 51.0, 59.2, 111, 621],
    },
}


@pytest.mark.parametrize("cpu", RECORDED)
def test_kernel_of_plain_weights_is_the_fastest_on_each_recorded_cpu(cpu: str) -> None:
    table = RECORDED[cpu]
    chosen = of_plain_weights([kernel for kernel in PREFERENCE if kernel in table])
    assert all(table[chosen.few][row] == min(seconds) for row, seconds in enumerate(zip(*table.values(), strict=True)))
    assert chosen == only("native")


def test_machine_without_own_products_chooses_between_libraries() -> None:
    table = {kernel: INTEL_AMX[kernel] for kernel in ("onednn", "torch")}
    assert choose(table, ROWS) == only("onednn")


def test_one_disturbed_measurement_moves_no_other_rows() -> None:
    disturbed = INTEL_AMX | {"onednn": [21, 22, 22, 23, 90, 30, 45, 133]}
    choice = choose(disturbed, ROWS)
    assert choice.few == "native"
    assert choice.at(1) == "native"
    assert all(choice.at(rows) != "native" for rows in (64, 256, 1024))


@given(
    st.lists(st.tuples(*[st.floats(0.01, 100)] * 3), min_size=len(ROWS), max_size=len(ROWS)),
    st.integers(0, len(ROWS) - 1),
)
def test_choice_is_within_margin_wherever_one_switch_suffices(columns: list[tuple[float, ...]], split: int) -> None:
    """A table in which `native` is fastest below a number of rows and `onednn` from there."""
    table: dict[Kernel, list[float]] = {"native": [], "onednn": [], "torch": []}
    for i, (fast, slower, slowest) in enumerate(map(sorted, columns)):
        first, second = ("native", "onednn") if i < split else ("onednn", "native")
        table[first].append(fast)  # type: ignore[index]
        table[second].append(slower)  # type: ignore[index]
        table["torch"].append(slowest)
    choice = choose(table, ROWS)
    for i, rows in enumerate(ROWS):
        assert table[choice.at(rows)][i] <= MARGIN * min(seconds[i] for seconds in table.values())


@pytest.mark.parametrize("factor", [0.9, 1.0, 1.1])
def test_noise_of_a_tenth_keeps_the_kernels_of_a_clear_table(factor: float) -> None:
    noisy = {kernel: [s * (factor if i % 2 else 1) for i, s in enumerate(INTEL_AMX[kernel])] for kernel in INTEL_AMX}
    noisy["native"] = list(INTEL_AMX["native"])
    assert choose(noisy, ROWS).kernels == ("native", "onednn")
