"""`crossdock serve` on a real Ray cluster that others use, too: their application is asked all the time."""

import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.cluster.ports import free_port
from tests.cluster.serve.joined.joined_cluster import JoinedCluster, joined_cluster, shown
from tests.cluster.watch.terminal import COMMAND
from tests.sweeps import SOAK, rest_in_soak
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(900)  # six starts at once, on a machine that may be busy

SERVE = (COMMAND, "serve", "--device", "emulated:h100-8b")
SERVED = ("first", "second", "third", "fourth")  # the first one at the default name and route
DIRECT = free_port()  # of the third one, whose ingress listens itself


@pytest.fixture(scope="module")
def cluster() -> Iterator[JoinedCluster]:
    with joined_cluster() as cluster:
        yield cluster
        assert cluster.team.answers(), cluster.team.wrong
        assert cluster.team.num_answers > 100
        assert cluster.team.call("applications") == {"teamB": "RUNNING"}, "what was deployed here is gone"


@pytest.fixture(scope="module")
def commands(
    cluster: JoinedCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, tuple[subprocess.Popen[bytes], Path]]]:
    """Four applications of ours side by side, each with the log of its command. And two starts that fail meanwhile."""
    folder = tmp_path_factory.mktemp("logs")
    running: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}

    def start(name: str, *flags: str, **environment: str) -> None:
        running[name] = cluster.start(folder / name, *flags, **environment), folder / name

    try:
        for name in SERVED:
            flags = [] if name == "first" else ["--app-name", name, "--route-prefix", f"/{name}/llm"]
            if name == "third":
                flags += ["--set", "http.direct=true", "--port", str(DIRECT)]
            start(name, "--served-model-name", f"model-{name}", *flags)
        start("without a token", "--app-name", "other", RAY_AUTH_MODE="disabled")
        start("bad", "/no/such/model", "--app-name", "other", "--route-prefix", "/other")
        for name in SERVED:
            process, log = running[name]
            eventually(shown(log, process), log.read_text, 480)
        yield running
    finally:
        for process, _ in running.values():
            process.kill()
            process.wait()


def url(cluster: JoinedCluster, name: str) -> str:
    root = f"http://127.0.0.1:{DIRECT}" if name == "third" else cluster.url
    return root if name == "first" else f"{root}/{name}/llm"


def models(base: str) -> list[str]:
    """Return the models of an API; empty where none answers, as when Serve's proxy does not know the route yet."""
    try:
        found = httpx.get(f"{base}/v1/models", timeout=240)
    except httpx.ConnectError:
        return []
    return [model["id"] for model in found.json()["data"]] if found.status_code == 200 else []


def test_bad_start_leaves_all_other_applications_alone(
    cluster: JoinedCluster, commands: dict[str, tuple[subprocess.Popen[bytes], Path]]
) -> None:
    process, log = commands["bad"]
    assert process.wait(240) == 1
    assert log.read_text().endswith("error: model directory /no/such/model does not exist\n")
    assert cluster.team.answers(), cluster.team.wrong
    assert cluster.team.call("applications") == {"teamB": "RUNNING", "crossdock": "RUNNING"} | dict.fromkeys(
        SERVED[1:], "RUNNING"
    )


def test_start_without_the_token_says_what_to_set(
    commands: dict[str, tuple[subprocess.Popen[bytes], Path]],
) -> None:
    process, log = commands["without a token"]
    assert process.wait(240) == 1
    _, _, error = log.read_text().partition("error: ")
    assert "the cluster asks for a token: set RAY_AUTH_MODE=token, and put the cluster's token into" in error
    assert "Traceback" not in log.read_text()
    assert log.read_text().count("Failed to get cluster ID") == 1, "Ray's own line, one for each time it asks"


def test_applications_of_ours_answer_side_by_side_below_their_routes(
    cluster: JoinedCluster, commands: dict[str, tuple[subprocess.Popen[bytes], Path]]
) -> None:
    for name in SERVED:
        assert f"serves model-{name} at {url(cluster, name)}/v1\n" in commands[name][1].read_text()
        assert models(url(cluster, name)) == [f"model-{name}"]
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
        with httpx.Client(base_url=url(cluster, name), timeout=240) as client:
            answer = client.post("/v1/chat/completions", json=body).raise_for_status()
            assert answer.json()["usage"]["completion_tokens"] == 3
            for path in ("/health", "/ready", "/dashboard", "/v1/replicas", "/v1/requests"):
                assert client.get(path).status_code == 200, path
            assert "crossdock_ingress" in client.get("/metrics").text
            assert client.get("/absent").json()["error"]["message"] == f"Not Found: GET {client.base_url.path}absent"
            page = client.get("/dashboard").text
            for link in re.findall(r'(?:src|href)="([^"#]+)"', page):
                assert (
                    client.get(
                        client.base_url.join("dashboard").join(link).path.removeprefix(client.base_url.path.rstrip("/"))
                    ).status_code
                    == 200
                ), link
    servers = httpx.get(f"{url(cluster, 'second')}/openapi.json", timeout=240).json()["servers"]
    assert servers == [{"url": "/second/llm"}]
    assert cluster.team.answers(), cluster.team.wrong


@pytest.mark.parametrize("taken", rest_in_soak(["name", "route", "port"], "name"))
def test_name_route_or_port_that_is_taken_is_refused(
    cluster: JoinedCluster, commands: dict[str, tuple[subprocess.Popen[bytes], Path]], taken: str
) -> None:
    """Each is a start of some seconds: test_shared_cluster.py has all reasons."""
    process = commands["first"][0].pid
    owner = rf"deployed at .* UTC by process {process} of 127\.0\.0\.1, which runs"
    remedy = re.escape("""python -c "from ray import serve; serve.delete('crossdock')\"""")
    other = ("--app-name", "other")
    flags, message = {
        "name": ((), rf"application\.name: the cluster has an application 'crossdock' already, {owner}\. .*{remedy}\n"),
        "route": ((*other, "--route-prefix", "/teamB"), "'/teamB' is the route of the application 'teamB', deployed"),
        "port": ((*other, "--set", "http.direct=true", "--port", str(cluster.port)), "choose another port"),
    }[taken]
    answer = cluster.run(*SERVE, *flags)
    assert answer.returncode == 1, answer.stdout
    assert re.search(f"error: .*{message}", answer.stdout), answer.stdout
    assert [models(url(cluster, name)) for name in SERVED] == [[f"model-{name}"] for name in SERVED]
    assert cluster.team.answers(), cluster.team.wrong


@pytest.mark.parametrize(
    ("flags", "asked"),
    [
        (
            ("--set", "pools.mixed.num_cpus=40"),
            r"40 CPUs: the cluster has 16 CPUs on 1 machine, 1\d CPUs free; 2\d CPUs",
        ),
        pytest.param(  # test_room.py has GPUs in every run
            ("--set", "pools.mixed.tensor_parallel_size=2", "--device", "cuda"),
            "2 GPUs: the cluster has 0 GPUs on 1 machine, 0 GPUs free; 2 GPUs",
            marks=SOAK,
        ),
    ],
)
def test_start_that_finds_no_room_ends_with_what_is_missing(
    cluster: JoinedCluster,
    flags: tuple[str, ...],
    asked: str,
) -> None:
    place = ("--app-name", "large", "--route-prefix", "/large")
    # An hour for requests to end: replicas that have not begun have none, and the command waits for none.
    seconds = ("--set", "application.room_timeout_s=1", "--set", "http.drain_timeout_s=3600")
    ended = cluster.run(*SERVE, *place, *seconds, *flags)
    assert ended.returncode == 1
    message = rf"error: 1 of 1 replicas of pool 'mixed' wait for room, each for {asked} missing\. No room came in 1 s"
    assert re.search(message, ended.stdout), ended.stdout
    assert "large" not in cluster.team.call("applications")


def test_relative_path_is_refused_before_the_cluster_is_joined(cluster: JoinedCluster) -> None:
    ended = cluster.run(*SERVE, "./model")
    assert ended.returncode == 2
    assert "error: model.path: './model' is relative, and means another place on each machine" in ended.stdout


@pytest.mark.parametrize(("name", "number"), [("first", signal.SIGTERM), ("second", signal.SIGINT)])
def test_signal_ends_the_own_application_alone(
    cluster: JoinedCluster,
    commands: dict[str, tuple[subprocess.Popen[bytes], Path]],
    name: str,
    number: signal.Signals,
) -> None:
    process, log = commands[name]
    before = log.read_text()
    body = {"model": f"model-{name}", "prompt": "Hi", "stream": True, "ignore_eos": True}
    # SIGTERM lets a stream end; SIGINT ends one that would go on for half an hour.
    length = 100 if number == signal.SIGTERM else 100_000
    request = {**body, "max_tokens": length}
    with httpx.stream("POST", f"{url(cluster, name)}/v1/completions", json=request, timeout=240) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        next(lines)
        process.send_signal(number)
        *_, last, _end = lines
    assert process.wait(240) == 0
    assert ('"finish_reason":"length"' in last) == (number == signal.SIGTERM), last
    assert log.read_text().removeprefix(before) == "Stopping …\n"
    assert models(url(cluster, name)) == []
    assert cluster.team.answers(), cluster.team.wrong


def test_killed_command_leaves_its_application_which_the_next_start_says_how_to_remove(
    cluster: JoinedCluster, commands: dict[str, tuple[subprocess.Popen[bytes], Path]]
) -> None:
    process, _ = commands["third"]
    process.kill()
    process.wait()
    refused = cluster.run(*SERVE, "--app-name", "third")
    assert refused.returncode == 1
    assert f"by process {process.pid} of 127.0.0.1, which has ended" in refused.stdout
    assert models(url(cluster, "third")) == ["model-third"]
    removal = refused.stdout.rpartition("remove that one: ")[2].strip()
    assert removal.startswith("RAY_ADDRESS=127.0.0.1:")
    assert cluster.run("sh", "-c", removal).returncode == 0
    assert models(url(cluster, "third")) == []
    assert cluster.team.answers(), cluster.team.wrong


def test_application_that_others_replace_is_left_to_them(
    cluster: JoinedCluster, commands: dict[str, tuple[subprocess.Popen[bytes], Path]]
) -> None:
    process, log = commands["fourth"]
    cluster.team.call("deploy", "fourth", "/fourth", "hello of team C")
    assert process.wait(240) == 1
    message = "error: application 'fourth' has been deleted or replaced by another user of the Ray cluster\n"
    assert log.read_text().endswith(message)
    assert httpx.get(f"{cluster.url}/fourth", timeout=240).text == "hello of team C"
    cluster.team.call("delete", "fourth")
    assert cluster.team.answers(), cluster.team.wrong


def test_file_for_serve_deploy_has_our_message_or_starts_beside_the_other_applications(
    cluster: JoinedCluster, tmp_path: Path
) -> None:
    def deploy(args: dict[str, Any]) -> None:
        application = {"name": "file", "route_prefix": "/file", "import_path": "crossdock:build_app", "args": args}
        file = tmp_path / "serve.yaml"
        file.write_text(yaml.safe_dump({"applications": [application]}))
        ended = cluster.run("serve", "deploy", "-a", cluster.dashboard, str(file))
        assert ended.returncode == 0, ended.stdout

    args = {"model": {"served_name": "by-file"}, "pools": [{"name": "mixed", "emulated": "h100-8b"}]}
    deploy({**args, "engin": {"max_num_seqs": 4}})
    eventually(lambda: cluster.team.call("applications")["file"] == "DEPLOY_FAILED")
    assert "engin: no such setting; did you mean engine?" in cluster.team.call("message", "file")
    deploy(args)
    eventually(lambda: models(f"{cluster.url}/file") == ["by-file"], lambda: cluster.team.call("message", "file"))
    refused = cluster.run(*SERVE, "--app-name", "file")
    assert "from a Serve config file (import_path crossdock:build_app)" in refused.stdout
    cluster.team.call("delete", "file")
    assert cluster.team.answers(), cluster.team.wrong
