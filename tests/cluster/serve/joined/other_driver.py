"""A driver of another team on the same Ray cluster, run by path: deploys its application, then obeys lines of stdin.

A line is JSON: a list of a function's name and its arguments. Its answer is a line, too: Ray may write others.
"""

import json
import sys
from typing import Any

import ray
from ray import serve
from ray.serve.config import HTTPOptions


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Greeting:
    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, _request: Any) -> str:
        return self.text


def deploy(name: str, route: str, text: str) -> None:
    serve.run(Greeting.bind(text), name=name, route_prefix=route)


def delete(name: str) -> None:
    serve.delete(name)


def applications() -> dict[str, str]:
    return {name: app.status for name, app in serve.status().applications.items()}


def message(name: str) -> str:
    return str(serve.status().applications[name].message)


def main(port: int) -> None:
    ray.init(log_to_driver=False, logging_level="ERROR")
    serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
    functions = {function.__name__: function for function in (deploy, delete, applications, message)}
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        answer = json.dumps(functions[name](*arguments))
        sys.stdout.write(f"\nanswer: {answer}\n")  # one piece: `print` writes its end apart, after a line of Ray's
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
