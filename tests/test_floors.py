"""The rooms of the house: imports point down only, pure rooms stay pure, and each third party has its rooms."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = ("cluster", "router", "workers", "kvtransfer", "kernels")
WORKERS = {
    "workers/schedule",
    "workers/report",
    "workers/sandbox",
    "workers/model",
    "workers/draft",
    "workers/replica",
}
CONFIG = {"cluster/config.py", "cluster/config_file.py"}
COMMANDS = {"cluster/help_pages.py", "cluster/yaml_text.py"}
BELOW = {  # room: the rooms it may import besides itself
    "cluster/cli.py": {"cluster"},
    "cluster/help_pages.py": set[str](),
    "cluster/yaml_text.py": set[str](),
    "cluster/config.py": {"cluster/api", "router", *WORKERS},
    "cluster/config_file.py": {"cluster/config.py", "cluster/yaml_text.py"},
    # Whether a package is installed is asked before Ray starts, too.
    "cluster/serve": {"cluster/api", *CONFIG, *COMMANDS, "cluster/dispatch", "router", "kernels/packages", *WORKERS},
    # How files of strangers are opened, and which models classify, stands in files that need nothing of the model.
    "cluster/api": {
        "cluster/dispatch",
        "cluster/simulate",
        "cluster/yaml_text.py",
        "workers/sandbox",
        "workers/schedule",
        "workers/model/architecture",
        "workers/model/text_files",
        "workers/model/weights/untrusted",
    },
    "cluster/offline": {"cluster/api", *CONFIG, "cluster/dispatch", "cluster/serve", *WORKERS},
    "cluster/trainers": {"cluster/serve"},
    "cluster/dispatch": {"router", "workers/report", "workers/schedule"},
    "cluster/watch": {"workers/schedule"},
    "cluster/bench": {"cluster/help_pages.py", "cluster/watch", "workers/schedule"},
    "cluster/simulate": {
        "cluster/bench",
        "cluster/yaml_text.py",
        "kvtransfer",
        "router",
        "workers/replica",
        "workers/report",
        "workers/sandbox",
        "workers/schedule",
    },
    "cluster/tune": {"cluster/bench", *CONFIG, "cluster/offline", *WORKERS},
    "router": {"workers/report", "workers/schedule"},
    "workers/replica": {
        "workers/draft",
        "workers/model",
        "workers/report",
        "workers/schedule",
        "kvtransfer",
        "kernels",
    },
    "workers/draft": {"workers/model", "workers/schedule"},
    "workers/model": {"workers/sandbox", "workers/schedule", "kvtransfer", "kernels"},
    # An estimated profile follows from a model's configuration, which is a stranger's file.
    "workers/report": {
        "workers/schedule",
        "kvtransfer",
        "workers/model/architecture",
        "workers/model/weights/scheme",
        "workers/model/weights/untrusted",
    },
    "workers/sandbox": set[str](),
    "workers/schedule": set[str](),
    "kvtransfer": set[str](),
    "kernels": set[str](),
    "kernels/cpu": {"kernels/attention", "kernels/cache", "kernels/low_rank", "kernels/options", "kernels/packed"},
    "kernels/gpu": {"kernels/attention", "kernels/options", "kernels/packages", "kernels/packed"},
}
API_ROOMS = {  # folder of cluster/api: the folders there that it may import besides itself
    "body": set[str](),
    "http": {"body"},
    "media": {"body"},
    "text": {"body", "http", "media"},
    "routes": {"body", "http", "media", "text"},
    "batches": {"body", "http", "media", "text", "routes"},
}
REPLICA_ROOMS = {  # likewise of workers/replica
    "ranks": set[str](),
    "tiers": {"ranks"},
    "engine": {"ranks", "tiers"},
    "transfer": {"ranks", "engine"},
    "serving": {"ranks", "tiers", "engine", "transfer"},
}
INNER_ROOMS = {"cluster/api": API_ROOMS, "workers/replica": REPLICA_ROOMS}
FLOORS_WITHIN: dict[str, list[set[str]]] = {
    # room: its own rooms and files, from the ground up
    "workers/model": [
        {"token_bits.py"},
        {"architecture.py", "device_copies.py", "pooling.py", "grammar", "sampling"},
        {"forward", "context_length.py"},
        {"pictures", "recurrent"},
        {"cut"},
        {"loaders"},
        {"weights"},
        {"lora", "end_tokens.py", "model_spec.py", "text_files.py"},
        {"load_options.py", "network.py", "kv_pool.py"},
        {"model.py", "shared_rows.py"},
        {"page_lists.py"},
        {"inputs.py"},
        {"step_messages.py", "graphs"},
        {"logits_check.py", "memory", "runner.py"},
        {"layers", "weight_group.py", "checksums.py"},
        {"probe.py"},
        {"load.py", "new_weights.py"},
        {"text_distances.py"},
        {"text_encoder.py"},
    ],
    "workers/schedule": [
        {"cost", "shares.py"},
        {"request"},
        {"memory", "policies"},
        {"config.py", "first_token.py", "output_lengths.py"},
        {"pictures", "table.py"},
        {"preemption.py"},
        {"adapter_slots.py", "forecast.py", "kv.py", "ahead.py", "outputs.py"},
        {"admission.py", "recurrent", "step_budget.py", "windows.py", "fast_forward.py"},
        {"drafts", "handoff.py", "prefixes"},
        {"prefills.py"},
        {"scheduler.py"},
    ],
}
PURE = ("router", "workers/report", "workers/schedule")  # data and time come in, data goes out
IMPURE = {  # what pure rooms never import
    *("torch", "transformers", "ray", "time", "datetime", "random", "uuid", "os", "asyncio", "threading", "socket"),
}
THIRD_PARTIES = {  # third party: the rooms or files that may import it
    "ray": [
        "cluster/dispatch",
        "cluster/serve",
        "cluster/trainers",
        "workers/replica/serving/model_start.py",
        "workers/replica/serving/notices.py",
        "workers/replica/serving/own_node.py",
        "workers/replica/serving/rank.py",
        "workers/replica/serving/replica.py",
    ],
    "nixl": ["kvtransfer/nixl.py"],
    "verl": ["cluster/trainers/verl.py"],
    "fastapi": ["cluster/api"],
    "PIL": ["cluster/api/media", "cluster/bench/pictures.py"],
    "av": ["cluster/api/media/clips.py"],
    "triton": ["kernels/gpu", "kernels/packages.py"],
    "flash_attn": ["kernels/gpu/flash_attention.py", "kernels/gpu/flash_attention_4.py"],
    "flash_attn_interface": ["kernels/gpu/flash_attention_3.py"],
    "runai_model_streamer": ["workers/model/loaders/run_ai.py", "workers/model/loaders/objects.py"],
    "fastsafetensors": ["workers/model/loaders/files.py"],
    "zmq": ["workers/replica/serving/kv_events.py"],
    "humming": ["kernels/gpu/humming_product.py"],
}
SOURCES = sorted(
    path.relative_to(ROOT).as_posix() for folder in FLOORS for path in (ROOT / folder).rglob("*.py") if path.is_file()
)


def imports(source: str) -> Iterator[str]:
    """Yield the dotted name of every import, at any depth."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (f"{module}.{alias.name}" for alias in node.names)


def room_of(path: str) -> str:
    """Return the room of a file: its folder, two levels deep at most; a file right under cluster/ is its own room."""
    parts = path.split("/")
    return "/".join(parts[:2]) if len(parts) > 2 or parts[0] == "cluster" else parts[0]


def violations(path: str, source: str) -> list[str]:
    """Return one line for each import that breaks a rule."""
    room, wrong = room_of(path), []
    for name in imports(source):
        first, *rest = name.split(".")
        if first == "":
            wrong.append(f"{path}: relative import {name}")
        elif first == "crossdock" and not _may_import(room, rest):
            wrong.append(f"{path}: {room} must not import {name}")
        elif first in FLOORS:
            wrong.append(f"{path}: {name} is importable only as crossdock.{name}")
        elif first in THIRD_PARTIES and not any(_is_within(path, place) for place in THIRD_PARTIES[first]):
            wrong.append(f"{path}: {first} belongs to {', '.join(THIRD_PARTIES[first])}")
        elif first in IMPURE and room in PURE:
            wrong.append(f"{path}: {room} is pure and must not import {first}")
    return wrong


def _may_import(room: str, name: list[str]) -> bool:
    target = "/".join(name)
    if f"{'/'.join(name[:2])}.py" in BELOW:  # a file that is a room of its own
        target = f"{'/'.join(name[:2])}.py"
    return any(_is_within(target, allowed) for allowed in {room, *BELOW[room]})


def _is_within(path: str, room: str) -> bool:
    return path == room or path.startswith(f"{room}/")


@pytest.mark.parametrize(
    ("folder", "rooms", "room"),
    [(folder, rooms, room) for folder, rooms in INNER_ROOMS.items() for room in ["", *rooms]],
)
def test_rooms_within_a_room_import_downwards(folder: str, rooms: dict[str, set[str]], room: str) -> None:
    """`endpoints.py` puts the rooms of cluster/api together; all other files beside rooms are below them."""
    prefix = f"crossdock.{folder.replace('/', '.')}."
    for path in (ROOT / folder / room).glob("*.py"):
        below = {room, *rooms[room]} if room else set(rooms) if path.name == "endpoints.py" else set[str]()
        for name in imports(path.read_text()):
            other = name.removeprefix(prefix).split(".")[0]
            if other in rooms and name.startswith(prefix):
                assert other in below, f"{path.name} must not import {name}"


def climbs(room: str, path: str, source: str) -> list[str]:
    """Return the imports of a file of `room` that do not point to a lower floor or to the file's own inner room."""
    floor_of = {place: number for number, places in enumerate(FLOORS_WITHIN[room]) for place in places}
    prefix = f"crossdock.{room.replace('/', '.')}."
    own = path.split("/")[0]
    wrong = []
    for name in imports(source):
        target = name.removeprefix(prefix).split(".")[0]
        other = target if target in floor_of else f"{target}.py"
        if name.startswith(prefix) and other != own and floor_of[other] >= floor_of[own]:
            wrong.append(f"{room}/{path} must not import {name}")
    return wrong


@pytest.mark.parametrize("room", FLOORS_WITHIN)
def test_files_within_a_room_import_only_floors_below(room: str) -> None:
    """Files of one inner room may import each other; other places of one floor may not."""
    paths = [path.removeprefix(f"{room}/") for path in SOURCES if path.startswith(f"{room}/")]
    assert {path.split("/")[0] for path in paths} - {"__init__.py"} == set().union(*FLOORS_WITHIN[room])
    assert not [line for path in paths for line in climbs(room, path, (ROOT / room / path).read_text())]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("memory/pages.py", "from crossdock.workers.schedule.pictures.encoding import Encoding"),
        ("request/request.py", "from crossdock.workers.schedule.table import RequestTable"),
        ("kv.py", "from crossdock.workers.schedule import prefills"),
        ("cost/cost.py", "from crossdock.workers.schedule.drafts.verify import Verification"),
        ("forecast.py", "import crossdock.workers.schedule.scheduler"),
        ("pictures/encoding.py", "from crossdock.workers.schedule import table"),  # of the same floor
    ],
)
def test_planted_climb_within_a_room_is_reported(path: str, source: str) -> None:
    assert len(climbs("workers/schedule", path, source)) == 1


def test_files_import_only_what_their_rooms_may() -> None:
    assert not [line for path in SOURCES for line in violations(path, (ROOT / path).read_text())]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("workers/replica/engine/engine.py", "from crossdock.cluster.serve.app import application"),
        ("workers/replica/engine/engine.py", "import crossdock.router.placement"),
        ("workers/schedule/scheduler.py", "from crossdock.workers.replica.engine.engine import Engine"),
        ("workers/model/runner.py", "from crossdock.workers.report.timeline import Timelines"),
        ("router/placement.py", "from crossdock import cluster"),
        ("cluster/dispatch/dispatcher.py", "from crossdock.cluster.config import ClusterConfig"),
        ("cluster/simulate/clock.py", "from crossdock.cluster.dispatch.dispatcher import Dispatcher"),
        ("kernels/attention.py", "from crossdock.workers.schedule.memory.pages import PagePool"),
        ("kvtransfer/shm.py", "from crossdock.kernels import attention"),
        ("cluster/serve/app.py", "from kernels import attention"),
        ("cluster/serve/app.py", "from .config import load"),
        ("workers/replica/engine/engine.py", "import ray"),
        ("workers/replica/engine/engine.py", "def f():\n    from ray import serve"),
        ("router/placement.py", "import torch.nn"),
        ("router/fleet.py", "import time"),
        ("router/fleet.py", "import random"),
        ("workers/report/recent_steps.py", "from uuid import uuid4"),
        ("workers/report/timeline.py", "import asyncio"),
        ("workers/schedule/scheduler.py", "if TYPE_CHECKING:\n    from transformers import PreTrainedModel"),
        ("kvtransfer/shm.py", "from nixl._api import nixl_agent"),
        ("cluster/dispatch/dispatcher.py", "from fastapi import FastAPI"),
    ],
)
def test_planted_violation_is_reported(path: str, source: str) -> None:
    assert len(violations(path, source)) == 1


def test_only_the_spec_of_a_model_finds_its_folder_so_that_no_place_forgets_the_overrides() -> None:
    """A head of drafts is another checkpoint, without overrides."""
    finds = {"crossdock.workers.model.weights.checkpoint", "crossdock.workers.model.weights.checkpoint.resolve_model"}
    found = {path for path in SOURCES if not finds.isdisjoint(imports((ROOT / path).read_text()))}
    assert found == {"workers/model/model_spec.py", "workers/draft/mtp_weights.py", "workers/draft/paged_eagle.py"}


def test_rooms_are_the_folders_that_exist() -> None:
    assert {room_of(path) for path in SOURCES if not path.endswith("__init__.py")} == set(BELOW)


def test_every_package_has_a_docstring_and_nothing_else_in_its_init() -> None:
    for folder in {path.rpartition("/")[0] for path in SOURCES}:
        if folder == "kernels":  # transformers probes for a package of that name and would run this file
            assert not (ROOT / folder / "__init__.py").exists()
            continue
        body = ast.parse((ROOT / folder / "__init__.py").read_text()).body
        assert len(body) == 1, f"{folder}/__init__.py holds more than a docstring"
        assert ast.get_docstring(ast.Module(body, [])), f"{folder}/__init__.py has no docstring"
    assert [path.name for path in ROOT.glob("*.py")] == ["__init__.py"], "the root is not a place for modules"


def test_wheel_lists_every_folder() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    of_code = {f"crossdock.{path.rpartition('/')[0].replace('/', '.')}" for path in SOURCES}
    assert set(listed) == {"crossdock", "crossdock.cluster.web", *of_code}


def without(blocked: tuple[str, ...], names: list[str]) -> None:
    """Import modules in a process in which others cannot be imported."""
    program = f"import sys; sys.modules.update(dict.fromkeys({blocked})); import {', '.join(names)}"
    subprocess.run([sys.executable, "-c", program], check=True, cwd="/")


def test_pure_rooms_import_without_torch_ray_and_transformers() -> None:
    pure = [path for path in SOURCES if room_of(path) in PURE and not path.endswith("__init__.py")]
    assert {room_of(path) for path in pure} == set(PURE)
    names = [f"crossdock.{path.removesuffix('.py').replace('/', '.')}" for path in pure]
    without(("torch", "ray", "transformers"), names)


def test_driver_ingress_emulated_replica_and_simulator_import_without_torch_and_transformers() -> None:
    """Torch would cost each of them 280 MiB and seconds of the start; only a model's steps need torch."""
    serve, replica = "crossdock.cluster.serve", "crossdock.workers.replica.serving.replica"
    simulator = "crossdock.cluster.simulate.scenario_run"
    own = [f"{serve}.{name}" for name in ("command", "lifetime", "ingress")]
    without(("torch", "transformers"), [*own, replica, simulator])
