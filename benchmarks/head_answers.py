"""Write conversations of the default model with itself, as token ids: what train_head.py trains a drafting head on.

    python benchmarks/head_answers.py answers.json --conversations 1500

The model writes the questions too: it goes on from the beginning of a user's turn, at temperature 1, by the seed. Its
answers are greedy. So there is no text of others, and no question of speculation_prompts.yaml.
"""

import argparse
import json
import time
from pathlib import Path

from crossdock import LLM, SamplingParams
from crossdock.workers.model.weights.checkpoint import default_model_dir

QUESTION_TOKENS = 48  # at most
SHORTEST_QUESTION = 12  # characters


def questions(llm: LLM, count: int, seed: int) -> list[str]:
    """Return what the model writes in a user's turn, without what is too short to be a question."""
    turns = [[{"role": "user", "content": text}] for text in ("Why", "How")]
    why, how = (each.prompt_token_ids for each in llm.chat(turns, SamplingParams(max_tokens=1), use_tqdm=False))
    beginning = list(why[: next(place for place, pair in enumerate(zip(why, how, strict=True)) if len(set(pair)) == 2)])
    params = [
        SamplingParams(temperature=1.0, top_p=0.95, max_tokens=QUESTION_TOKENS, seed=seed + number)
        for number in range(count)
    ]
    found = llm.generate([beginning] * count, params, use_tqdm=False)
    texts = [each.outputs[0].text.strip() for each in found]
    return sorted({text for text in texts if len(text) >= SHORTEST_QUESTION})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="JSON: a list of conversations, each with `prompt` and `answer`")
    parser.add_argument("--model", type=Path, help="Hugging Face directory (default: the embedded model)")
    parser.add_argument("--conversations", type=int, default=1500)
    parser.add_argument("--tokens", type=int, default=128, help="most tokens of an answer (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    began = time.perf_counter()
    with LLM(str(args.model or default_model_dir()), max_model_len=2048) as llm:
        asked = questions(llm, args.conversations, args.seed)
        print(f"{len(asked)} questions after {time.perf_counter() - began:.0f} s", flush=True)
        params = SamplingParams(temperature=0, max_tokens=args.tokens)
        answers = llm.chat([[{"role": "user", "content": text}] for text in asked], params, use_tqdm=False)
    rows = [{"prompt": list(each.prompt_token_ids), "answer": list(each.outputs[0].token_ids)} for each in answers]
    args.output.write_text(json.dumps(rows))
    num_tokens = sum(len(row["answer"]) for row in rows)
    print(f"{num_tokens} tokens of answers after {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
