"""Compile humming-kernels' products for GPUs that this machine lacks: NVRTC needs no device.

    pip install --no-deps humming-kernels cuda-bindings cuda-pathfinder \\
        nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-cccl nvidia-cuda-crt
    python benchmarks/gpu/compile_humming.py [--sm 80,89,90,120] [--rows 8]

A stand-in says what the library asks of a GPU. Nothing runs. Prints the bytes of each cubin: matrices of 4096 x 4096,
rows of bfloat16.
"""

import argparse
import contextlib
import os
import types
from pathlib import Path
from typing import Any

import torch

GPUS = {  # by sm: multiprocessors, KiB of shared memory, threads, GB/s, TFLOP/s in bfloat16; of published data sheets
    80: (108, 163, 2048, 2039, 312),
    89: (142, 99, 1536, 864, 362),
    90: (132, 227, 2048, 4800, 989),
    120: (170, 99, 1536, 1792, 209),
}
FORMS = {"W4A16": {"dtype": "uint4", "group_size": 128}, "MXFP4": {"dtype": "float4e2m1", "group_size": 32}}


def describe(sm: int) -> dict[str, Any]:
    count, shared, threads, bandwidth, rate = GPUS[sm]
    factors = {"float16": 1, "bfloat16": 1, "int8": 2, "int4": 4}
    factors |= {"float8e4m3": 2, "float8e5m2": 2} if sm > 80 else {}
    return {
        "index": 0,
        "name": f"sm_{sm}",
        "is_ppu": False,
        "sm_version": sm,
        "sm_major": sm // 10,
        "sm_minor": sm % 10,
        "sm_count": count,
        "sm_clock_khz": 1_500_000,
        "max_threads_per_block": 1024,
        "max_threads_per_sm": threads,
        "max_registers_per_sm": 65536,
        "max_smem_size": shared << 10,
        "max_smem_size_kb": shared,
        "l2_cache_size": 40 << 20,
        "memory_bandwidth_gbps": float(bandwidth),
        "tensorcore_tops": {name: float(rate * factor) for name, factor in factors.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sm", default="80,89,90,120", help="compute capabilities, with commas")
    parser.add_argument("--rows", type=int, default=8, help="for which the library chooses the kernel")
    arguments = parser.parse_args()
    os.environ["HUMMING_COMPILER"] = "nvrtc"
    faked: Any = torch
    zeros = torch.zeros
    faked.version.cuda = "13.0"
    faked.cuda.current_device = lambda: 0
    faked.cuda.device = lambda *_: contextlib.nullcontext()
    faked.zeros = lambda *sizes, **more: zeros(*sizes, **more | {"device": "cpu"})
    from humming import device, ops

    stand_in, one = types.SimpleNamespace(), object.__new__(device.DeviceInfo)
    one._index, one._value, device.current_device._value = 0, stand_in, stand_in
    device.DeviceInfo._instances[0] = one
    ops.register_kernel = lambda _: (0, "")
    from humming.kernel.humming import HummingKernel
    from humming.layer import HummingLayer
    from humming.transform import prepare_layer_config
    from humming.tune import get_heuristics_config

    for sm in map(int, arguments.sm.split(",")):
        vars(stand_in).update(describe(sm))
        for name, form in FORMS.items():
            weight = {"quant_method": "humming"} | form
            layer = HummingLayer(shape_n=4096, shape_k=4096, weight_config=weight, torch_dtype=torch.bfloat16)
            schemas = layer.weight_schema, layer.input_schema
            config = prepare_layer_config(4096, 4096, *schemas, torch_dtype=torch.bfloat16, device=0)
            tuned = get_heuristics_config(config, shape_m=arguments.rows, device=0)
            chosen, _, _ = HummingKernel._resolve_configs(config.to_str(), None, tuned, 0)
            chosen |= tuned | {"gemm_type": "dense"}
            chosen.pop("num_sms", None)
            file = Path(HummingKernel(**chosen).kernel_filename)
            print(f"sm_{sm} {name}: {file.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    main()
