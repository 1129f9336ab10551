"""Names of the attention backends and KV dtypes for configurations. No torch."""

from typing import Literal, TypeAlias

AttentionBackend: TypeAlias = Literal["auto", "triton", "flash_attn", "torch"]
KVCacheDtype: TypeAlias = Literal["auto", "fp8"]
