"""Compile the Triton kernels for GPUs of compute capabilities such as 80 90, the arguments. Compiling needs no GPU.
With `all` before them, every variant of a kernel for each.

Prints what each kernel needs. Refuses kernels that spill registers beyond a bound, or take more shared memory than such
GPUs have. test_triton_launches.py runs this as a process of its own: in the process of a test, Triton interprets
kernels, and the interpreter accepts more than the compiler does. Each kernel's binary goes to the current folder.
"""

import pathlib
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from triton import compile as compile_kernel
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from crossdock.kernels.gpu import triton_attention as attention
from crossdock.kernels.gpu import triton_e4m3 as e4m3
from crossdock.kernels.gpu import triton_experts as experts
from crossdock.kernels.gpu import triton_fixed_order as fixed_order
from crossdock.kernels.gpu import triton_layer_steps as steps
from crossdock.kernels.gpu import triton_low_rank as low_rank
from crossdock.kernels.gpu import triton_masks as masks
from crossdock.kernels.gpu import triton_sampling as sampling
from crossdock.kernels.gpu.triton_scan import STEP_TENSORS

KINDS = {
    **dict.fromkeys(("out", "q", "k", "v", "k_pages", "v_pages", "sinks"), "*bf16"),
    **dict.fromkeys(("query_start", "kv_lens", "key_end", "page_table", "shares", "listed"), "*i32"),
    **dict.fromkeys(("part_out", "part_lse", "k_scale", "v_scale", "inner"), "*fp32"),
    **dict.fromkeys(("slots", "tables"), "*i64"),
    "scale": "fp32",
    "eps": "fp32",
    "T": "i32",
}
SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}  # bytes that a program may take
SPILLED = {80: 64, 89: 128, 90: 64, 100: 128, 120: 128}  # bytes of a thread; see `tiles_for`
STRICTEST = (89, 90)  # the least shared memory, as 120 has; and the tiles' own, with tensor cores that read it
_Case = TypeVar("_Case")
UNSPECIALISED = {
    "S",
    "D",
    "P",
    "T",
    "all_parts",
    "table_row",
    "scale",
    "eps",
    "linear",
    "slots",
    "num_linears",
    "num_shares",
    "M",
}


@dataclass(frozen=True)
class Gpu:
    """GPUs of one compute capability, 90 for 9.0."""

    capability: int
    has_all: bool = False  # variants, whatever the capability

    @property
    def has_e4m3(self) -> bool:
        return self.capability >= 89

    def some(self, cases: Sequence[_Case], everywhere: int) -> Sequence[_Case]:
        """Return the cases to compile here: all on `STRICTEST`, elsewhere the first `everywhere`, one of each kernel.

        So a cold cache costs half of the seconds."""
        return cases if self.has_all or self.capability in STRICTEST else cases[:everywhere]

    def check(
        self, kernel: Any, constants: Mapping[str, Any], num_warps: int = 4, num_stages: int = 3, other: str = "i32"
    ) -> str:
        """Compile a kernel whose arguments without a kind are of kind `other`, and return its PTX."""
        kinds = dict(KINDS)
        if constants.get("HAS_SCALES"):
            kinds |= {"k_pages": "*fp8e4nv", "v_pages": "*fp8e4nv"}
        else:
            constants = {**constants, "k_scale": None, "v_scale": None}
        names = kernel.arg_names
        constants = {name: value for name, value in constants.items() if name in names}
        kinds |= {name: "i32" for name in names if name.endswith(("_page", "_page_head"))}
        signature = {name: "constexpr" if name in constants else kinds.get(name, other) for name in names}
        of_16 = {
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if name not in {*constants, *UNSPECIALISED, *STEP_TENSORS}
        }
        compiled = compile_kernel(
            ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, of_16),
            target=GPUTarget("cuda", self.capability, 32),
            options={"num_warps": num_warps, "num_stages": num_stages},
        )
        pathlib.Path("kernel.cubin").write_bytes(compiled.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", "kernel.cubin"]
        used = subprocess.check_output(command, text=True)
        registers, spilled = (int(re.search(rf"{name}:(\d+)", used)[1]) for name in ("REG", "STACK"))
        name, shared = kernel.fn.__name__, compiled.metadata.shared
        needs = f"{registers} registers, {spilled} bytes spilled, {shared / 1024:.1f} KiB shared"
        print(f"sm_{self.capability} {name}: {needs}")  # noqa: T201, shown by a test that fails
        assert spilled <= SPILLED[self.capability], f"{name} {constants} spills: {used}"
        assert shared <= SHARED[self.capability], f"{name} {constants}: {shared} bytes"
        return str(compiled.asm["ptx"])


def check_attention(gpu: Gpu) -> None:
    plain = {"PAGE": 16, "WINDOW": 0, "ATTENTION_CHUNK": 0, "SOFTCAP": 0.0}
    plain["MIN_TILES"] = 16
    plain |= dict.fromkeys(("HAS_SINKS", "HAS_SCALES", "HAS_ENDS", "LATENT", "ONE_LOOP"), False)
    features: dict[str, Any]
    for has_chunks, dim, group, features in gpu.some(
        [
            (False, 128, 4, {}),
            (True, 128, 4, {}),
            (True, 64, 3, {"WINDOW": 128, "SOFTCAP": 9.0}),
            (True, 256, 8, {"HAS_SINKS": True, "HAS_ENDS": True, "WINDOW": 1024}),
            (False, 128, 5, {"HAS_SCALES": True, "ATTENTION_CHUNK": 8192}),
            (True, 256, 8, {"HAS_SCALES": True, "ATTENTION_CHUNK": 8192}),
            (True, 128, 4, {"ONE_LOOP": True}),
            (True, 128, 4, {"few": 16}),
            (True, 128, 4, {"few": 64}),
        ],
        everywhere=2,
    ):
        if features.get("HAS_SCALES") and not gpu.has_e4m3:
            continue
        tiles = attention.tiles_for(dim, dim, 2, has_chunks, is_hopper=gpu.capability == 90)
        tiles = attention.with_rows_for(tiles, features.pop("few", tiles.rows))
        constants = {"GROUP": group, "BLOCK_N": tiles.tokens, "ROWS": tiles.rows, **attention.block_widths(dim, dim)}
        constants |= {"V_ROW": dim}
        kernel = attention.chunk_kernel if has_chunks else attention.decode_kernel
        ptx = gpu.check(kernel, plain | constants | features, tiles.num_warps, tiles.num_stages)
        assert gpu.capability != 90 or (tiles.rows >= 64) == ("wgmma.mma_async" in ptx)
    of_latents = [  # of DeepSeek-V3
        (attention.LATENT_DECODE_TILES, attention.decode_kernel, gpu.has_e4m3),
        (attention.LATENT_CHUNK_TILES, attention.chunk_kernel, False),
    ]
    for tiles, kernel, has_scales in gpu.some(of_latents, everywhere=0):
        constants = {"GROUP": 16, "BLOCK_N": tiles.tokens, "ROWS": tiles.rows, "HAS_SCALES": has_scales, "LATENT": True}
        constants |= {"V_ROW": 576}
        gpu.check(kernel, plain | constants | attention.block_widths(576, 512, True), tiles.num_warps, tiles.num_stages)
    gpu.check(attention.block_kernel, {"QUERIES": 64, "BLOCK_S": 256})
    shares = {"MIN_TILES": 4, "BLOCK_N": 64, "WINDOW": 128, "ATTENTION_CHUNK": 0, "BLOCK_S": 256}
    gpu.check(attention.share_kernel, shares)
    joins = {"GROUP": 4, "V_DIM": 128, "BLOCK_V": 128, "BLOCK_P": 8, "BLOCK_G": 4, "HAS_SINKS": True}
    gpu.check(attention.join_kernel, joins)
    joins = {
        **plain,
        "GROUP": 4,
        "V_DIM": 128,
        "BLOCK_V": 128,
        "BLOCK_N": 64,
        "ROWS": 128,
        "HAS_ENDS": True,
        "SOME": 32,
    }
    gpu.check(attention.chunk_join_kernel, joins)
    gpu.check(
        attention.store_kernel,
        {"PAGE": 16, "BLOCK_T": 16, "HAS_SCALES": gpu.has_e4m3, **attention.block_widths(128, 128)},
    )


def check_layer_steps(gpu: Gpu) -> None:
    heads = {"Q_HEADS": 32, "KV_HEADS": 8, "PAGE": 16, "HALF": 64, "BLOCK_HALF": 64, "BLOCK_T": 8}
    norms = {"HAS_NORMS": True, "HAS_SCALES": gpu.has_e4m3}
    cases: list[tuple[Any, int, dict[str, Any]]] = [
        (steps._add_and_norm_kernel, 16, {"SIZE": 16384, "BLOCK": 16384, "HAS_ADDEND": True}),
        (steps._silu_and_multiply_kernel, 4, {"SIZE": 14336, "BLOCK": 1024}),
        (steps._finish_heads_kernel, 4, heads | {"HALF": 48} | norms),
        (steps._finish_heads_kernel, 4, heads | dict.fromkeys(("q_norm", "k_norm")) | {"HAS_NORMS": False}),
        (steps._finish_heads_kernel, 4, heads | norms),
        (steps._add_and_norm_kernel, 8, {"SIZE": 4096, "BLOCK": 4096, "HAS_ADDEND": True}),
        (steps._add_and_norm_kernel, 16, {"SIZE": 8192, "BLOCK": 8192, "HAS_ADDEND": False, "addend": None}),
    ]
    plain = {"HAS_SCALES": False, "HAS_CODES": False, "codes": None, "scales": None}
    for kernel, num_warps, constants in gpu.some(cases, everywhere=3):
        gpu.check(kernel, plain | constants, num_warps, other="*bf16")
    if gpu.has_e4m3:
        KINDS.update({"codes": "*fp8e4nv", "scales": "*fp32"})
        rounded = {"SIZE": 4096, "BLOCK": 4096, "HAS_ADDEND": True, "HAS_CODES": True}
        gpu.check(steps._add_and_norm_kernel, rounded, 8, other="*bf16")
        gpu.check(steps._silu_and_round_kernel, {"SIZE": 14336, "BLOCK": 16384}, 16, other="*bf16")


def check_sampling(gpu: Gpu) -> None:
    names = {"scores": "*bf16", "temperatures": "*fp32", "keys": "*i32", "best": "*fp32", "ids": "*i64"}
    KINDS.update(names)
    gpu.check(sampling.draw_kernel, {"PART": sampling.PART, "BLOCK": sampling.BLOCK})
    KINDS.update({"scores": "*fp32", "table": "*i32"})
    gpu.check(masks.mask_kernel, {"BLOCK": masks.BLOCK})


def check_e4m3(gpu: Gpu) -> None:
    """Rows of Llama-3.1-8B's widest product."""
    if gpu.has_e4m3:
        KINDS.update({"x": "*bf16", "codes": "*fp8e4nv", "scales": "*fp32"})
        gpu.check(e4m3.quantise_kernel, {"SIZE": 14336, "BLOCK": e4m3.BLOCK})


def check_fixed_order(gpu: Gpu) -> None:
    gpu.check(fixed_order.log_softmax_kernel, {"V": 128256, "BLOCK": 2048}, other="*fp32")
    sizes = {"N": 4096, "K": 14336, "TILE": fixed_order.TILE}
    for itemsize, kind in gpu.some([(2, "*bf16"), (4, "*fp32")], everywhere=1):
        KINDS.update(dict.fromkeys(("x", "weight", "bias", "out"), kind))
        gpu.check(fixed_order.product_kernel, sizes | fixed_order.inputs_at_once(itemsize))
    KINDS["out"] = "*bf16"


def check_low_rank(gpu: Gpu) -> None:
    KINDS.update({"x": "*bf16", "y": "*bf16", "rows": "*i32", "owners": "*i32"})
    for width in gpu.some([64, 16], everywhere=1):
        sizes = {"BLOCK_T": low_rank._ROWS, "BLOCK_R": width}
        inputs, outputs = {"SHARE": low_rank._SHARE, "BLOCK_K": low_rank._INPUTS}, {"BLOCK_N": low_rank._OUTPUTS}
        gpu.check(low_rank._shrink_kernel, sizes | inputs)
        gpu.check(low_rank._expand_kernel, sizes | outputs)


def check_experts(gpu: Gpu) -> None:
    """Products of Qwen3-30B-A3B's experts; the second, of gpt-oss, has biases and the other order of weights. Then the
    codes of gpt-oss in MXFP4, and of Qwen3's in W4A16 with zero points."""
    KINDS.update({"x": "*bf16", "weight": "*bf16", "bias": "*bf16", "scales": "*bf16", "order": "*i64", "ends": "*i32"})
    KINDS.update({"code_scales": "*bf16", "code_offsets": "*fp32"})
    plain = {"GROUP": 0, "IS_FLOAT": False, "code_scales": None, "code_offsets": None}
    sizes = {"BLOCK_N": experts._OUTPUTS, "BLOCK_K": experts._INPUTS}
    for tile in gpu.some([experts.MANY, experts.FEW], everywhere=1):
        shape = sizes | {"BLOCK_M": tile.rows}
        gate_up = {"E": 128, "BLOCK_E": 128, "K": 2048, "N": 1536, "PAIRS": 8, "w_k": 1, "bias": None, "scales": None}
        down = {"E": 32, "BLOCK_E": 32, "K": 2880, "N": 2880, "PAIRS": 1, "w_n": 1}
        gpu.check(experts._experts_kernel, plain | shape | gate_up, tile.num_warps)
        gpu.check(experts._experts_kernel, plain | shape | down, tile.num_warps)
        KINDS["weight"] = "*u8"
        mxfp4, int4 = {"GROUP": 32, "IS_FLOAT": True, "code_offsets": None}, {"GROUP": 128, "IS_FLOAT": False}
        coded = mxfp4 | down if tile is experts.MANY else int4 | gate_up
        gpu.check(experts._experts_kernel, shape | coded | {"w_k": 1, "w_n": coded["K"] // 2}, tile.num_warps)
        KINDS["weight"] = "*bf16"


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "all"]
    for argument in arguments:
        checks = check_attention, check_layer_steps, check_sampling, check_fixed_order, check_low_rank, check_experts
        for check_some in (*checks, check_e4m3):
            check_some(Gpu(int(argument), has_all=len(arguments) < len(sys.argv) - 1))
