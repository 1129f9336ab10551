"""How much would attention by requests give a model with latents, beside attention by heads and pipeline stages?

    python benchmarks/models/attention_by_requests.py       # seconds: all is computed from data sheets

Tensor ranks divide attention by heads, and each rank keeps the latents of all streams. Pipeline stages keep those of
their own layers. By requests, each rank would have its own streams, their latents, and all of attention's weights; the
ranks would go on to divide experts and all other layers.

Prints the tokens of KV cache of one replica. Then the streams that it has room for, the gap between two tokens of one,
and the output tokens per second where prompts take their turn beside full decodes, by the costs of `crossdock simulate`
(docs/simulate.md). Streams and prompts are taken to be divided evenly among ranks: this favours attention by requests.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tables import Row, add_output_options, table, write

from crossdock.workers.report.presets import GPUS, estimate
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.cost.cost import StepWork

_LATENTS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_FP8 = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    **_LATENTS,
    **_FP8,
}
MODELS: dict[str, dict[str, Any]] = {
    "DeepSeek-V2-Lite": {
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "n_shared_experts": 2,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "vocab_size": 102400,
        "max_position_embeddings": 163840,
        **_LATENTS,
    },
    "DeepSeek-V2 in FP8": {
        "model_type": "deepseek_v2",
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 60,
        "num_attention_heads": 128,
        "n_shared_experts": 2,
        "n_routed_experts": 160,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "q_lora_rank": 1536,
        "vocab_size": 102400,
        "max_position_embeddings": 163840,
        **_LATENTS,
        **_FP8,
    },
    "DeepSeek-V3": _V3,
    "DeepSeek-V3.2": _V3
    | {"model_type": "deepseek_v32", "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128},
}
"""The published sizes."""
REPLICAS = [
    ("DeepSeek-V2-Lite", "l40s", 2),
    ("DeepSeek-V2-Lite", "l40s", 4),
    ("DeepSeek-V2 in FP8", "h100", 4),
    ("DeepSeek-V3", "h200", 8),
    ("DeepSeek-V3.2", "h200", 8),
]
_BANDWIDTH_SHARE = 0.8  # of presets.py
_MOST_STREAMS = 2048
_CHUNK = 2048  # tokens


def attention_bytes(fields: Mapping[str, Any]) -> float:
    """Return the bytes of the weights of attention, and of indexers, that ranks divide by heads."""
    heads: int = fields["num_attention_heads"]
    wide = heads * (fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"])
    queries = wide * fields.get("q_lora_rank", fields["hidden_size"])
    others = heads * (fields["kv_lora_rank"] * (fields["qk_nope_head_dim"] + fields["v_head_dim"]))
    others += heads * fields["v_head_dim"] * fields["hidden_size"]
    return float(fields["num_hidden_layers"] * (queries + others) * (1 if "quantization_config" in fields else 2))


def divisions(fields: Mapping[str, Any], gpu: str, ranks: int, folder: Path) -> dict[str, SchedulingProfile]:
    """Return the profile of one replica of so many ranks, by the way in which these divide attention."""
    (folder / "config.json").write_text(json.dumps(fields))
    # One GPU with the memory of all has the costs of a step that passes through all stages, one after the other.
    GPUS["all"] = replace(GPUS[gpu], memory=ranks * GPUS[gpu].memory)
    heads = estimate(f"{gpu}-tp{ranks}", folder)
    stages = estimate("all-tp1", folder)
    one = stages.page_bytes  # of a page that one rank keeps alone
    copied = attention_bytes(fields) * (ranks - 1)
    bandwidth = GPUS[gpu].bandwidth * _BANDWIDTH_SHARE
    latents = stages.cost.per_decode - stages.cost.per_prefill_token  # read at any context; small, with sampling's
    cost = replace(
        heads.cost,
        base=heads.cost.base + copied / ranks / bandwidth,
        per_context=heads.cost.per_context / ranks,
        per_chunk_context=heads.cost.per_chunk_context / ranks,
        per_decode=heads.cost.per_prefill_token + max(latents, 0.0) / ranks,
        per_attended=stages.cost.per_attended / ranks,  # indexers' scores too are of a rank's own streams
    )
    pages = {
        "heads": heads.num_pages,
        "stages": stages.num_pages,
        "requests": int((stages.num_pages * one - copied) / one),
    }
    found = {
        "heads": heads,
        "stages": stages.model_copy(
            update={"pipeline_parallel_size": ranks, "interval_share": 1 / ranks, "runs_ahead": False}
        ),
        "requests": heads.model_copy(update={"cost": cost}),
    }
    return {
        name: profile.model_copy(
            update={
                "num_pages": pages[name],
                "max_num_seqs": _MOST_STREAMS,
                "max_model_len": min(profile.max_model_len, fields["max_position_embeddings"]),
            }
        )
        for name, profile in found.items()
    }


def served(profile: SchedulingProfile, prompt: int, output: int) -> Row:
    """Return the streams that a replica has room for, the gap between two tokens, and output tokens per second.

    Each request has so many tokens in and out. Every stage of a pipeline has its part of the streams.
    """
    streams = min(profile.num_pages * profile.page_size // (prompt + output), _MOST_STREAMS)
    cost = profile.cost
    in_step = streams / profile.pipeline_parallel_size
    gap_s = cost.seconds(StepWork(decodes=in_step, context=in_step * (prompt + output / 2)))
    prompt_s = cost.prefill_seconds(0, prompt, min(prompt, _CHUNK)) * profile.interval_share
    return {
        "streams": streams,
        "gap, ms": 1e3 * gap_s,
        "prompt alone, s": prompt_s / profile.interval_share,
        "tokens/s": output / (prompt_s + output * gap_s / streams),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--output-tokens", type=int, default=512)
    add_output_options(parser, "attention-by-requests")
    args = parser.parse_args()
    room = dict[str, Row]()
    rates = dict[str, Row]()
    with tempfile.TemporaryDirectory() as name:
        for model, gpu, ranks in REPLICAS:
            replica = f"{model}, {ranks} {gpu.upper()}"
            found = divisions(MODELS[model], gpu, ranks, Path(name))
            room[replica] = {way: each.num_pages * each.page_size / 1000 for way, each in found.items()}
            rates |= {
                f"{replica}: {way}": served(profile, args.prompt_tokens, args.output_tokens)
                for way, profile in found.items()
            }
    text = f"Thousands of tokens of KV cache, by what divides attention:\n\n{table(room, 'replica')}\n"
    text += f"{args.prompt_tokens:,} tokens in and {args.output_tokens:,} out:\n\n{table(rates, 'replica')}"
    write(args, text, {"room": room, "rates": rates})


if __name__ == "__main__":
    main()
