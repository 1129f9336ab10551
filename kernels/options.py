"""Names of the attention backends, KV dtypes and CPU kernels for configurations. No torch."""

from typing import Literal, TypeAlias

AttentionBackend: TypeAlias = Literal["auto", "triton", "flash_attn_3", "torch"]
KVCacheDtype: TypeAlias = Literal["auto", "fp8"]
Kernel: TypeAlias = Literal["own", "int8", "onednn", "torch"]
CpuKernels: TypeAlias = Literal["auto", "own", "onednn", "torch"]
Quantization: TypeAlias = Literal["int8"]
