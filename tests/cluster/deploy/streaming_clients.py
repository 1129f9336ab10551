"""Four clients that stream one prompt after the other, slowly, until their standard input is closed.

    python streaming_clients.py KEY URL…      # each client asks one of the URLs

Prints JSON at the end: streams that ended with the tokens that the first answer to their prompt had, and problems.
"""

import json
import sys
import threading
import time

import httpx

PROMPTS = [[3 + (number * 7 + place * place) % 100 for place in range(20 + 12 * number)] for number in range(4)]


def stream(url: str, key: str, number: int, pause: float) -> list[int]:
    """Return the tokens of an answer. `pause`: seconds after each token.

    Raises:
        RuntimeError: the answer is an error, or has one in its stream.
    """
    body = {"model": "small", "prompt": PROMPTS[number], "max_tokens": 100, "ignore_eos": True, "stream": True}
    body |= {"seed": number, "temperature": 0.8, "return_token_ids": True}
    headers, tokens = {"Authorization": f"Bearer {key}"}, []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=240) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"HTTP {answer.status_code}: {answer.read().decode()}")
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(line)
                for choice in event["choices"]:
                    tokens += choice["token_ids"]
                time.sleep(pause)
    return tokens


def main() -> None:
    key, *urls = sys.argv[1:]
    wanted = [stream(urls[0], key, number, 0) for number in range(len(PROMPTS))]
    enough, ended, problems = threading.Event(), [], []

    def keep_streaming(client: int) -> None:
        number = client
        while not enough.is_set():
            number = (number + 1) % len(PROMPTS)
            try:
                tokens = stream(urls[client % len(urls)], key, number, 0.02)
            except Exception as error:
                problems.append(f"{type(error).__name__}: {error}")
            else:
                if tokens == wanted[number]:
                    ended.append(number)
                else:
                    problems.append(f"prompt {number}: {len(tokens)} tokens, or other ones")

    clients = [threading.Thread(target=keep_streaming, args=(client,)) for client in range(4)]
    for client in clients:
        client.start()
    sys.stdin.read()
    enough.set()
    for client in clients:
        client.join()
    print(json.dumps({"ended": len(ended), "problems": problems}))  # noqa: T201  # the answer


if __name__ == "__main__":
    main()
