#!/usr/bin/env bash
# Run a command as on a CPU with AVX2 alone: `avx2.sh COMMAND...`, such as `avx2.sh python benchmarks/peers/run.py ...`.
#
# Hides AVX-512 and AMX from all that chooses by them: this project's kernels are compiled without them, torch and oneDNN
# are told by their own variables, and vLLM, which asks torch what the CPU has, hears no. Files of the cache are not shared.
set -euo pipefail

hidden=$(mktemp -d)
trap 'rm -rf "$hidden"' EXIT
cat > "$hidden/c++" <<END
#!/usr/bin/env bash
exec ${CXX:-g++} "\${@/-march=native/-march=x86-64-v3}"
END
cat > "$hidden/sitecustomize.py" <<'END'
import torch

for asked in ("avx512", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_fp16"):
    setattr(torch.cpu, f"_is_{asked}_supported", lambda: False)
END
chmod +x "$hidden/c++"
export CXX=$hidden/c++ PYTHONPATH=$hidden${PYTHONPATH:+:$PYTHONPATH}
export ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 TORCHINDUCTOR_SIMDLEN=256 VLLM_DTYPE=float32
export CROSSDOCK_CACHE=${CROSSDOCK_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/crossdock-avx2}
"$@"
