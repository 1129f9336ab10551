"""The sizes of everything that is measured: of known models on a GPU, and tiny ones for a dry run."""

from dataclasses import dataclass
from typing import Any, TypeAlias

Lengths: TypeAlias = list[tuple[int, int]]
"""(query_len, kv_len) of each sequence of a batch, decodes first."""

_DENSE = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072}
_MODELS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        "model_type": "llama",
        **_DENSE,
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
    },
    "Qwen3-8B": {
        "model_type": "qwen3",
        **_DENSE,
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        **_DENSE,
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        # Random experts are near ties, among which bfloat16 chooses differently: a check of the logits would fail.
        "initializer_range": 0.002,
    },
}
_TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
_GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
}
_SERVED: dict[str, Any] = {
    "model_type": "llama",
    **_DENSE,
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
}
_LATENT: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 32768,
    "initializer_range": 0.002,  # as of Qwen3-30B-A3B
}
_TINY_LATENT = {
    "num_key_value_heads": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
}
_TINY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True, slots=True)
class Sizes:
    """One set of sizes. Lengths are tokens."""

    is_dry: bool
    models: dict[str, dict[str, Any]]  # the first is measured most
    coded: dict[str, dict[str, Any]]  # models whose experts are four-bit codes
    served: dict[str, dict[str, Any]]  # one model, which servers load
    latent: dict[str, dict[str, Any]]  # models whose pages hold latents
    dtype: str
    heads: int  # of attention measured alone, as in the first model
    kv_heads: int
    head_dim: int
    num_layers: int
    page_size: int
    cache_bytes: int  # at least the device's cache: attention reads several times as much
    pool_bytes: int  # the most that attention measured alone may take
    ceiling: tuple[int, int]  # elements copied, and rows of a square product
    checked: dict[str, Lengths]
    decodes: list[tuple[int, int]]  # streams, context
    prefills: dict[str, Lengths]
    products: tuple[int, ...]  # rows of products with the weights of the first model's layer
    stored: int  # tokens whose keys and values are stored at once
    tiled: dict[str, Lengths]
    chunk_tiles: list[tuple[int, int, int, int]]  # rows, tokens of context, warps, stages; first an H200's
    decode_tiles: list[tuple[int, int, int, int]]
    steps: dict[str, Lengths]
    step_pages: int  # of the pool of whole steps
    engine: dict[str, Any]  # settings
    prompt: int  # computed in one step, and in chunks
    chunk: int
    deep: list[tuple[int, int]]  # (start, tokens) of chunks beside streams
    streams: int  # beside chunks
    stream_context: int
    gap_prompt: int  # tokens of the prompts that arrive while streams run
    gap_seconds: float
    shape_len: int  # max_model_len of the other models: the pool must hold one such request beside 57 GiB of weights
    batch: tuple[int, int, int]  # prompts in flight at once, their tokens, and the tokens that each gets
    page_transfer: tuple[int, int]  # bytes of a page, and pages
    drafted: tuple[int, ...]  # streams with drafts
    adapters: tuple[int, int]  # adapters, and streams of each
    evicted: int  # pages that go to the host's memory at once


REAL = Sizes(
    is_dry=False,
    models=_MODELS,
    coded={"gpt-oss-20b": _GPT_OSS},
    served={"Llama-1B": _SERVED},
    latent={"DeepSeek-V2-Lite": _LATENT},
    dtype="bfloat16",
    heads=32,
    kv_heads=8,
    head_dim=128,
    num_layers=32,
    page_size=16,
    cache_bytes=64 << 20,
    pool_bytes=24 << 30,
    ceiling=(1 << 31, 8192),
    checked={
        "decodes": [(1, 1024), (1, 1), (1, 8192), (1, 77)] * 4,
        "one long decode": [(1, 40_000)],
        "chunk and decodes": [*[(1, 1000)] * 20, (512, 4096), (300, 300)],
        "prefill": [(2048, 2048)],
    },
    decodes=[(size, context) for size in (1, 64, 256) for context in (1024, 8192)],
    prefills={
        "prefill 2048": [(2048, 2048)],
        "prefill 8192": [(8192, 8192)],
        "chunk 2048 at 8192": [(2048, 8192)],
        "chunk 512 at 8192 + 64 decodes": [*[(1, 1024)] * 64, (512, 8192)],
        **{f"chunk {tokens} at {depth}": [(tokens, depth)] for depth in (32_768, 122_880) for tokens in (64, 512)},
    },
    products=(1, 64, 256, 8192),
    stored=8192,
    tiled={
        "prefill 8192": [(8192, 8192)],
        "chunk 512 at 32768": [(512, 32_768)],
        "decode 64 x 1024": [(1, 1024)] * 64,
        "decode 1 x 8192": [(1, 8192)],
    },
    chunk_tiles=[
        *((256, 64, 16, 3), (128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 8, 4), (128, 64, 4, 3), (128, 128, 8, 3)),
        *((128, 128, 8, 2), (64, 64, 4, 3), (64, 128, 4, 3), (256, 64, 8, 3)),
    ],
    decode_tiles=[
        *((16, 64, 4, 4), (16, 64, 4, 5), (16, 64, 2, 5), (16, 128, 4, 4), (16, 128, 8, 4), (16, 32, 4, 6)),
        *((16, 32, 2, 6), (16, 64, 8, 5)),
    ],
    steps={
        "decode 1 x 1024": [(1, 1024)],
        "decode 64 x 1024": [(1, 1024)] * 64,
        "decode 256 x 1024": [(1, 1024)] * 256,
        "decode 32 x 8192": [(1, 8192)] * 32,
        "chunk 2048": [(2048, 2048)],
        "chunk 512 + 64 decodes": [*[(1, 1024)] * 64, (512, 4096)],
    },
    step_pages=20_000,
    engine={"max_num_batched_tokens": 8192, "max_num_seqs": 256, "admission": "queue"},
    prompt=8192,
    chunk=2048,
    deep=[(depth, tokens) for depth in (8192, 32_768, 122_880) for tokens in (64, 512)],
    streams=64,
    stream_context=1024,
    gap_prompt=32_768,
    gap_seconds=10.0,
    shape_len=16_384,
    batch=(64, 1024, 256),
    page_transfer=(2 << 20, 512),
    drafted=(1, 7, 8, 32),
    adapters=(8, 8),
    evicted=512,
)

DRY = Sizes(
    is_dry=True,
    models={
        "Llama-3.1-8B": {"model_type": "llama", **_TINY},
        "Qwen3-30B-A3B": {"model_type": "qwen3_moe", **_TINY, **_TINY_EXPERTS},
    },
    coded={"gpt-oss-20b": {"model_type": "gpt_oss", **_TINY, "num_local_experts": 4, "num_experts_per_tok": 2}},
    served={"Llama-1B": {"model_type": "llama", **_TINY, "vocab_size": 257}},
    latent={"DeepSeek-V2-Lite": {"model_type": "deepseek_v2", **_TINY, **_TINY_LATENT}},
    dtype="float32",  # Triton's interpreter multiplies bfloat16 by its bits
    heads=4,
    kv_heads=2,
    head_dim=16,
    num_layers=2,
    page_size=16,
    cache_bytes=1 << 10,
    pool_bytes=1 << 20,
    ceiling=(1 << 12, 64),
    checked={"decodes": [(1, 20), (1, 1)], "chunk and decodes": [(1, 9), (12, 20)]},
    decodes=[(2, 20)],
    prefills={"prefill 8": [(8, 8)], "chunk 4 + 2 decodes": [(1, 9), (1, 9), (4, 20)]},
    products=(2,),
    stored=8,
    tiled={"chunk 4": [(4, 20)], "decode 1 x 20": [(1, 20)]},
    chunk_tiles=[(32, 32, 4, 2)],
    decode_tiles=[(16, 32, 4, 2)],
    steps={"decode 2 x 20": [(1, 20)] * 2, "chunk 4 + 2 decodes": [(1, 9), (1, 9), (4, 20)]},
    step_pages=32,
    engine={
        "max_num_batched_tokens": 32,
        "max_num_seqs": 2,
        "admission": "queue",
        "kv_cache_memory": 1 << 18,
        "chunk_policy": "fixed",  # streams in the interpreter are always late, and adaptive chunks would wait for them
    },
    prompt=8,  # few: the interpreter takes 0.1 s a row
    chunk=4,
    deep=[(20, 4)],
    streams=1,
    stream_context=4,
    gap_prompt=40,
    gap_seconds=0.5,
    shape_len=128,
    batch=(2, 8, 2),
    page_transfer=(4 << 10, 8),
    drafted=(2,),
    adapters=(1, 2),
    evicted=2,
)
