"""How much memory does a load take above the weights? Checkpoints of 1 GiB of random weights in several formats.

    python benchmarks/models/load_memory.py [--only w4a16,mxfp4] [--gib 1]        # about 20 s a format

Each checkpoint is written to a temporary folder and loaded by a process of its own, that has loaded a small one of the
same format before: libraries and kernels are in memory then. The load is a replica's, in the environment of its
process: weights read, layers replaced, kernels measured, logits compared. Prints MiB of private memory (RssAnon,
sampled each millisecond: no page cache).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from crossdock.cluster.serve.ray_environment import ENVIRONMENT
from crossdock.kernels.options import CpuKernels
from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.weights.formats import format_of
from crossdock.workers.model.weights.heap import trim_heap

MIB = 1 << 20
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8 blocks": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "w4a16": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"0": {"targets": ["Linear"], "weights": INT4}},
    },
    "gguf q8_0": {"quant_method": "gguf"},
    "mxfp4": {"quant_method": "mxfp4"},
    "w4a16 experts": {},
}
CONFIGS["w4a16 experts"] = CONFIGS["w4a16"]
SIZES = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 4096}
DENSE = SIZES | {"model_type": "llama", "intermediate_size": 8192, "tie_word_embeddings": True}
MOE = SIZES | {"model_type": "qwen3_moe", "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1024}
GPT_OSS = SIZES | {"model_type": "gpt_oss", "num_local_experts": 32, "intermediate_size": 2048, "rope_theta": 1e4}


def config_of(name: str, num_layers: int) -> Any:
    sizes = {"mxfp4": GPT_OSS, "w4a16 experts": MOE}.get(name, DENSE)
    more = {"layer_types": ["full_attention"] * num_layers} if name == "mxfp4" else {}
    return AutoConfig.for_model(**sizes, **more, num_hidden_layers=num_layers, dtype="bfloat16")


def codes(*shape: int) -> Tensor:
    return torch.randint(0, 112, shape, dtype=torch.uint8)  # no NaN of e4m3 among them


def packed(name: str, key: str, shape: torch.Size) -> dict[str, Tensor] | None:
    """Return the tensors of a matrix in a format; None: it stays plain."""
    module, rows, columns = key.removesuffix(".weight"), shape[-min(2, len(shape))], shape[-1]
    small = torch.full((1,), 2**-10)
    if name == "mxfp4" and key.endswith("_proj") and len(shape) == 3:  # [E, K, N]
        experts, columns, rows = shape
        scales = torch.full((experts, rows, columns // 32), 118, dtype=torch.uint8)
        return {f"{key}_blocks": codes(experts, rows, columns // 32, 16), f"{key}_scales": scales}
    if name in ("bf16", "mxfp4") or not key.endswith("_proj.weight"):
        return None
    if name == "fp8 blocks":
        grid = -(-rows // 128), -(-columns // 128)
        return {key: codes(*shape).view(torch.float8_e4m3fn), f"{key}_scale_inv": small.expand(grid).contiguous()}
    if name == "gguf q8_0":
        scales = small.half().expand(rows, columns // 32).contiguous()
        return {f"{module}.codes": codes(*shape).view(torch.int8), f"{module}.scales": scales}
    words = codes(rows, columns // 2).view(torch.int32)
    scales = small.bfloat16().expand(rows, columns // 128).contiguous()
    return {f"{key}_packed": words, f"{key}_scale": scales, f"{key}_shape": torch.tensor(shape)}


def tensors_of(name: str, config: Any) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    found: dict[str, Tensor] = {}
    for key, parameter in model.named_parameters():
        shapes = {key: parameter.shape}
        if name == "w4a16 experts" and ".experts." in key:  # [E, N, K], and files have each matrix by itself
            names = ("gate_proj", "up_proj") if "gate_up" in key else ("down_proj",)
            count, rows, columns = parameter.shape
            root = key.rpartition(".")[0]
            shape = torch.Size((rows // len(names), columns))
            shapes = {f"{root}.{i}.{each}.weight": shape for i in range(count) for each in names}
        for each, shape in shapes.items():
            more = packed(name, each, shape)
            found |= {each: torch.randn(shape).bfloat16() / 64} if more is None else more
    return found


def write(folder: Path, name: str, num_layers: int) -> int:
    """Write a checkpoint, in a file for each GiB. Returns its bytes."""
    config, folder = config_of(name, num_layers), folder / f"{num_layers}"
    tensors, described = tensors_of(name, config), CONFIGS[name]
    if name == "gguf q8_0":
        modules = [key.removesuffix(".codes") for key in tensors if key.endswith(".codes")]
        described = described | {"forms": [{"kind": "int8", "group": 32, "has_offsets": False, "modules": modules}]}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    quantisation = {"quantization_config": described} if described else {}
    (folder / "config.json").write_text(json.dumps(config.to_dict() | quantisation))
    return sum(each.nbytes for each in tensors.values())


def private() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) << 10


def measure(small: Path, large: Path, kernels: CpuKernels) -> list[int]:
    """Return bytes: counted for the weights, held at the end above the start, at most above the start."""
    load_model(ModelSpec(str(small), cpu_kernels=kernels))
    before, most, is_done = private(), 0, threading.Event()

    def sample() -> None:
        nonlocal most
        while not is_done.is_set():
            most = max(most, private())
            time.sleep(1e-3)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        model = load_model(ModelSpec(str(large), cpu_kernels=kernels))
    finally:
        is_done.set()
        sampler.join()
    trim_heap()
    counted = format_of(None).count_bytes(model.config, model.part.position, model.dtype).on("cpu")
    return [counted, private() - before, most - before]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of formats, with commas")
    parser.add_argument("--gib", type=float, default=1.0, help="of weights in the files")
    parser.add_argument("--cpu-kernels", default="auto", help="own: kernels are not measured")
    parser.add_argument("--measure", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(*arguments.measure, arguments.cpu_kernels)))
        return
    print(f"{'':14} {'file':>7} {'weights':>8} {'held':>7} {'peak':>7}  above the weights")
    for name in arguments.only.split(",") if arguments.only else CONFIGS:
        with tempfile.TemporaryDirectory() as folder:
            one = write(Path(folder), name, 1)
            count = max(2, round(arguments.gib * (1 << 30) / one))
            size = write(Path(folder), name, count)
            command = [sys.executable, __file__, "--measure", f"{folder}/1", f"{folder}/{count}"]
            command += ["--cpu-kernels", arguments.cpu_kernels]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | ENVIRONMENT)
        found = json.loads(done.stdout.splitlines()[-1])
        counted, held, peak = (each / MIB for each in found)
        print(
            f"{name:14} {size / MIB:7.0f} {counted:8.0f} {held:7.0f} {peak:7.0f}  {peak / counted - 1:.1%}", flush=True
        )


if __name__ == "__main__":
    main()
