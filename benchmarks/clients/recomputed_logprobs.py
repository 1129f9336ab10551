"""How far are our log-probabilities from those that a trainer computes again, and what does batch-invariance cost?

    python benchmarks/clients/recomputed_logprobs.py --prompts 32

`LLM` draws completions of the embedded model, as one batch, with its defaults and with `batch_invariant`. Then
transformers computes each prompt and completion in one forward pass, in the same dtype and in float32. Prints the
largest and the mean difference of the tokens' log-probabilities, the tokens a second, and whether a request alone has
the bits that it has in the batch.
"""

import argparse
import random
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from crossdock import LLM, SamplingParams
from crossdock.workers.model.weights.checkpoint import default_model_dir


def drawn(llm: LLM, prompts: list[list[int]], length: int) -> tuple[list[Any], float]:
    """Return the outputs of all prompts, and tokens a second."""
    params = [SamplingParams(seed=i, max_tokens=length, logprobs=0, ignore_eos=True) for i in range(len(prompts))]
    began = time.perf_counter()
    found = llm.generate(prompts, params, use_tqdm=False)
    return found, len(prompts) * length / (time.perf_counter() - began)


def paces(llm: LLM) -> str:
    """Return tokens a second of 1 and of 8 streams, and the milliseconds of a prompt of 1,024: the best of three."""

    def seconds(count: int, size: int, length: int) -> float:
        times = []
        for turn in range(3):
            prompts = [[100 + turn, 200 + number, *range(300, 298 + size)] for number in range(count)]
            began = time.perf_counter()
            llm.generate(prompts, SamplingParams(max_tokens=length, ignore_eos=True), use_tqdm=False)
            times.append(time.perf_counter() - began)
        return min(times)

    one, eight = (64 * count / (seconds(count, 16, 65) - seconds(count, 16, 1)) for count in (1, 8))
    return f"1 stream {one:.1f}, 8 streams {eight:.1f} tokens/s, a prompt of 1,024 {1e3 * seconds(1, 1024, 1):.0f} ms"


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
    parser.add_argument("--dtype", default="bfloat16", help="of our model, and of the trainer")
    args = parser.parse_args()
    folder, draw = str(default_model_dir()), random.Random(5)
    prompts = [[draw.randint(100, 40_000) for _ in range(draw.randint(16, 160))] for _ in range(args.prompts)]
    trainers = {
        dtype: AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        for dtype in dict.fromkeys([args.dtype, "float32"])
    }
    for is_invariant in (True, False, True):  # twice, since the first is measured colder
        with LLM(folder, dtype=args.dtype, max_model_len=2048, batch_invariant=is_invariant) as llm:
            drawn(llm, prompts[:4], 4)  # warms up
            found, pace = drawn(llm, [[99, *prompt] for prompt in prompts], args.tokens)
            (alone,), _ = drawn(llm, [found[0].prompt_token_ids], args.tokens)
            print(f"batch_invariant {is_invariant}: {pace:.0f} tokens/s, products by {llm.engine.model.kernels}")
            print(f"  {paces(llm)}")
        print(f"  the first request has the same bits alone as in the batch: {ours(alone) == ours(found[0])}")
        for dtype, trainer in trainers.items():
            pairs = [(a, b) for one in found for a, b in zip(ours(one), recomputed(trainer, one), strict=True)]
            gaps = [abs(a - b) for a, b in pairs]
            print(f"  transformers {dtype}: largest difference {max(gaps):.4f}, mean {sum(gaps) / len(gaps):.5f}")


if __name__ == "__main__":
    main()
