"""Print vLLM's output tokens per second as JSON, for others.py. Reads the folder of a configuration, prompts and the
number of new tokens as JSON from its input."""

import json
import sys
import time

from vllm import LLM, SamplingParams

if __name__ == "__main__":  # vLLM starts processes that import this file
    order = json.load(sys.stdin)
    engine = LLM(
        model=order["model"],
        load_format="dummy",  # random weights
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enable_prefix_caching=False,
    )
    params = SamplingParams(max_tokens=order["new_tokens"], temperature=0.0, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in order["prompts"]]
    engine.generate(prompts[:2], params, use_tqdm=False)
    started = time.perf_counter()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    made = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(json.dumps({"tokens_per_s": made / seconds, "tokens": made}))
