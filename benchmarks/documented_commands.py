"""Does every command of README and docs/ run as documented, and in how many seconds?

    python benchmarks/documented_commands.py                     # half an hour on two cores
    python benchmarks/documented_commands.py --only 'simulate'   # commands that match an expression

Prints a row per command: seconds, seconds of CPU and exit code. For a server the seconds are those until it has
answered a request. Commands run in a folder of their own, with their documented settings and three changes: the port,
so that another server may run; the default model in place of one that a reader would have; a trace of twenty requests.
A command that needs what this machine lacks is listed with the reason, and whether its own program takes its flags.
Exits with 1 if a command failed.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests

from servers import add_server_options, log_of, serving
from tables import hardware, markdown, today, write

from crossdock.workers.model.weights.checkpoint import default_model_dir
from tests.test_documented_commands import FENCE, GUIDE, PARSERS, ROOT, commands, problem_of_other_program

BIN = Path(sys.executable).parent
SERVER_PORT = "8000"  # as documented
OWN_MODEL = r"\./(big-|bigger-|my-)?model|\./Llama-3\.1-8B-AWQ|\bMODEL\b|Qwen/Qwen3-0\.6B"
# Why a command is not run, by the start of the command.
NOT_RUN = {
    "sudo ": "installs packages of the system",
    "python3 -m venv": "is for a machine with a GPU",
    "pip install": "is for a machine with a GPU",
    "make ": "sets up .venv first; CI runs `make test`, and `make serve` is `crossdock serve`",
    "docker ": "needs Docker",
    "kind ": "needs Docker",
    "kubectl ": "needs a Kubernetes cluster",
    "export ": "sets a variable for the lines that follow",
    "ray ": "needs machines that it may start",
    "serve deploy": "needs the cluster of `ray up`",
    "python benchmarks/": "makes a table of benchmarks/records",
    "python -m verl": "needs the package verl, and GPUs for its trainer",
}

# Why a command is not run, by an expression that it contains.
OF_TRAINERS = re.compile(r"/(pause|is_paused|resume|sleep|is_sleeping|wake_up)\b")  # need --enable-rollouts
LACKING = {
    r"VL-|bench .*pictures": "needs a model of pictures from the hub",
    r"bge-|cross-encoder/": "needs a text encoder from the hub",
    r"\bHEAD\b": "needs a head of EAGLE-3",
    r"Qwen3-8B": "needs a model with a longer context than the default model's",
    r"lora": "needs an adapter",
    r"/qwen/": "needs two applications on one cluster",
    r"200GiB": "needs a folder of 200 GiB",
    r"timed\.yaml": "its file is made in the walkthrough",
}

Outcome = tuple[str, str, str]  # seconds, seconds of CPU, and exit code or the reason why there is none


@dataclass(frozen=True, slots=True)
class Documented:
    """A command of a page. `line`: its words, quoted for a shell."""

    page: str
    line: str

    @property
    def is_server(self) -> bool:
        return self.line.startswith(("crossdock serve", "serve run"))

    @property
    def needs_server(self) -> bool:
        return (
            "http://" in self.line
            or "localhost:" in self.line
            or self.line.startswith(("crossdock chat", "crossdock top"))
        )

    def reason(self) -> str | None:
        """Return why the command is not run here; None if it is run."""
        for start, reason in NOT_RUN.items():
            if self.line.startswith(start):
                return reason
        if shutil.which(program := self.line.split()[0], path=f"{BIN}{os.pathsep}{os.environ['PATH']}") is None:
            return f"needs the program {program}"
        if ranks := _ranks(self.line):
            return f"needs {ranks} cores: one for each rank" if ranks > (os.cpu_count() or 1) else None
        return next((reason for lacking, reason in LACKING.items() if re.search(lacking, self.line)), None)


def documented() -> list[Documented]:
    """Return the commands of README and docs/, each once, under the first page that has it."""
    found: dict[str, Documented] = {}
    for page in GUIDE:
        for block in FENCE.findall(page.read_text()):
            for words in commands(block):
                line = shlex.join([words[0].removeprefix(".venv/bin/"), *words[1:]])
                found.setdefault(line, Documented(page.name, line))
    return list(found.values())


def _ranks(line: str) -> int:
    """Return how many ranks `crossdock serve` with --tp, --pp or xtp starts; 0 without these."""
    sizes = [int(size) for size in re.findall(r"--[tp]p (\d+)", line)]
    if sizes:
        return sizes[0] * (sizes[1] if len(sizes) > 1 else 1)
    return sum(int(count) * int(tp) for count, tp in re.findall(r"=(\d+)xtp(\d+)", line))


def adapted(line: str, port: int) -> list[str]:
    """Return the words to run for a documented line: with this port, and the model that the folder has."""
    line = re.sub(rf"\b{SERVER_PORT}\b", str(port), re.sub(OWN_MODEL, "./model", line))
    program, *args = shlex.split(line)
    if line.startswith("crossdock serve"):
        args += ["--port", str(port)]
    elif line.startswith("crossdock chat"):
        args += ["--url", f"http://127.0.0.1:{port}"]
    elif line.startswith("crossdock top"):
        args += [f"http://127.0.0.1:{port}"]
    return [str(BIN / program) if (BIN / program).exists() else program, *args]


def fill(folder: Path, port: int) -> None:
    """Put into the folder what a reader has when the commands are run."""
    (folder / "model").symlink_to(default_model_dir())
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    shutil.copytree(ROOT / "manifests", folder / "manifests")
    fill_manifest(folder, port)
    configuration = subprocess.run([BIN / "crossdock", "config"], capture_output=True, check=True).stdout
    for name in ("cluster.yaml", "tune.yaml"):  # `crossdock tune` writes over the second
        (folder / name).write_bytes(configuration)
    request = '{{"timestamp": {}, "input_length": 256, "output_length": 16, "hash_ids": [{}]}}\n'
    (folder / "mooncake.jsonl").write_text("".join(request.format(500 * n, n) for n in range(20)))
    body = {"model": "SmolLM2-135M-Instruct", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (folder / "in.jsonl").write_text(json.dumps(line))


def fill_manifest(folder: Path, port: int) -> None:
    """Write the manifest of `serve run`, with this port."""
    text = (ROOT / "manifests" / "serve.yaml").read_text().replace(f"port: {SERVER_PORT}", f"port: {port}")
    (folder / "manifests" / "serve.yaml").write_text(text)


def run(words: list[str], folder: Path, args: argparse.Namespace, log: Path) -> Outcome:
    """Run a command to its end. The exit code is 124 after `args.limit` seconds."""
    started, before = time.monotonic(), os.times()
    code = 124
    with log.open("ab") as output:
        output.write(f"\n$ {shlex.join(words)}\n".encode())
        output.flush()
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = subprocess.run(
                words, cwd=folder, input=b"Say hello.", stdout=output, stderr=output, timeout=args.limit, check=False
            ).returncode
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return f"{time.monotonic() - started:.1f}", f"{cpu:.1f}", str(code)


@contextlib.contextmanager
def server(words: list[str], folder: Path, args: argparse.Namespace) -> Iterator[float]:
    """Start a server in the folder and yield the seconds until it answered."""
    command = ["env", f"--chdir={folder}", *words]
    with serving(words[1], command, args, log_of(args, "server")) as running:
        yield running.start_s


def listening(command: Documented, args: argparse.Namespace) -> argparse.Namespace:
    """Return the options with the port at which the server of this command listens.

    A server of `serve run` with a builder has no option for its port: it listens at Serve's own.
    """
    port = int(SERVER_PORT) if command.line.startswith("serve run crossdock:") else args.port
    return argparse.Namespace(**vars(args) | {"port": port})


def not_run(command: Documented, reason: str) -> str:
    """Return the outcome of a command that is not run: the reason, and what its own program says of its flags."""
    words = shlex.split(command.line)
    if problem := problem_of_other_program(words):
        return f"failed: {problem}"
    return f"not run: {reason}" + f"; {words[0]} knows its flags" * (words[0] in PARSERS)


def rows(args: argparse.Namespace, folder: Path) -> Iterator[tuple[Documented, Outcome]]:
    """Yield each command that matches, with its outcome."""
    chosen = [command for command in documented() if re.search(args.only, command.line)]
    for command in chosen:
        if reason := command.reason():
            yield command, ("-", "-", not_run(command, reason))
    runs = [command for command in chosen if command.reason() is None]
    for command in (command for command in runs if command.is_server):
        try:
            with server(adapted(command.line, args.port), folder, listening(command, args)) as start_s:
                pass
            yield command, (f"{start_s:.1f}", "-", "0")
        except RuntimeError as error:
            yield command, ("-", "-", f"failed: {error}")
    for command in (command for command in runs if not command.is_server and not command.needs_server):
        yield command, run(adapted(command.line, args.port), folder, args, log_of(args, "commands"))
    needing = [command for command in runs if command.needs_server and not command.is_server]
    for line, is_of_trainers in (("crossdock serve", False), ("crossdock serve --enable-rollouts", True)):
        group = [command for command in needing if bool(OF_TRAINERS.search(command.line)) is is_of_trainers]
        if group:
            with server(adapted(line, args.port), folder, args):
                for command in group:
                    yield command, run(adapted(command.line, args.port), folder, args, log_of(args, "commands"))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="an expression that the commands to run match (default: all)")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for a command (default: %(default)s)")
    add_server_options(parser, "documented-commands", 8421)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    lines, has_failed = [["command", "page", "seconds", "CPU seconds", "exit code"]], False
    with tempfile.TemporaryDirectory(prefix="cd-documented-") as name:
        folder = Path(name)
        fill(folder, args.port)
        for command, outcome in rows(args, folder):
            seconds, cpu, code = outcome
            has_failed |= code != "0" and not code.startswith("not run")
            lines.append([f"`{command.line}`", command.page, *outcome])
            print(f"{seconds:>7} {cpu:>7}  {code:<3}  {command.line}", flush=True)
    caption = f"{hardware()}; {today()}."
    write(args, f"{caption}\n\n{markdown(lines)}", {"date": today(), "hardware": hardware(), "rows": lines[1:]})
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
