"""How long do questions about one text take: as one request for decisions, and as chats of one token each?

    crossdock serve --port 8000
    python benchmarks/peers/decisions.py http://127.0.0.1:8000 --decisions
    benchmarks/peers/vllm.sh serve MODEL_DIR --venv VENV --port 8001
    python benchmarks/peers/decisions.py http://127.0.0.1:8001

Each round sends a text that no round before had, and so many questions about it. As chats, all questions are sent at
once, each behind the text, for one token with the log-probabilities of 20: what a client does where a server has no
`/v1/decisions`. Prints the median of the seconds until all answers are there, and the 90th percentile.
"""

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx
from tables import hardware, markdown, today

WORDS = ["order", "paid", "twice", "screen", "login", "late", "driver", "refund", "blue", "box", "called", "again"]
QUESTIONS = ["wants money back", "is angry", "cannot log in", "asks about delivery", "names a colour", "called before"]


def text(number: int, words: int) -> str:
    """Return a text of so many words that begins differently for each number."""
    draw = random.Random(number)
    return " ".join([str(number), *draw.choices(WORDS, k=words - 1)])


async def decisions(client: httpx.AsyncClient, about: str, questions: list[str]) -> None:
    """Ask all questions in one request."""
    asked = [{"type": "predicate", "instructions": each} for each in questions]
    answer = await client.post("/v1/decisions", json={"input": about, "questions": asked})
    answer.raise_for_status()


async def chats(client: httpx.AsyncClient, model: str, about: str, questions: list[str]) -> None:
    """Ask each question in a request of its own."""

    async def ask(question: str) -> None:
        content = f"{about}\n\nAnswer true or false. {question}"
        body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 1}
        options = {"logprobs": True, "top_logprobs": 20, "temperature": 0}
        (await client.post("/v1/chat/completions", json=body | options)).raise_for_status()

    await asyncio.gather(*map(ask, questions))


async def measure(args: argparse.Namespace, num_questions: int, as_decisions: bool) -> list[str]:
    """Return a row of the table."""
    questions = [f"The customer {each} ({number})." for number, each in enumerate(QUESTIONS * 100)][:num_questions]
    took = []
    limits = httpx.Limits(max_connections=num_questions)
    async with httpx.AsyncClient(base_url=args.url, timeout=300.0, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        for number in range(args.rounds + 2):
            about = text(1000 * num_questions + 500 * as_decisions + number, args.words)
            began = time.perf_counter()
            if as_decisions:
                await decisions(client, about, questions)
            else:
                await chats(client, model, about, questions)
            took.append(time.perf_counter() - began)
    took = took[2:]  # the first two warm up
    way = "/v1/decisions" if as_decisions else "chats"
    return [way, f"{num_questions}", f"{median(took):.3f}", f"{quantiles(took, n=10)[-1]:.3f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--decisions", action="store_true", help="the server has /v1/decisions")
    parser.add_argument("--questions", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--words", type=int, default=600, help="of the text")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    ways = (True, False) if args.decisions else (False,)
    rows = [asyncio.run(measure(args, count, way)) for count in args.questions for way in ways]
    print(f"{args.url}, a text of {args.words} words, {args.rounds} rounds; {hardware()}; {today()}.\n")
    print(markdown([["sent as", "questions", "p50 s", "p90 s"], *rows]))


if __name__ == "__main__":
    main()
