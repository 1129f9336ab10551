"""The package as users install it: what a wheel, a source distribution and an image hold, and a server from a wheel."""

import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from crossdock.kernels.cache import cache_dir
from crossdock.kernels.cpu.build import cpu_library
from tests.cluster.ports import free_port
from tests.first_files import LIBRARIES
from tests.waiting import eventually

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CODE = re.compile(r"(cluster|kernels|kvtransfer|router|workers)/|(__init__\.py|py\.typed)$")
RECIPE = {"LICENSE", "MANIFEST.in", "README.md", "pyproject.toml"}
MADE = {"PKG-INFO", "setup.cfg"}  # by setuptools, in a source distribution
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, f'build_{sys.argv[1]}')(sys.argv[2])"
DOCKERFILE = ROOT / "manifests" / "Dockerfile"
COMPILED = "layer_steps"  # in seconds; the largest library takes half a minute
# For a start that measures little. It fails where native kernels are not usable.
FLAGS = ["--cpu-kernels=native", "--max-num-batched-tokens=128", "--max-model-len=1024", "--kv-cache-memory=100MiB"]
# Import each entry point and each public name. Print the version, the packages that are missing, and the names.
LOAD = """
import importlib.metadata, json, crossdock
package, missing = importlib.metadata.distribution("crossdock"), []
for point in package.entry_points:
    try:
        point.load()
    except ModuleNotFoundError as error:
        missing.append(error.name)
names = [getattr(crossdock, name).__name__ for name in crossdock.__all__]
print(json.dumps({"version": package.version, "missing": missing, "names": names}))
"""


def usable_kernels() -> dict[str, Any]:
    """Return the CPU kernels that the imported code can use. Kernels that the cache lacks are compiled."""
    import torch

    from crossdock.kernels.attention import cpp_library
    from crossdock.kernels.cpu import linear

    types = (torch.float32, torch.bfloat16)
    return {
        "attention": cpp_library() is not None,
        "plain": [list(linear.usable_kernels(dtype)) for dtype in types],
        "packed": [list(linear.usable_packed_kernels(dtype)) for dtype in types],
        "int8": [linear.why_not_int8(dtype) for dtype in types],
    }


LOOK = f"""
import json, sys, crossdock
from typing import Any
from crossdock.kernels.cpu.build import cpu_library
{inspect.getsource(usable_kernels)}
for library in json.loads(sys.argv[1]):
    cpu_library(*library)
print(json.dumps({{"file": crossdock.__file__, "usable": usable_kernels()}}))
"""


# -- What is packed ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """The files that git tracks and that exist, as paths below the root."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("needs a checkout of git, which says which files belong to a package")
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def code(tracked: list[str]) -> set[str]:
    found = {name for name in tracked if CODE.match(name)}
    assert {"__init__.py", "cluster/web/dashboard.html", "kernels/cpu/packed.h"} <= found
    return found


@pytest.fixture(scope="module")
def checkout(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout that holds the files of git alone: setuptools packs what an earlier build left behind."""
    return copied(tracked, tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wheel", checkout, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def source_distribution(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("sdist", checkout, tmp_path_factory.mktemp("sdist"))


def copied(names: list[str], folder: Path) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def built(kind: str, source: Path, folder: Path) -> Path:
    """Build a `wheel` or an `sdist` as pip does, by the installed setuptools: an isolated build needs a network."""
    command = [sys.executable, "-P", "-W", "ignore", "-c", BUILD, kind, folder]
    ended = subprocess.run(command, cwd=source, env=environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    (found,) = folder.iterdir()
    return found


def environment(**changes: str) -> dict[str, str]:
    """Return the variables of a user, who has no checkout on the path."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | changes


def names_in_wheel(wheel: Path) -> set[str]:
    """Return the files of a wheel, without the folder in which installers find the package's description."""
    described = f"crossdock-{PROJECT['version']}.dist-info/"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert f"{described}licenses/LICENSE" in names
    return {name for name in names if not name.startswith(described)}


def test_wheel_holds_every_tracked_file_of_the_code_folders_and_no_other(wheel: Path, code: set[str]) -> None:
    assert names_in_wheel(wheel) == {f"crossdock/{name}" for name in code}


def test_source_distribution_holds_the_code_and_what_builds_a_wheel_and_no_other_file(
    source_distribution: Path, code: set[str]
) -> None:
    with tarfile.open(source_distribution) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert {name for name in names if not name.startswith("crossdock.egg-info/")} == code | RECIPE | MADE


def test_wheel_from_the_source_distribution_is_the_wheel_from_the_checkout(
    source_distribution: Path, wheel: Path, tmp_path: Path
) -> None:
    with tarfile.open(source_distribution) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    assert names_in_wheel(built("wheel", source, tmp_path / "wheel")) == names_in_wheel(wheel)


def test_wheel_in_the_image_is_the_wheel_from_the_checkout(tracked: list[str], wheel: Path, tmp_path: Path) -> None:
    """Its stage of the Dockerfile copies files and folders by name, from a context that holds the allowed ones."""
    stage = re.search(r"^FROM \S+ AS wheel$(.*?)^FROM ", DOCKERFILE.read_text(), re.M | re.S)
    assert stage is not None
    assert "pip wheel " in stage[1]
    allowed = {line[1:] for line in Path(f"{DOCKERFILE}.dockerignore").read_text().split() if line.startswith("!")}
    copies = {name for names in re.findall(r"^COPY (.+) \S+$", stage[1], re.M) for name in names.split()} & allowed
    files = [name for name in tracked if {name, name.partition("/")[0]} & copies]
    source = copied(files, tmp_path / "src")
    assert names_in_wheel(built("wheel", source, tmp_path / "wheel")) == names_in_wheel(wheel)


# -- What is installed -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Installed:
    """An environment with the wheel alone, and a folder of its own for what runs there."""

    environment: Path
    folder: Path

    @property
    def kernels(self) -> Path:
        return self.folder / "cache" / "kernels"

    def command(self, *arguments: str) -> list[str]:
        return [str(self.environment / "bin" / arguments[0]), *arguments[1:]]

    def variables(self) -> dict[str, str]:
        return environment(CROSSDOCK_CACHE=str(self.folder / "cache"))

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run a program of the environment, outside of the checkout."""
        return subprocess.run(
            self.command(*arguments),
            cwd=self.folder,
            env=self.variables(),
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    def ask(self, program: str, *arguments: str) -> str:
        ended = self.run("python", "-c", program, *arguments)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout


@pytest.fixture(scope="module")
def installed(wheel: Path, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel in a new environment, whose dependencies are those of the tests. The editable package is not there.

    Its cache has the converted model, and the kernels of the checkout but one. The name of a compiled kernel tells all
    of its sources, so that a wheel with other sources does not find them.
    """
    made = Installed(tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("elsewhere"))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", made.environment], check=True)
    pip = [sys.executable, "-m", "pip", "--python", made.environment / "bin" / "python", "--disable-pip-version-check"]
    # pip asks for the version of Rust, and rustup writes into a home directory that is new.
    own_home = environment(HOME=str(made.folder))
    subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", wheel], env=own_home, check=True)
    packages = Path(made.ask("import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    folders = {sysconfig.get_path(each) for each in ("purelib", "platlib")}
    # A folder that is named here is searched; .pth files in it, as that of an editable package, are not read.
    (packages / "dependencies.pth").write_text("".join(f"{folder}\n" for folder in sorted(folders)))
    made.kernels.mkdir(parents=True)
    (made.folder / "cache" / "models").symlink_to(cache_dir() / "models")
    return made


@pytest.fixture(scope="module")
def kernels(installed: Installed) -> set[str]:
    """The names of the compiled kernels that the environment's cache has before anything runs there."""
    if not shutil.which(os.environ.get("CXX", "g++")):
        pytest.skip("needs a compiler: apt-get install g++")
    for library in LIBRARIES:
        cpu_library(*library)
    for compiled in (cache_dir() / "kernels").glob("*.so"):
        if not compiled.name.startswith(COMPILED):
            shutil.copy2(compiled, installed.kernels)
    return {compiled.name for compiled in installed.kernels.glob("*.so")}


def test_installed_package_compiles_and_loads_the_kernels_of_the_checkout(
    installed: Installed, kernels: set[str]
) -> None:
    told = json.loads(installed.ask(LOOK, json.dumps(LIBRARIES)))
    assert Path(told["file"]).is_relative_to(installed.environment)
    (new,) = {compiled.name for compiled in installed.kernels.glob("*.so")} - kernels
    assert (cache_dir() / "kernels" / new).exists(), "compiled from other sources than the checkout's"
    assert told["usable"] == usable_kernels()
    assert told["usable"]["attention"]
    assert "native" in told["usable"]["plain"][0]
    assert "native" in told["usable"]["packed"][0]


def test_installed_package_says_its_version_and_loads_its_entry_points_and_public_names(installed: Installed) -> None:
    told = installed.run("crossdock", "--version")
    assert told.stdout.splitlines()[0] == f"crossdock {PROJECT['version']}"
    loaded = json.loads(installed.ask(LOAD))
    assert loaded["version"] == PROJECT["version"]
    assert set(loaded["missing"]) <= {"verl"}, "verl is a package that the tests do without"
    assert {"LLM", "PromptParams"} <= set(loaded["names"])


def test_installed_command_answers_for_foreign_flags_and_prints_and_simulates_a_configuration(
    installed: Installed,
) -> None:
    foreign = installed.run("crossdock", "serve", "--torchao-config", "int4wo-128")
    assert foreign.returncode == 2
    assert foreign.stderr.startswith("error: --torchao-config: not supported: ")
    config = installed.run("crossdock", "config", "--pools", "mixed=2")
    assert config.returncode == 0, config.stderr
    assert "\npools:\n" in config.stdout
    written = ["--json", "out.json", "--num-requests", "5", "--request-rate", "5"]
    simulated = installed.run("crossdock", "simulate", "--pools", "mixed=1xh100-8b", *written)
    assert simulated.returncode == 0, simulated.stderr
    assert json.loads((installed.folder / "out.json").read_text())["requests"] == 5


@pytest.fixture
def url(installed: Installed) -> Iterator[str]:
    """The URL of `crossdock serve` of the wheel, with the default model."""
    port, log = free_port(), installed.folder / "log"
    command = installed.command("crossdock", "serve", *FLAGS, "--port", str(port))
    with log.open("w") as output:
        server = subprocess.Popen(
            command, cwd=installed.folder, env=installed.variables(), stdout=output, stderr=subprocess.STDOUT
        )
    try:
        last = f"Dashboard: http://127.0.0.1:{port}/dashboard\n"
        eventually(lambda: last in log.read_text() or server.poll() is not None, log.read_text, 1000)
        assert server.poll() is None, log.read_text()
        yield f"http://127.0.0.1:{port}"
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=240) == 0, log.read_text()
    finally:
        server.kill()
        server.wait()


# In every run, the tests above have its files and its kernels, and test_command a server of the default model.
@pytest.mark.soak
@pytest.mark.timeout(1500)  # kernels are compiled again, on a machine that does other work
def test_installed_server_computes_by_own_kernels_and_answers_a_chat_and_shows_its_pages(
    installed: Installed, kernels: set[str], url: str
) -> None:
    (machine,) = re.findall(r"^Machine: .*$", (installed.folder / "log").read_text(), re.M)
    assert "attention in cpp" in machine
    message = {"role": "user", "content": "What is the capital of France?"}
    body = {"messages": [message], "max_tokens": 12, "temperature": 0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300).raise_for_status().json()
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
    for file in (ROOT / "cluster" / "web").iterdir():
        is_page = file.suffix == ".html"
        path = f"/{file.stem}" if is_page else f"/web/{file.name}"
        assert httpx.get(f"{url}{path}", timeout=240).raise_for_status().content == file.read_bytes()
    assert httpx.get(f"{url}/version", timeout=240).json() == {"version": PROJECT["version"]}
