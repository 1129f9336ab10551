"""Lines of `crossdock serve` in its terminal: the phases of a start, lost replicas, and replicas that come back."""

import contextlib
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from crossdock.cluster.serve.lost_replicas import LostReplicas
from crossdock.cluster.serve.start_phases import StartPhases
from tests.cluster.serve.served_command import serving
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(900)  # a first start measures steps, which a busy machine makes long

REPLICA = re.compile(r"replica (\w+) \((\w+)\) was lost: (.*?); (.*?); another one starts, .*? Its log: (\S+)")


def start(*phases: str, role: str = "mixed", seconds: float = 2.0) -> dict[str, Any]:
    ages = {phase: seconds * number for number, phase in enumerate(phases, 1)}
    return {"pool": role, "role": role, "ages": ages, "log": "/logs/own.log"}


def test_phase_is_told_once_and_when_the_last_replica_has_ended_it() -> None:
    phases = StartPhases(2, now=10.0)
    assert phases.ended("Ray is up", 12.5) == "   2.5 s  Ray is up (2.5 s)"
    assert [*phases.of_replicas({"a": start("process")}, 13.0)] == [], "the other one has not begun"
    both = {"a": start("process", "weights"), "b": start("process")}
    assert [*phases.of_replicas(both, 14.0)] == ["   4.0 s  processes of replicas run (1.5 s)"]
    assert phases.now_in(both) == "libraries are imported: 0 of 2"
    done = {"a": start("process", "ready"), "b": start("process", "ready")}
    assert [*phases.of_replicas(done, 20.0)] == ["  10.0 s  replicas are ready (6.0 s)"]
    assert [*phases.of_replicas(done, 21.0)] == []


def loss(number: int, went_on: dict[str, int], num_requests: int) -> dict[str, Any]:
    reason = "its process has ended"
    fields = {"replica": "one", "role": "decode", "reason": reason}
    return {**fields, "num_requests": num_requests, "went_on": went_on, "number": number}


def test_loss_is_one_sentence_over_all_ingresses_and_the_new_replica_another() -> None:
    first = {"one": start("process", "ready", role="decode", seconds=7.5)}
    lost = LostReplicas(first)
    assert [*lost.hear({}, first, 0.0)] == []
    of_one = {"a-1": loss(1, {"two": 1}, 1)}
    assert [*lost.hear(of_one, first, 10.0)] == []
    of_both = {**of_one, "b-1": loss(1, {"two": 2, "three": 1}, 5)}
    assert [*lost.hear(of_both, first, 10.5)] == []
    assert [*lost.hear(of_both, first, 11.1)] == [
        "replica one (decode) was lost: its process has ended; 1 request goes on at three, 3 requests go on at two, "
        "2 requests wait for a replica, or ended; another one starts, which took 15 s before. Its log: /logs/own.log"
    ]
    begun = {"four": start("process", role="decode")}
    assert [*lost.hear(of_both, begun, 12.0)] == []
    up = {"four": start("process", "ready", role="decode")}
    assert [*lost.hear(of_both, up, 25.0)] == ["replica four (decode) is up, 14 s after the loss"]
    assert [*lost.hear(of_both, up, 26.0)] == []


@pytest.fixture(scope="module")
def served(small_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, str, Path]]:
    """The process id, the URL and the output of a server whose replicas take the seconds of a device."""
    log = tmp_path_factory.mktemp("served") / "log"
    flags = ["--device", "emulated:l4-8b", "--pools", "prefill=1,decode=2"]
    with serving(log, str(small_model_dir), *flags) as (server, url):
        yield server.pid, url, log
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=240) == 0


def replicas_of(server: int, pool: str) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(server).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if f"ray::ServeReplica:crossdock:{pool}" in " ".join(process.cmdline()):
                found.append(process)
    return found


def test_phases_of_a_start_are_told_with_their_seconds(served: tuple[int, str, Path]) -> None:
    lines = served[2].read_text().splitlines()
    told = [line for line in lines if re.fullmatch(r" *[\d.]+ s  .* \([\d.]+ s\)", line)]
    texts = [line.split(" s  ")[1].rpartition(" (")[0] for line in told]
    assert texts == ["Ray is up", "Serve is up", "processes of replicas run", "replicas are ready", "all is connected"]
    ages = [float(line.split(" s  ")[0]) for line in told]
    assert ages == sorted(ages)


def test_replica_that_is_killed_is_one_sentence_and_what_it_did_goes_on(served: tuple[int, str, Path]) -> None:
    server, url, log = served
    before = log.read_text()
    body = {"prompt": [7] * 64, "max_tokens": 600, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=240) as answer:
        events = (line for line in answer.iter_lines() if line.startswith("data: "))
        next(events)
        decodes = {each["replica"] for each in data(url, "replicas") if each["pool"] == "decode"}
        (busy,) = [each["replica"] for each in data(url, "requests") if each["replica"] in decodes]
        (victim,) = [each for each in replicas_of(server, "decode") if has_log(each, busy)]
        victim.kill()
        rest = [*events]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2] + rest[-3]

    def told() -> str:
        return log.read_text().removeprefix(before)

    eventually(lambda: REPLICA.search(told()) is not None and " is up, " in told(), told)
    match = REPLICA.search(told())
    assert match is not None
    name, role, reason, what, file = match.groups()
    assert (name, role) == (busy, "decode")
    assert reason == "its process has ended"
    assert re.fullmatch(r"1 request goes on at \w+", what)
    assert Path(file).is_file()
    assert told().count("was lost") == told().count(" is up, ") == 1
    assert len(told().splitlines()) == 2, "nothing of Ray's own"


def data(url: str, path: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{url}/v1/{path}", timeout=240).json()["data"]
    return found


def has_log(process: psutil.Process, replica: str) -> bool:
    return any(replica in file.path for file in process.open_files())


def test_client_is_told_when_to_try_again_while_nothing_can_serve(served: tuple[int, str, Path]) -> None:
    """Replicas are killed until a request was refused: a request waits for some seconds for one that is back."""
    server, url, _ = served
    answers: list[httpx.Response] = []
    was_refused = threading.Event()

    def kill_replicas() -> None:
        while not was_refused.wait(0.1):
            for pool in ("prefill", "decode"):
                for victim in replicas_of(server, pool):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        victim.kill()

    def refused() -> bool:
        answers.append(httpx.post(f"{url}/v1/completions", json={"prompt": [7], "max_tokens": 1}, timeout=240))
        return answers[-1].status_code == 503

    killing = threading.Thread(target=kill_replicas)
    killing.start()
    try:
        eventually(refused, lambda: str([answer.status_code for answer in answers]))
    finally:
        was_refused.set()
        killing.join()
    assert 1 <= int(answers[-1].headers["Retry-After"]) <= 60
    eventually(lambda: not refused(), lambda: str(answers[-1].text))
    assert answers[-1].status_code == 200
