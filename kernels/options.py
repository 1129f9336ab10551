"""Names of attention backends, KV dtypes, CPU kernels and loaders of weights for configurations. No torch."""

from typing import Literal, TypeAlias, get_args

AttentionBackend: TypeAlias = Literal["auto", "triton", "flash_attn", "flash_attn_3", "flashinfer", "torch"]
KVCacheDtype: TypeAlias = Literal["auto", "fp8"]
LoadFormat: TypeAlias = Literal["auto", "safetensors", "runai_streamer", "fastsafetensors"]
Kernel: TypeAlias = Literal["native", "int8", "amx", "onednn", "torch"]
CpuKernels: TypeAlias = Literal["auto", "native", "int8", "onednn", "torch"]
Quantization: TypeAlias = Literal[
    "int8",
    "fp8",
    "fbgemm_fp8",
    "mxfp8",
    "mxfp4",
    "awq",
    "gptq",
    "compressed-tensors",
    "modelopt",
    "gguf",
    "bitsandbytes",
]
CHECKPOINT_METHODS: tuple[Quantization, ...] = get_args(Quantization)[1:]
"""How a checkpoint may be quantised, as its `quant_method` names it."""
ROUNDED_AT_LOAD: tuple[Quantization, ...] = ("int8", "fp8")
"""What plain weights may be rounded to as they are loaded."""
CodeKind: TypeAlias = Literal["int4", "int8", "e4m3", "e2m1", "nf4"]
"""The kinds of codes of packed weights."""
