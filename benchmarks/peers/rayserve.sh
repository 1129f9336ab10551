#!/usr/bin/env bash
# Ray Serve LLM over vLLM's CPU build in an environment of its own: install it, or serve a model with it. Options: peer.sh.
#
#   rayserve.sh install
#   rayserve.sh serve MODEL_DIR --port PORT
#
# --budget is vLLM's max_num_batched_tokens. The application is rayserve.py.
set -euo pipefail

install() {
    "$here/vllm.sh" install --venv "$venv"
    # Not ray[llm]: that names vllm itself, and pip would bring the CUDA build beside the one above. What else it names
    # and vLLM does not bring is listed by hand.
    "$venv/bin/pip" install --quiet "ray[serve]==2.60.0" jsonref pyarrow pandas
}

serve() {
    vllm_environment
    # Ray runs its workers at nice 15.
    export RAY_worker_niceness=0 RAY_USAGE_STATS_ENABLED=0
    local preload=${LD_PRELOAD:-}
    unset LD_PRELOAD
    exec python "$here/rayserve.py" "$model" "$port" "$budget" "$preload"
}

source "$(dirname "${BASH_SOURCE[0]}")/peer.sh"
