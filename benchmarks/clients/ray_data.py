"""Does the recipe of docs/offline.md answer rows of Ray Data over a running application? Prints rows and seconds.

    python -m venv VENV, with ray[data], openai and crossdock
    python benchmarks/clients/ray_data.py --venv VENV --rows 256

Serves the embedded model. A process of VENV then answers rows in two actors of Ray Data. Ends with an error unless each
row has the answer that the server gives to its prompt alone.
"""

import argparse
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import openai

BODY: Any = {"model": "", "max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}


class Answers:
    """The stage: one client of the application in each actor. Interactive requests of others go first."""

    def __init__(self, url: str) -> None:
        head = {"X-SLO-Class": "batch"}
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", default_headers=head, max_retries=9)
        self.create = partial(client.completions.create, **BODY | {"model": client.models.list().data[0].id})

    def __call__(self, batch: Any) -> Any:
        with ThreadPoolExecutor(32) as pool:
            batch["answer"] = list(pool.map(lambda prompt: self.create(prompt=prompt).choices[0].text, batch["prompt"]))
        return batch


def answer_rows(url: str, count: int) -> None:
    """Answer rows, in a process that has Ray Data."""
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    began = time.monotonic()
    rows = ray.data.from_items([{"id": number, "prompt": f"Question {number}:"} for number in range(count)])
    stage = rows.map_batches(Answers, fn_constructor_args=(url,), concurrency=2, batch_size=32)
    found = sorted(stage.take_all(), key=lambda row: row["id"])
    seconds = time.monotonic() - began
    alone = Answers(url)({"prompt": [row["prompt"] for row in found]})["answer"]
    wrong = sum(row["answer"] != text for row, text in zip(found, alone, strict=True))
    print(f"ROWS: {len(found)} of {count} in {seconds:.1f} s, {wrong} unlike the server's own answer", flush=True)
    if wrong or [row["id"] for row in found] != list(range(count)):
        raise ValueError("rows are missing, or have other answers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, help="environment with Ray Data")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    if "--url" in sys.argv:
        given = parser.parse_args()
        answer_rows(given.url, given.rows)
        return
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from servers import add_server_options, crossdock_server

    add_server_options(parser, "ray-data", 31960)
    args = parser.parse_args()
    with crossdock_server(args, "--dtype", "float32", "--max-model-len", "1024") as server:
        stage = [args.venv / "bin" / "python", __file__, "--url", server.address, "--rows", str(args.rows)]
        subprocess.run(stage, check=True)


if __name__ == "__main__":
    main()
