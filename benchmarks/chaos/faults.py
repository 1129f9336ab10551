"""Faults of processes: killed, stopped for a while, drained, replaced; and which of them may happen now."""

import asyncio
import collections
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from statistics import median

import httpx
import psutil
from fleet import INGRESSES, NodeFleet
from streams import POISON, Clients, Exchange, Reader, Told

SHORT_PAUSES_S = (0.3, 1.0, 3.0, 6.0)
LONG_PAUSES_S = (11.0, 14.0)  # longer than the 10 s of silence after which a replica counts as lost
_WHOLE_WITHIN_S = 240.0


@dataclass(slots=True)
class Chaos:
    """Causes faults in a fleet, and counts them."""

    fleet: NodeFleet
    clients: Clients
    rng: random.Random
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    repairs: dict[str, list[float]] = field(default_factory=dict)  # seconds until the pools were whole, by fault
    problems: list[str] = field(default_factory=list)
    _paused: dict[str, psutil.Process] = field(default_factory=dict)  # by deployment: one at a time
    _pausing: list[threading.Thread] = field(default_factory=list)

    def begin(self, fault: "Fault") -> bool:
        """Cause a fault; False where that may not happen now. A fleet that does not become whole is a problem."""
        try:
            return fault(self)
        except TimeoutError as late:
            self.problems.append(f"{late}")
            print("PROBLEM", late, flush=True)
            return True

    # -- what may happen now -------------------------------------------------------------------------------------------

    def is_spare(self, pool: str) -> bool:
        """Return whether the pool can lose a replica now and still serve."""
        listed = self.fleet.listed()[pool] - (pool in self._paused)
        return listed > 1 and len(self.fleet.processes(pool)) > 1

    def is_ingress_spare(self) -> bool:
        return "ingress" not in self._paused and self.fleet.num_listeners() == INGRESSES

    # -- kills ---------------------------------------------------------------------------------------------------------

    def kill(self, pool: str) -> bool:
        """Kill one replica of the pool, where that leaves another."""
        if not self.is_spare(pool):
            return False
        self._end(self._victim(pool))
        self.counts[f"{pool} replica killed"] += 1
        return True

    def kill_pair(self) -> bool:
        """Kill a prefill and a decode replica at the same moment."""
        if not (self.is_spare("prefill") and self.is_spare("decode")):
            return False
        for victim in (self._victim("prefill"), self._victim("decode")):
            self._end(victim)
        self.counts["prefill and decode replica killed together"] += 1
        return True

    def kill_ingress(self) -> bool:
        """Kill an ingress. Its connections, which end with it, are noted first: they are listed while it is stopped."""
        if not self.is_ingress_spare():
            return False
        victim = self._victim("ingress")
        with suppress(psutil.NoSuchProcess):
            victim.suspend()
            self.clients.cut_ports |= set(_client_ports(victim, self.fleet.port))
            self.clients.ingress_ended_at = inf
            self._end(victim)
            psutil.wait_procs([victim], timeout=20)  # it accepts connections until the kernel has taken it down
            self.clients.ingress_ended_at = time.monotonic()
        self.counts["ingress killed"] += 1
        return True

    def _victim(self, deployment: str) -> psutil.Process:
        return self.rng.choice([p for p in self.fleet.processes(deployment) if p != self._paused.get(deployment)])

    def _end(self, process: psutil.Process) -> None:
        with suppress(psutil.NoSuchProcess):
            process.kill()

    # -- pauses --------------------------------------------------------------------------------------------------------

    def pause(self, deployment: str, seconds: float) -> bool:
        """Stop a process, and let it go on after a while. Returns at once."""
        if deployment in self._paused:
            return False
        if not (self.is_ingress_spare() if deployment == "ingress" else self.is_spare(deployment)):
            return False
        process = self._paused[deployment] = self._victim(deployment)

        def run() -> None:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)
                time.sleep(seconds)
                process.send_signal(signal.SIGCONT)
            del self._paused[deployment]

        self._pausing = [thread for thread in self._pausing if thread.is_alive()]
        self._pausing.append(threading.Thread(target=run, daemon=True))
        self._pausing[-1].start()
        length = "longer than the silence" if seconds > 10 else "shorter than the silence"
        self.counts[f"{deployment} stopped for {length} (10 s)"] += 1
        return True

    def wait_for_pauses(self) -> None:
        for thread in self._pausing:
            thread.join()

    # -- files of tiers ------------------------------------------------------------------------------------------------

    def spoil_files(self) -> bool:
        """Change, cut, or remove some of the files in which pages lie; False where there are none yet."""
        folder, _, _ = self.fleet.settings["engine.kv_cache_files"].rpartition(",")
        files = [path for path in Path(folder).glob("*/*/*") if not path.name.startswith(".")]
        if not files:
            return False
        for path in self.rng.sample(files, min(len(files), self.rng.choice([1, 8, 64]))):
            kind = self.rng.choice(["changed", "cut", "removed"])
            with suppress(FileNotFoundError):  # a replica was faster
                size = path.stat().st_size
                if kind == "removed":
                    path.unlink()
                elif kind == "cut":
                    os.truncate(path, self.rng.randrange(size))
                else:
                    with path.open("r+b") as file:
                        file.seek(self.rng.randrange(size))
                        file.write(bytes([self.rng.randrange(256)]))
                self.counts[f"file of a tier {kind}"] += 1
        return True

    # -- adapters ------------------------------------------------------------------------------------------------------

    def reload_adapter(self) -> bool:
        """Unload an adapter, and load the adapter again a moment later."""
        name = self.rng.choice(sorted(self.fleet.settings["model.lora_modules"]))
        for action, body in (("unload", {}), ("load", {"lora_path": name})):
            answer = httpx.post(
                f"{self.fleet.url}/v1/{action}_lora_adapter", json={"lora_name": name} | body, timeout=60
            )
            if answer.status_code != 200:
                self.problems.append(f"{action} of {name}: {answer.status_code} {answer.text[:200]}")
            self.counts[f"adapter {action}ed"] += 1
            time.sleep(self.rng.uniform(0, 0.3))
        return True

    # -- the whole deployment ------------------------------------------------------------------------------------------

    @contextmanager
    def repaired(self, name: str) -> Iterator[None]:
        """Begin when the fleet is whole; count the fault; end when the fleet is whole again."""
        self.wait_for_pauses()
        self.fleet.wait_until_whole(_WHOLE_WITHIN_S)
        yield
        self.counts[name] += 1
        began = time.monotonic()
        time.sleep(1.5)  # until Serve has noticed a loss
        self.fleet.wait_until_whole(_WHOLE_WITHIN_S)
        self.repairs.setdefault(name, []).append(time.monotonic() - began)

    def lose_node(self) -> bool:
        with self.repaired("node of replicas lost"):
            self.fleet.lose_node(self.rng)
        return True

    def restart_gcs(self) -> bool:
        with self.repaired("GCS killed and restarted"):
            self.fleet.cluster.head_node.kill_gcs_server()
            time.sleep(self.rng.choice([0.5, 2]))
            self.fleet.cluster.head_node.start_gcs_server()
        return True

    def upgrade(self) -> bool:
        """Deploy another token budget, so that every replica of every deployment is replaced, one by one."""
        with self.repaired("rolling upgrade"):
            self.fleet.deploy(256 if self.fleet.budget != 256 else 192)
        return True

    def drain(self) -> bool:
        """Make a pool smaller, and larger again when the surplus replica has ended."""
        pool = self.rng.choice([pool for pool, replicas in self.fleet.pools.items() if replicas > 1])
        with self.repaired(f"{pool} replica drained"):
            replicas = self.fleet.pools[pool]
            self.fleet.resize(pool, replicas - 1)
            deadline = time.monotonic() + 60
            while len(self.fleet.processes(pool)) >= replicas:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{pool} did not shrink in 60 s")
                time.sleep(0.3)
            self.fleet.resize(pool, replicas)
        return True

    def flip(self) -> bool:
        """Assign another role to a replica for some seconds."""
        with self.repaired("role of a replica flipped, and back"):
            pool, other = self.rng.choice([("prefill", "decode"), ("decode", "prefill"), ("decode", "mixed")])
            replica = self.rng.choice([r["replica"] for r in self.fleet.replicas() if r["pool"] == pool])
            self.fleet.assign_role(pool, replica, other)
            time.sleep(self.rng.uniform(1, 4))
            self.fleet.assign_role(pool, replica, pool)
        return True

    def poison(self) -> bool:
        """Send a prompt that kills each replica that receives it. It must end in an error that invites no retry."""
        with self.repaired("poison request"):
            before = sum(len(self.fleet.processes(pool)) for pool in self.fleet.pools)
            body = {"model": "tiny", "prompt": [200, *POISON, 201], "max_tokens": 8, "stream": True}
            try:
                asyncio.run(Exchange(self.fleet.port, Reader()).run(body))
                problem: str | None = "was served"
            except Told as told:
                problem = None if told.is_suspect else f"was told {told}"
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            killed = before - sum(len(self.fleet.processes(pool)) for pool in self.fleet.pools)
            self.counts["replica killed by poison"] += max(0, killed)
            if problem:
                self.problems.append(f"poison: {problem}")
                print("PROBLEM", self.problems[-1], flush=True)
        return True


def _client_ports(server: psutil.Process, port: int) -> Iterator[int]:
    """Yield the clients' ports of all connections to a process, and of those that no process has accepted yet."""
    for connection in server.net_connections("tcp"):
        if connection.laddr.port == port and connection.raddr:
            yield connection.raddr.port
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, *_, inode = line.split()[:10]
        if local.endswith(f":{port:04X}") and state == "01" and inode == "0":
            yield int(remote.split(":")[1], 16)


Fault = Callable[[Chaos], bool]
"""Returns False where the fault may not happen now."""

FAULTS: dict[str, list[tuple[float, Fault]]] = {  # by the name in --faults: faults, each with its share
    "kill": [
        (3, lambda chaos: chaos.kill("prefill")),
        (4, lambda chaos: chaos.kill("decode")),
        (1, Chaos.kill_pair),
    ],
    "ingress": [
        (1, Chaos.kill_ingress),
        (1, lambda chaos: chaos.pause("ingress", chaos.rng.choice(LONG_PAUSES_S))),
        (2, lambda chaos: chaos.pause("ingress", chaos.rng.choice(SHORT_PAUSES_S))),
    ],
    "pause": [
        (4, lambda chaos: chaos.pause("prefill", chaos.rng.choice(SHORT_PAUSES_S))),
        (4, lambda chaos: chaos.pause("decode", chaos.rng.choice(SHORT_PAUSES_S))),
        (1, lambda chaos: chaos.pause("prefill", chaos.rng.choice(LONG_PAUSES_S))),
        (1, lambda chaos: chaos.pause("decode", chaos.rng.choice(LONG_PAUSES_S))),
    ],
    "nodes": [(2, Chaos.lose_node), (1, Chaos.restart_gcs)],
    "changes": [(1, Chaos.upgrade), (2, Chaos.drain), (3, Chaos.flip)],
    "upgrades": [(1, Chaos.upgrade)],
    "poison": [(1, Chaos.poison)],
    "adapters": [(24, Chaos.reload_adapter)],
    "tiers": [(6, Chaos.spoil_files)],
}


def rows(chaos: Chaos, others: dict[str, int]) -> Iterator[list[str]]:
    """Yield the rows of the table of faults."""
    for name, count in [*sorted(chaos.counts.items()), *sorted(others.items())]:
        repair = chaos.repairs.get(name)
        seconds = [f"{median(repair):.0f} s", f"{max(repair):.0f} s"] if repair else ["", ""]
        yield [name, str(count), *seconds]
