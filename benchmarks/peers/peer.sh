# What the peers' scripts share: each defines `install` and `serve`, then sources this, which reads the arguments and
# calls one of them.
#
#   PEER.sh install [--venv DIR]
#   PEER.sh serve MODEL [--port PORT] [--budget TOKENS] [--venv DIR] [the server's own options...]
#
# They find what was given in $venv, $model, $port, $budget and the array $rest.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
peer=$(basename "$0" .sh)
venv=$here/../../.cache/peers/$peer model='' port=8000 budget=512 rest=()

new_venv() {
    "${PYTHON:-python3.11}" -m venv "$venv"
}

# Pinned and before all else, from an index whose default build is the CPU one: otherwise a CUDA build may come along.
install_torch() {
    "$venv/bin/pip" install --quiet torch==2.13.0
}

# vLLM's settings for a CPU, and its environment's programs.
vllm_environment() {
    local last=$(($(nproc) - 1)) omp
    export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-2}
    export VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-0-$last}
    export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
    # vLLM compiles with tools that it looks up by name.
    export PATH=$venv/bin:$PATH
    # Intel's OpenMP instead of GNU's is worth a few percent.
    omp=$(find "$venv/lib" -name libiomp5.so -print -quit)
    if [[ -n $omp ]]; then export LD_PRELOAD=$omp; fi
}

action=${1:-}
if [[ $action != install && $action != serve ]]; then
    echo "$peer.sh: ${action:-no action given}: install or serve" >&2
    exit 2
fi
shift
if [[ $action == serve ]]; then model=${1:?the model to serve}; shift; fi
while (($#)); do
    case $1 in
        --venv) venv=$(realpath -m "$2"); shift 2 ;; # absolute, since Ray's workers run elsewhere
        --port) port=$2; shift 2 ;;
        --budget) budget=$2; shift 2 ;;
        *) rest+=("$1"); shift ;;
    esac
done
"$action"
