"""Print a trace whose rate swings once between 1 and 8 requests a second in 900 s: the load of dynamo#10528.

    python benchmarks/routing/burst.py > burst.jsonl
    crossdock simulate fleet.yaml --trace burst.jsonl --service-tier interactive --slo interactive=ttft:3000,tpot:30

Lines are as in Mooncake's traces: 8,000 tokens in, 1,000 out, no shared prefixes. The simulation takes ten minutes. The
fleet of RESULTS.md has the pools `{name: prefill, profile: h100-8b, max_replicas: 4}` and `decode` likewise.
"""

import json
import math
import random

SECONDS, LEAST, MOST = 900.0, 1.0, 8.0  # of the load; requests a second


def main() -> None:
    """Print a line for each request."""
    rng, now, number = random.Random(10528), 0.0, 0
    while (now := now + rng.expovariate(MOST)) < SECONDS:
        rate = LEAST + (MOST - LEAST) * (1 - math.cos(2 * math.pi * now / SECONDS)) / 2
        if rng.random() < rate / MOST:
            request = {"timestamp": round(1000 * now), "input_length": 8000, "output_length": 1000}
            print(json.dumps(request | {"hash_ids": [*range(16 * number, 16 * number + 16)]}))
            number += 1


if __name__ == "__main__":
    main()
