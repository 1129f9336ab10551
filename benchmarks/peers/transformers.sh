#!/usr/bin/env bash
# Hugging Face transformers' own server with continuous batching, in an environment of its own. Options: peer.sh.
#
#   transformers.sh install
#   transformers.sh serve MODEL_DIR --port PORT [transformers options...]
#
# --budget is --cb-max-batch-tokens.
set -euo pipefail

install() {
    new_venv
    install_torch
    "$venv/bin/pip" install --quiet "transformers[serving]==5.23.0" accelerate
}

serve() {
    export HF_HUB_OFFLINE=1 HF_HUB_CACHE=$venv/hub
    mkdir -p "$HF_HUB_CACHE" # its list of models is what lies there, and an error where there is no such directory
    exec "$venv/bin/transformers" serve "$model" --host 127.0.0.1 --port "$port" --device cpu --dtype bfloat16 \
        --continuous-batching --attn-implementation sdpa --cb-max-batch-tokens "$budget" "${rest[@]}"
}

source "$(dirname "${BASH_SOURCE[0]}")/peer.sh"
