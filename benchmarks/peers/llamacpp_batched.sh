#!/usr/bin/env bash
# llama.cpp's own batched benchmark over GGUF files: prefill and decode tokens a second with 1 and 8 sequences in a batch.
#
#   llamacpp_batched.sh FOLDER MODEL.gguf...
#
# FOLDER gets the libraries that npm's node-llama-cpp brings, compiled for each kind of CPU, and the benchmark, compiled
# from the source in that package and linked with them: a minute in all. bf16_gguf.py makes files of the same weights.
set -euo pipefail
version=3.22.1
folder=$(realpath -m "$1") cores=$(nproc)
shift
if [[ ! -x $folder/bin/batched-bench ]]; then
    mkdir -p "$folder/bin"
    (
        cd "$folder"
        npm pack --silent "@node-llama-cpp/linux-x64@$version" "node-llama-cpp@$version"
        tar xzf "node-llama-cpp-linux-x64-$version.tgz" -C bin --strip-components=3 package/bins/linux-x64
        tar xzf "node-llama-cpp-$version.tgz" package/llama/gitRelease.bundle
        git clone --quiet -c advice.detachedHead=false package/llama/gitRelease.bundle source
        cd source
        g++ -O2 -std=c++17 -Iinclude -Iggml/include -Icommon -Ivendor tools/batched-bench/{batched-bench,main}.cpp \
            -o ../bin/batched-bench -L../bin -l:libllama-common.so -l:libllama.v0.5.0.so -l:libggml.v0.5.0.so \
            -l:libggml-base.so -Wl,-rpath,'$ORIGIN'
    )
fi
cd "$folder/bin"  # the library for this CPU is looked up here
for model in "$@"; do
    echo "$model"
    common=(-m "$model" -t "$cores" -tb "$cores" -c 16384 -b 2048 -ub 512)
    ./batched-bench "${common[@]}" -npp 64 -ntg 32 -npl 1,8,1,8 2>/dev/null | grep '^|'
    ./batched-bench "${common[@]}" -npp 256,1024,256,1024 -ntg 1 -npl 1 2>/dev/null | grep '^|'
done
