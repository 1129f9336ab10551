"""Serve Ray Serve LLM with one replica of vLLM's CPU engine, with the settings of vllm.sh. rayserve.sh starts this.

    python benchmarks/peers/rayserve.py MODEL_DIR PORT BUDGET PRELOAD

Runs in the peer's own environment. PRELOAD is the library for LD_PRELOAD in the replica alone: loaded here, Intel's
OpenMP would bind all processes that Ray forks from this one to one core.
"""

import sys
from pathlib import Path

import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app


def main(model: str, port: int, budget: int, preload: str) -> None:
    config = LLMConfig(
        runtime_env={"env_vars": {"LD_PRELOAD": preload}},
        model_loading_config={"model_id": Path(model).name, "model_source": model},
        accelerator_config={"kind": "cpu"},
        deployment_config={"num_replicas": 1},
        engine_kwargs={
            "dtype": "bfloat16",
            "max_model_len": 8192,
            "max_num_seqs": 32,
            "max_num_batched_tokens": budget,
            "enable_chunked_prefill": True,
            "enable_prefix_caching": True,
        },
    )
    # More CPUs than a small machine has: Ray counts one for each actor, the router's too.
    ray.init(num_cpus=8, include_dashboard=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build_openai_app({"llm_configs": [config]}), blocking=True)


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
