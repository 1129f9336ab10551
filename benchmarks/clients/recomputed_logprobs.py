"""How far are our log-probabilities from those that a trainer computes again, and what does batch-invariance cost?

    python benchmarks/clients/recomputed_logprobs.py --prompts 32

`LLM` draws completions of the embedded model, as one batch, with its defaults and with `batch_invariant`. Then
transformers computes each prompt and completion in one forward pass, in the same dtype and in float32. Prints the
largest and the mean difference of the tokens' log-probabilities, whether a request alone has the bits that it has in
the batch, and the seconds of both modes in turn, also of a long prompt.
"""

import argparse
import random
import time
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from crossdock import LLM, SamplingParams
from crossdock.workers.model.weights.checkpoint import default_model_dir


def drawn(llm: LLM, prompts: list[list[int]], length: int) -> list[Any]:
    """Return the outputs of all prompts."""
    params = [SamplingParams(seed=i, max_tokens=length, logprobs=0, ignore_eos=True) for i in range(len(prompts))]
    return llm.generate(prompts, params, use_tqdm=False)


def seconds(llm: LLM, turn: int, streams: int, prompt: int, tokens: int) -> float:
    """Return the seconds of so many streams with prompts of `prompt` tokens. `turn`: prompts of no other turn."""
    prompts = [[100 + turn, 200 + number, *range(300, 298 + prompt)] for number in range(streams)]
    began = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True), use_tqdm=False)
    return time.perf_counter() - began


def ours(one: Any) -> list[float]:
    output = one.outputs[0]
    return [entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True)]


@torch.inference_mode()
def recomputed(model: Any, one: Any) -> list[float]:
    """Return the log-probabilities of an output by one forward pass over prompt and output, as a trainer has them."""
    output = one.outputs[0].token_ids
    ids = torch.tensor([[*one.prompt_token_ids, *output]])
    logprobs = model(ids).logits[0, -len(output) - 1 : -1].float().log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(output)[:, None])[:, 0].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48, help="of each completion")
    parser.add_argument("--turns", type=int, default=5, help="of each mode, whose paces are compared")
    parser.add_argument("--long-prompt", type=int, default=4096, help="tokens of a prompt that both compute")
    parser.add_argument("--dtype", default="bfloat16", help="of both; float32 without AVX512-BF16")
    args = parser.parse_args()
    folder, draw = str(default_model_dir()), random.Random(5)
    prompts = [[draw.randint(100, 40_000) for _ in range(draw.randint(16, 160))] for _ in range(args.prompts)]
    trainers = {
        dtype: AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        for dtype in dict.fromkeys([args.dtype, "float32"])
    }
    size = {"dtype": args.dtype, "max_model_len": args.long_prompt + 64, "kv_cache_memory": "512MiB"}
    with LLM(folder, batch_invariant=True, **size) as exact, LLM(folder, **size) as plain:
        for name, llm in {"batch_invariant": exact, "default": plain}.items():
            found = drawn(llm, [[99, *prompt] for prompt in prompts], args.tokens)
            (alone,) = drawn(llm, [found[0].prompt_token_ids], args.tokens)
            print(f"{name}: products by {llm.engine.model.kernels or 'torch'}")
            print(f"  the first request has the same bits alone as in the batch: {ours(alone) == ours(found[0])}")
            for dtype, trainer in trainers.items():
                pairs = [(a, b) for one in found for a, b in zip(ours(one), recomputed(trainer, one), strict=True)]
                gaps = [abs(a - b) for a, b in pairs]
                print(f"  transformers {dtype}: largest difference {max(gaps):.4f}, mean {sum(gaps) / len(gaps):.5f}")
        for shape in ((1, 16, 16), (8, 16, 16), (1, args.long_prompt, 1)):
            both = [(seconds(exact, turn, *shape), seconds(plain, turn, *shape)) for turn in range(args.turns)]
            ratio, (one, other) = median(b / a for a, b in both), (median(each) for each in zip(*both, strict=True))
            streams, prompt, tokens = shape
            print(f"{streams} streams of {prompt} tokens and {tokens} more, seconds in turn, so that both meet other")
            print(
                f"  work: batch_invariant {one:.2f}, default {other:.2f}; the mode is {ratio:.2f} times as fast",
                flush=True,
            )


if __name__ == "__main__":
    main()
