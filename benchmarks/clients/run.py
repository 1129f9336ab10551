"""Do other people's clients work against this server? Each runs a script of its own, offline, against a scripted model.

    python benchmarks/clients/run.py --install DIR     # once, with the network: venvs and a folder of Node packages
    python benchmarks/clients/run.py DIR               # then without

Starts the HTTP application in front of a model that writes reasoning, text and calls (`scripted_model.py`), and once
more in front of a real engine whose tiny model reads pictures (`picture_server.py`). Prints a table of clients, and one
of their cases with what failed. Ends with an error if anything has failed. Clients in Python have a venv each, because
their requirements conflict.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from picture_server import IMAGES, picture_server
from scripted_model import ScriptedModel
from tables import hardware, markdown, today

from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.http.listener import listen
from tests.cluster.api.one_model import one_model_api
from tests.cluster.ports import free_port

HERE = Path(__file__).parent
KEY = "test-key"
SECONDS = 180  # that one client may take for all its cases


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a case of a client went. `failure` is empty for one that succeeded."""

    client: str
    version: str
    case: str
    failure: str


def install(folder: Path) -> None:
    """Install the pinned versions of all clients into a folder. Needs the network."""
    folder.mkdir(parents=True, exist_ok=True)
    for listed in sorted((HERE / "requirements").glob("*.txt")):
        environment = folder / listed.stem
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        pip = [environment / "bin/pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, "-r", listed], check=True)
    (folder / "node").mkdir(exist_ok=True)
    (folder / "node/package.json").write_text((HERE / "package.json").read_text())
    subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--prefix", folder / "node"], check=True)


def scripts(names: Sequence[str]) -> list[Path]:
    """Return the scripts of the clients with these names; of all of them for none."""
    found = sorted([*HERE.glob("*_client.py"), *HERE.glob("*_client.mjs")])
    return [path for path in found if not names or path.stem.removesuffix("_client") in names]


async def run(script: Path, folder: Path, settings: Mapping[str, str], home: str) -> list[Outcome]:
    """Run a client's script. It prints one outcome a line, as JSON. Agents write into `home`.

    `settings`: variables of the environment that say where the servers are, and what to expect.
    """
    environment = {"PATH": os.environ["PATH"], "HOME": home, "TMPDIR": home, "KEY": KEY, "NO_COLOR": "1", **settings}
    if script.suffix == ".py":
        command = [str(folder / script.stem.removesuffix("_client") / "bin/python"), str(script)]
    else:  # Node finds packages beside a script alone
        for source in (script, HERE / "cases.mjs"):
            (folder / "node" / source.name).write_text(source.read_text())
        command = ["node", str(folder / "node" / script.name)]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        async with asyncio.timeout(SECONDS):
            output, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        return [Outcome(script.stem, "?", "all", f"took more than {SECONDS} s")]
    outcomes = [Outcome(**json.loads(line)) for line in output.splitlines() if line.startswith(b'{"client"')]
    if process.returncode != 0 or not outcomes:
        outcomes.append(Outcome(script.stem, "?", "script", errors.decode()[-400:] or f"status {process.returncode}"))
    return outcomes


async def measure(folder: Path, names: Sequence[str]) -> list[Outcome]:
    """Serve both models, and run the clients one after the other."""
    model, port = ScriptedModel(), free_port()
    config = HttpConfig.model_validate({"api_keys": [KEY]})
    api = one_model_api(model, model.tokenizer, config)  # type: ignore[arg-type]
    listener = await listen(api, "127.0.0.1", port)
    outcomes = []
    with TemporaryDirectory() as files:
        async with picture_server(Path(files), KEY) as pictures:
            settings = {"URL": f"http://127.0.0.1:{port}", "PICTURES": pictures.expected}
            for script in scripts(names):
                with TemporaryDirectory(ignore_cleanup_errors=True) as home:
                    outcomes += await run(script, folder, settings, home)
            count = pictures.num_encoded()
    if count not in (0, len(IMAGES)):  # 0: no client that ran sends pictures
        outcomes.append(Outcome("all", "", "pictures are encoded once", f"{count} were encoded, not {len(IMAGES)}"))
    await listener.close(5)
    return outcomes


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return a table with the number of cases that each client does, and of those that failed."""
    cases = Counter((each.client, each.version) for each in outcomes)
    failed = Counter((each.client, each.version) for each in outcomes if each.failure)
    rows = [[*client, str(count), str(failed[client])] for client, count in cases.items()]
    return markdown([["client", "version", "cases", "failed"], *rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the clients are installed")
    parser.add_argument("clients", nargs="*", help="names of clients, as in openai_python; default: all")
    parser.add_argument("--install", action="store_true", help="install the clients first")
    options = parser.parse_args()
    folder = options.folder.absolute()
    if options.install:
        install(folder)
        return 0
    outcomes = asyncio.run(measure(folder, options.clients))
    print(f"{today()}; {hardware()}\n")
    print(summary(outcomes))
    rows = [[each.client, each.version, each.case, _cell(each.failure)] for each in outcomes]
    print(markdown([["client", "version", "case", "outcome"], *rows]))
    return sum(bool(each.failure) for each in outcomes)


def _cell(failure: str) -> str:
    return failure.replace("|", "\\|").replace("\n", " ")[:400] or "ok"


if __name__ == "__main__":
    sys.exit(main() > 0)
