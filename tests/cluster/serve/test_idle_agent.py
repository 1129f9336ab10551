"""The process in place of Ray's agents: its ports, the environments it makes, and Ray's own agent in the end."""

import contextlib
import http.client
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.core.generated.runtime_env_agent_pb2 import GetOrCreateRuntimeEnvReply, GetOrCreateRuntimeEnvRequest

from crossdock.cluster.serve.own_ray import idle_agent
from tests.waiting import eventually

AGENT = "import pathlib, sys; pathlib.Path(sys.argv[0]).with_suffix('.started').write_text(' '.join(sys.argv[1:]))"


@contextlib.contextmanager
def started(folder: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start what stands for the agent `agent.py` of a node."""
    (folder / "agent.py").write_text(AGENT)
    own = ["--node-id=n1", "--node-ip-address=127.0.0.1", f"--session-dir={folder}", *flags]
    command = [sys.executable, "-S", "-E", str(idle_agent.__file__), str(folder / "agent.py"), *own]
    with subprocess.Popen(command) as process:
        try:
            yield process
        finally:
            process.kill()


def asked(port: int, wanted: object) -> bytes:
    """Return the answer to a request for a runtime environment, as the raylet asks."""
    request = GetOrCreateRuntimeEnvRequest(serialized_runtime_env=json.dumps(wanted), source_process="raylet")
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
    connection.request("POST", "/get_or_create_runtime_env", request.SerializeToString())
    return connection.getresponse().read()


def test_agent_of_metrics_has_no_ports(tmp_path: Path) -> None:
    with started(tmp_path, "--grpc-port=0") as process:
        eventually((tmp_path / "dashboard_agent_listen_port_n1").exists)
        assert {path.name: path.read_text() for path in tmp_path.glob("*_port_n1")} == {
            "metrics_agent_port_n1": "-1",
            "metrics_export_port_n1": "-1",
            "dashboard_agent_listen_port_n1": "-1",
        }
        assert process.poll() is None, "the raylet ends with its agent"


def test_environment_of_variables_is_made_at_once_and_another_starts_the_agent(tmp_path: Path) -> None:
    with started(tmp_path, "--runtime-env-agent-port=0") as process:
        file = tmp_path / "runtime_env_agent_port_n1"
        eventually(file.exists)
        port = int(file.read_text())
        for value in ("few", "many" * 100):
            reply = GetOrCreateRuntimeEnvReply.FromString(asked(port, {"env_vars": {"A": value}}))
            context = json.loads(reply.serialized_runtime_env_context)
            assert (reply.status, context["env_vars"], context["py_executable"]) == (0, {"A": value}, sys.executable)
        assert not (tmp_path / "agent.started").exists()
        with pytest.raises(http.client.RemoteDisconnected):
            asked(port, {"env_vars": {}, "pip": ["numpy"]})
        assert process.wait(240) == 0
    assert f"--runtime-env-agent-port={port}" in (tmp_path / "agent.started").read_text()


@pytest.mark.parametrize(
    "said",
    [b"", b"\r\n\r\n", b"POST /get_or_create_runtime_env HTTP/1.1\r\nContent-Length: x\r\n\r\n"]
    + [b"POST /get_or_create_runtime_env HTTP/1.1\r\nContent-Length: %d\r\n\r\n\n\x7f" % length for length in (2, 9)],
)
def test_connection_that_says_no_request_does_not_end_the_agent(tmp_path: Path, said: bytes) -> None:
    with started(tmp_path, "--runtime-env-agent-port=0") as process:
        file = tmp_path / "runtime_env_agent_port_n1"
        eventually(file.exists)
        port = int(file.read_text())
        with socket.create_connection(("127.0.0.1", port), timeout=240) as stranger:
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1) == b""
        reply = GetOrCreateRuntimeEnvReply.FromString(asked(port, {"env_vars": {}}))
        assert (reply.status, process.poll()) == (0, None), "the raylet ends with its agent"
