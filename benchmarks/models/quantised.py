"""How much do quantised weights cost and save? The embedded SmolLM2-135M in each format, on this CPU.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/models/quantised.py

The weights are rounded to the nearest code by compressed-tensors and gguf, without calibration: AWQ and GPTQ would
store the codes of w4a16, or with calibration better ones. Rows of packed weights are bfloat16 where the CPU has such
products, else float32. Prints bytes, the perplexity of
each model on this repository's documentation, how far its logits are from those of float32, and milliseconds of whole
forward passes. The passes of the models alternate, so that other load affects all alike.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

from crossdock.kernels.attention import AttentionBatch
from crossdock.kernels.cpu.linear import why_not_int8
from crossdock.kernels.packed import TABLES
from crossdock.workers.model.load import load_model
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.weights.checkpoint import default_model_dir
from crossdock.workers.model.weights.gguf_blocks import BLOCK_TYPES
from crossdock.workers.replica.serving.machine import held_bytes

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the tests' formats

from tests.workers.quantised import CASES, Tensors, save

DOCS = Path(__file__).parents[2] / "docs"
TEXTS = ("operations.md", "serving.md", "models.md", "routing.md")
COMPRESSED = ("w8a16", "fp8", "w4a16", "w4a16 zeros", "nvfp4", "mxfp4")  # 576 columns of SmolLM2 are whole groups
WINDOW, PAGE_SIZE, CONTEXT = 1024, 16, 64  # tokens


def step(sequences: int, query_len: int, kv_len: int) -> AttentionBatch:
    """Return a batch of equal sequences, each in pages of its own."""
    pages = torch.arange(sequences * -(-kv_len // PAGE_SIZE), dtype=torch.int32).view(sequences, -1)
    positions = torch.arange(kv_len - query_len, kv_len)
    slots = pages[:, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
    starts = torch.arange(sequences + 1, dtype=torch.int32) * query_len
    lengths = torch.full((sequences,), kv_len, dtype=torch.int32)
    decodes = sequences if query_len == 1 else 0
    return AttentionBatch(starts, lengths, pages, slots.flatten(), query_len, kv_len, decodes)


def logits_of(model: LoadedModel, windows: list[Tensor]) -> Tensor:
    """Return the logits [windows * WINDOW, vocab] of independent windows."""
    every = torch.arange(WINDOW)
    return torch.cat([model.forward(ids, every, step(1, WINDOW, WINDOW), every).float() for ids in windows])


def quality(models: dict[str, LoadedModel], num_windows: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(default_model_dir())
    text = "\n".join((DOCS / name).read_text() for name in TEXTS)
    windows = list(torch.tensor(tokenizer(text)["input_ids"]).split(WINDOW))[:num_windows]
    assert all(len(window) == WINDOW for window in windows), "the text is too short for so many windows"
    followed = torch.ones(num_windows * WINDOW, dtype=torch.bool)
    followed[WINDOW - 1 :: WINDOW] = False  # the last token of a window predicts none
    targets = torch.cat(windows).roll(-1)[followed]
    print(f"\n{len(targets)} tokens of {', '.join(TEXTS)}, windows of {WINDOW}")
    print(f"{'':11} {'perplexity':>10} {'error of logits':>16} {'same argmax':>12} {'KL, nats':>9}")
    exact: Tensor | None = None
    for name, model in models.items():
        logits = logits_of(model, windows)
        exact = logits if exact is None else exact
        perplexity = F.cross_entropy(logits[followed], targets).exp()
        error = (logits - exact).norm() / exact.norm()
        same = (logits.argmax(-1) == exact.argmax(-1)).float().mean()
        divergence = F.kl_div(logits.log_softmax(-1), exact.log_softmax(-1), reduction="batchmean", log_target=True)
        print(f"{name:11} {perplexity:10.3f} {error:16.4f} {same:12.4f} {divergence:9.5f}")


def speed(models: dict[str, LoadedModel], repeats: int) -> None:
    print(f"\nforward passes, ms, least of {repeats}: decodes after {CONTEXT} tokens, or one chunk of a prompt")
    print(f"{'':14} " + " ".join(f"{name:>9}" for name in models))
    decodes, chunks = (1, 2, 4, 8, 16, 32, 64), (64, 256, 1024)
    passes = [(f"{n} decodes", step(n, 1, CONTEXT + 1)) for n in decodes]
    passes += [(f"chunk of {n}", step(1, n, n)) for n in chunks]
    for name, batch in passes:
        rows = len(batch.slots)
        ids = torch.arange(rows) % 1000
        positions = torch.full((rows,), CONTEXT) if batch.max_query_len == 1 else torch.arange(rows)
        wanted = batch.query_start[1:].long() - 1
        least = dict.fromkeys(models, float("inf"))
        for _ in range(repeats + 1):
            for each, model in models.items():
                start = time.perf_counter()
                model.forward(ids, positions, batch, wanted)
                least[each] = min(least[each], time.perf_counter() - start)
        print(f"{name:14} " + " ".join(f"{1e3 * seconds:9.2f}" for seconds in least.values()))


def repack(source: Path, target: Path, pack: Callable[[Tensor], Tensors], config: dict[str, Any]) -> Path:
    """Write a checkpoint whose projections are packed: `pack` returns the tensors of a matrix by the ends of names."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        made = pack(tensors.pop(name).float())
        tensors |= {f"{name.removesuffix('.weight')}{end}": each for end, each in made.items()}
    save(target, tensors, config)
    return target


def compressed(config: dict[str, Any], weight: Tensor) -> Tensors:
    """Return a matrix in a layout of compressed-tensors."""
    layout, arguments = config["format"], QuantizationArgs(**config["config_groups"]["group_0"]["weights"])
    library: Any = BaseCompressor.get_value_from_registry(layout)
    groups = weight.view(len(weight), -1, arguments.group_size or weight.shape[1])
    whole = generate_gparam(weight.amin(), weight.amax()) if layout.startswith("nvfp4") else None
    scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments, whole)
    given = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}
    given |= {} if whole is None else {"weight_global_scale": whole}
    found = library.compress(given, QuantizationScheme(targets=["Linear"], weights=arguments))
    return {f".{name}": each for name, each in found.items()}


def fp8(height: int | None, width: int | None, weight: Tensor) -> Tensors:
    """Return a matrix in e4m3, with a scale for each block; None: for all rows, or columns."""
    height, width = height or weight.shape[0], width or weight.shape[1]
    largest = F.max_pool2d(weight.abs()[None], (height, width), ceil_mode=True)[0]
    scales = (largest / torch.finfo(torch.float8_e4m3fn).max).clamp_min(1e-12)
    spread = scales.repeat_interleave(height, 0).repeat_interleave(width, 1)[: len(weight), : weight.shape[1]]
    return {".weight": (weight / spread).to(torch.float8_e4m3fn), ".weight_scale_inv": scales}


def gguf(kind: str, weight: Tensor) -> Tensors:
    """Return a matrix in the blocks of a GGUF file, as a replica keeps them."""
    block = BLOCK_TYPES[kind]
    blocks = quantize(weight.numpy(), GGMLQuantizationType[kind])
    found = block.unpack(blocks.reshape(len(weight), weight.shape[1] // block.block, -1))
    codes = found.codes[:, ::2] | found.codes[:, 1::2] << 4 if block.kind == "int4" else found.codes
    return {".codes": torch.tensor(codes), ".scales": torch.tensor(found.scales)}


def nf4(weight: Tensor) -> Tensors:
    """Return a matrix as bitsandbytes has it in 4 bits, with plain scales."""
    groups, levels = weight.view(-1, 64), torch.tensor(TABLES["nf4"])
    scales = groups.abs().amax(-1)
    codes = torch.bucketize(groups / scales[:, None], (levels[1:] + levels[:-1]) / 2).flatten().byte()
    state = json.dumps({"quant_type": "nf4", "blocksize": 64, "shape": list(weight.shape)}).encode()
    packed = {".weight": (codes[::2] << 4 | codes[1::2])[:, None], ".weight.absmax": scales}
    return packed | {".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state), dtype=torch.uint8)}


def formats(modules: Sequence[str]) -> dict[str, tuple[Callable[[Tensor], Tensors], dict[str, Any]]]:
    """Return by name how a matrix is packed, and the `quantization_config` that says so. `modules`: those packed."""
    found: dict[str, tuple[Callable[[Tensor], Tensors], dict[str, Any]]] = {}
    for name in COMPRESSED:
        config = CASES[f"compressed-tensors {name}"].config
        found[name] = partial(compressed, config), config
    found["fp8 tensor"] = partial(fp8, None, None), {"quant_method": "fp8"}
    found["fp8 blocks"] = partial(fp8, 128, 128), {"quant_method": "fp8", "weight_block_size": (128, 128)}
    found["nf4"] = nf4, CASES["bitsandbytes nf4"].config
    for kind in ("Q4_0", "Q8_0"):  # K-quants need rows of whole 256 columns, and gguf does not write them
        block = BLOCK_TYPES[kind]
        form = {"kind": block.kind, "group": block.group, "has_offsets": False, "modules": modules}
        found[kind.lower()] = partial(gguf, kind), {"quant_method": "gguf", "forms": [form]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=10, help="of each pass; 0: measure no seconds")
    parser.add_argument("--only", help="names of formats, with commas; float32 should be among them")
    parser.add_argument("--cpu-kernels", default="auto", help="of packed weights")
    arguments = parser.parse_args()
    path = default_model_dir()
    specs = {
        "float32": ModelSpec(str(path), "float32"),
        "bfloat16": ModelSpec(str(path), "bfloat16"),
        **({} if why_not_int8(torch.float32) else {"int8": ModelSpec(str(path), quantization="int8")}),
    }
    with tempfile.TemporaryDirectory() as folder:
        names = [name for name in load_file(path / "model.safetensors") if name.endswith("proj.weight")]
        makers = formats([name.removesuffix(".weight") for name in names])
        chosen = arguments.only.split(",") if arguments.only else [*specs, *makers]
        for name, make in makers.items():
            if name in chosen:
                packed = repack(path, Path(folder) / name, *make)
                specs[name] = ModelSpec(str(packed), cpu_kernels=arguments.cpu_kernels)
        models = {name: load_model(spec) for name, spec in specs.items() if name in chosen}
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name, model in models.items():
        model.allocate_pool(max(WINDOW // PAGE_SIZE, 64 * (CONTEXT // PAGE_SIZE + 1)), PAGE_SIZE)
        print(f"{name}: {held_bytes(model.module) / 1e6:.1f} MB of weights, kernels {model.kernels}")
    with torch.inference_mode():
        quality(models, arguments.windows)
        if arguments.repeats:
            speed(models, arguments.repeats)


if __name__ == "__main__":
    main()
