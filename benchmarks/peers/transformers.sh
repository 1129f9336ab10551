#!/usr/bin/env bash
# Hugging Face transformers' own server with continuous batching, in an environment of its own.
#
#   transformers.sh install [--venv DIR]
#   transformers.sh serve MODEL_DIR --port PORT [--budget TOKENS] [--venv DIR] [transformers options...]
#
# --budget is --cb-max-batch-tokens.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$here/../../.cache/peers/transformers
model='' port=8000 budget=512 rest=()

action=${1:?install or serve}
shift
if [[ $action == serve ]]; then model=${1:?model directory}; shift; fi
while (($#)); do
    case $1 in
        --venv) venv=$2; shift 2 ;;
        --port) port=$2; shift 2 ;;
        --budget) budget=$2; shift 2 ;;
        *) rest+=("$1"); shift ;;
    esac
done

case $action in
    install)
        "${PYTHON:-python3.11}" -m venv "$venv"
        # torch first and pinned, from an index whose default build is the CPU one: else a CUDA build may come along.
        "$venv/bin/pip" install --quiet torch==2.13.0
        "$venv/bin/pip" install --quiet "transformers[serving]==5.23.0" accelerate
        ;;
    serve)
        export HF_HUB_OFFLINE=1
        exec "$venv/bin/transformers" serve "$model" --host 127.0.0.1 --port "$port" --device cpu --dtype bfloat16 \
            --continuous-batching --attn-implementation sdpa --cb-max-batch-tokens "$budget" "${rest[@]}"
        ;;
    *) echo "transformers.sh: unknown action $action: install or serve" >&2; exit 2 ;;
esac
