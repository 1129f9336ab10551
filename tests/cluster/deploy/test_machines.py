"""Machines made of namespaces: they reach each other by SSH, see no process of others, and leave nothing."""

import socket
from pathlib import Path

import psutil
import pytest

from tests.cluster.deploy.machines import HOME, KEY, NETWORK, machines, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
SSH = f"ssh -i {KEY} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o IdentitiesOnly=yes root@"


def sleeping() -> list[psutil.Process]:
    return [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", "1234"]]


def test_machines_reach_each_other_alone_and_leave_nothing(tmp_path: Path) -> None:
    had_keys = (Path.home() / ".ssh").exists()
    with machines(tmp_path, ["laptop", "one", "two"], {"GREETING": "hello"}) as made:
        laptop, one, two = made.values()
        command = f"""{SSH}{one.address} 'source ~/.bashrc; echo "$GREETING $HOME $(hostname) $(hostname -I)"'"""
        assert laptop.run(command).split() == ["hello", HOME, "one", f"{NETWORK}.2"]
        two.run("setsid sleep 1234 < /dev/null > /dev/null 2>&1 & touch /dev/shm/mine ~/mine")
        assert len(two.processes("sleep 1234")) == 1
        assert one.processes("sleep 1234") == laptop.processes("sleep 1234") == []
        assert one.run("ls /dev/shm") == ""
        assert (two.home / "mine").exists()
        assert not (one.home / "mine").exists()
        with pytest.raises(AssertionError, match="no such command"):
            one.run("echo no such command >&2; exit 3")
        assert len(sleeping()) == 1, "this machine sees the processes of the others"
    assert sleeping() == []
    assert not Path("/dev/shm/mine").exists()
    assert "switch" not in [name for _, name in socket.if_nameindex()]
    assert not (Path.home() / "mine").exists()
    assert (Path.home() / ".ssh").exists() == had_keys
