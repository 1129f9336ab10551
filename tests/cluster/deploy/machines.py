"""Machines with an address, an sshd and no process in common, made of Linux namespaces on this one.

Commands that search a machine for Ray's processes and end them, such as `ray stop`, find those of their machine alone.
Each machine has its own network, processes, shared memory and /tmp. The kernel ends all of a machine's processes when
its first process ends, and with them go its network and its mounts.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from crossdock.kernels.cache import cache_dir
from tests.waiting import eventually

HOME = "/tmp/home"  # of the only user, on every machine
KEY = f"{HOME}/.ssh/id_ed25519"
NETWORK = "10.77.0"  # exists inside the namespaces alone
_NAMESPACES = ("--mount", "--net", "--pid", "--ipc", "--uts")
_START = """
set -e
hostname "$1"
mount --bind "$2" /tmp
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mount --bind /tmp/hosts /etc/hosts
mount --bind /tmp/passwd /etc/passwd
mount --bind /dev/null /etc/resolv.conf
mkdir /run/sshd
ip link set lo up
until ip link show eth0 > /dev/null 2>&1; do sleep 0.05; done
ip address add "$3/24" dev eth0
ip link set eth0 up
ip route add default via "$4"
"$5" -D -e -f /tmp/sshd_config 2> /tmp/sshd.log &
touch /tmp/is-up
wait
"""
_SSHD = """
HostKey /tmp/host_key
AuthorizedKeysFile /tmp/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
UseDNS no
StrictModes no
PidFile none
"""


def why_not() -> str | None:
    """Return why this machine cannot hold others; None if it can."""
    if os.geteuid() != 0:
        return "needs root, to make namespaces"
    tools = ("ssh", "ssh-keygen", "rsync", "ip", "unshare", "nsenter", "setpriv")
    if missing := [tool for tool in tools if shutil.which(tool) is None] + ["sshd"] * (_sshd() is None):
        return f"needs {', '.join(missing)} (Debian: openssh-server, openssh-client, rsync, iproute2, util-linux)"
    try_out = ["unshare", *_NAMESPACES, "--fork", "ip", "link", "add", "near0", "type", "veth", "peer", "name", "far0"]
    if subprocess.run(try_out, capture_output=True, check=False).returncode:
        return "the kernel allows no new namespaces, or no virtual networks"
    hidden = [path for path in (Path(__file__), Path(sys.executable)) if path.absolute().is_relative_to("/tmp")]
    return f"{hidden[0]} is in /tmp, which the machines do not share" if hidden else None


def _sshd() -> str | None:
    return shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine. `folder` is its /tmp, as seen from outside."""

    name: str
    address: str
    folder: Path
    pid: int  # of its first process, as seen from outside

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def command(self, script: str) -> list[str]:
        """Return the command that runs a script in a login shell on this machine, in the home directory."""
        enter = ["nsenter", "--target", str(self.pid), "--mount", "--net", "--pid", "--ipc", "--uts"]
        clean = ["env", "--ignore-environment", f"HOME={HOME}", "TERM=dumb"]
        return [*enter, *clean, "bash", "--login", "-c", f"cd; {script}"]

    def run(self, script: str, timeout: float = 240) -> str:
        """Run a script, and return what it prints.

        Raises:
            AssertionError: it fails, or takes longer than `timeout` seconds.
        """
        try:
            done = subprocess.run(
                self.command(script), capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"{self.name}$ {script}\ntook too long\n{error.stdout!r}\n{error.stderr!r}") from None
        assert done.returncode == 0, f"{self.name}$ {script}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def processes(self, name: str) -> list[int]:
        """Return the processes with this text in their command line, as numbered on this machine."""
        listed = self.run("ps -eo pid=,args= -ww").splitlines()
        return [int(line.split()[0]) for line in listed if name in line and "ps -eo" not in line]


@contextmanager
def machines(folder: Path, names: list[str], environment: Mapping[str, str]) -> Iterator[dict[str, Machine]]:
    """Start machines that reach each other, and end them with all their processes. The first one is the switch of their
    network too. `environment`: variables of every shell."""
    with ExitStack() as stack:
        made: dict[str, Machine] = {}
        addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(names, 1)}
        key = folder / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        for name, address in addresses.items():
            _fill(folder / name, addresses, key, environment)
            made[name] = stack.enter_context(_machine(folder / name, name, address))
        switch = made[names[0]]
        _on_network(switch, "link", "add", "switch", "type", "bridge")
        _on_network(switch, "link", "set", "switch", "up")
        for name, machine in made.items():
            far = ("peer", "name", "eth0", "netns", str(machine.pid))
            _on_network(switch, "link", "add", f"to-{name}", "type", "veth", *far)
            _on_network(switch, "link", "set", f"to-{name}", "master", "switch", "up")
        for machine in made.values():
            _wait_until_up(machine)
        yield made


def _fill(folder: Path, addresses: Mapping[str, str], key: Path, environment: Mapping[str, str]) -> None:
    """Write what a machine has in its /tmp when it starts."""
    (folder / "home/.ssh").mkdir(parents=True)
    folder.chmod(0o1777)
    shutil.copy(key, folder / "home/.ssh/id_ed25519")
    shutil.copy(key, folder / "host_key")
    shutil.copy(key.with_suffix(".pub"), folder / "authorized_keys")
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{ip} {name}\n" for name, ip in addresses.items()))
    (folder / "sshd_config").write_text(_SSHD)
    users = [user for user in Path("/etc/passwd").read_text().splitlines() if not user.startswith("root:")]
    (folder / "passwd").write_text("\n".join([f"root:x:0:0:root:{HOME}:/bin/bash", *users]) + "\n")
    given = {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "CROSSDOCK_CACHE": str(cache_dir()),  # has the kernels compiled
        **({"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}),
        **environment,
    }
    exports = "".join(f"export {name}='{value}'\n" for name, value in given.items())
    (folder / "home/.bashrc").write_text(exports)
    (folder / "home/.bash_profile").write_text("source ~/.bashrc\n")


@contextmanager
def _machine(folder: Path, name: str, address: str) -> Iterator[Machine]:
    sshd = _sshd()
    assert sshd is not None
    outer = ["setpriv", "--pdeathsig", "KILL", "unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
    start = ["bash", "-c", _START, "machine", name, str(folder), address, f"{NETWORK}.254", sshd]
    process = psutil.Popen([*outer, *start], stdin=subprocess.DEVNULL)
    try:
        eventually(lambda: process.children() or process.poll() is not None, f"{name} did not start")
        yield Machine(name, address, folder, process.children()[0].pid)
    finally:
        process.kill()  # its child is killed with it, and by that all processes of the machine
        process.wait()


def _on_network(machine: Machine, *arguments: str) -> None:
    enter = ["nsenter", "--target", str(machine.pid), "--net"]
    subprocess.run([*enter, "ip", *arguments], check=True)


def _wait_until_up(machine: Machine) -> None:
    eventually((machine.folder / "is-up").exists, f"{machine.name} does not come up")
