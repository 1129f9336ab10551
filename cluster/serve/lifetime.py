"""One run of `crossdock serve`: Ray, Serve and the application start, and end on SIGINT or SIGTERM.

On a cluster that was joined, the application alone ends: Serve and Ray are others' as well.
"""

import contextlib
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray import serve
from ray._private import ray_constants
from ray._private import utils as ray_utils
from ray.exceptions import RayError
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.exceptions import RayServeException

from crossdock.cluster.config import ClusterConfig
from crossdock.cluster.serve import shared_cluster
from crossdock.cluster.serve.address import Address
from crossdock.cluster.serve.app import visible_gpus
from crossdock.cluster.serve.application import Application, Lost
from crossdock.cluster.serve.gpus import with_num_gpus
from crossdock.cluster.serve.lost_replicas import LostReplicas
from crossdock.cluster.serve.own_ray.closed_files import closed_to_other_users
from crossdock.cluster.serve.own_ray.forked_replicas import forking_workers
from crossdock.cluster.serve.own_ray.ray_noise import without_noise
from crossdock.cluster.serve.own_ray.ray_processes import without_unused_processes
from crossdock.cluster.serve.ray_environment import ENVIRONMENT, ON_ONE_MACHINE, is_local
from crossdock.cluster.serve.room import RoomWatch, lacking_room
from crossdock.cluster.serve.start_phases import StartPhases
from crossdock.cluster.serve.stop_signals import StopRequest, StopSignal, ignore_signals
from crossdock.workers.replica.serving.notices import read_notices

STARTING = ("Ray", "Serve", "replicas: model and warm-up")  # the phases of the start, in order
_LOOK_S = 5.0  # between two looks whether the application is still ours, on a cluster that was joined
_READ_S = 1.0  # between two looks whether a replica was lost
_LOOPBACK = "127.0.0.1"


class StartFailed(RuntimeError):
    """Ray or the application did not start, or the application was lost; the message is Ray's, Serve's or ours."""


def serve_forever(
    config: ClusterConfig,
    starting: Callable[[str], None],
    started: Callable[[list[dict[str, Any]], Address], None],
    stopping: Callable[[], None],
    tell: Callable[[str], None] = lambda line: None,
    show: Callable[[str], None] = lambda text: None,
) -> None:
    """Start everything; end what was started on SIGINT or SIGTERM.

    After SIGTERM, requests that run may end within `http.drain_timeout_s`; SIGINT, or a second signal, ends them.
    Calls `starting` with each of `STARTING` as that phase begins, `started` with what the replicas report of
    themselves and where the API is, and `stopping` when a signal has come. `tell` gets a line for each phase that has
    ended, and later for each replica that is lost or comes back; `show` what replicas do while they start.

    Raises:
        StartFailed: Ray or the replicas cannot start, or others have deleted or replaced the application.
    """
    stop = StopRequest()
    is_own = is_local()
    application: Application | None = None
    is_up = False
    num_replicas = sum(max(pool.replicas, 1) for each in config.each_model for pool in each.pools)
    phases = StartPhases(num_replicas, time.monotonic())
    try:
        starting(STARTING[0])
        with _keeping_signals(stop):
            _try_to_start_ray(config)
        tell(phases.ended("Ray is up", time.monotonic()))
        stop.check()
        if is_own:
            config = _on_one_node(config)
        starting(STARTING[1])
        config = _start_serve(config)
        tell(phases.ended("Serve is up", time.monotonic()))
        stop.check()
        starting(STARTING[2])
        application = Application(config)
        application.deploy()
        room = RoomWatch(time.monotonic(), config.application.room_timeout_s)
        while not application.is_up():
            starts = _tell_phases(application, phases, tell, show)
            if len(starts) < num_replicas and room.is_due(time.monotonic()):
                _tell_of_room(config, room, tell)
            stop.wait()
        starts = _tell_phases(application, phases, tell, show)
        tell(phases.ended("all is connected", time.monotonic()))
        is_up = True
        started(application.replicas(), _address(config))
        _stay(stop, application, LostReplicas(starts), tell)
    except StopSignal:
        stopping()
        if application is not None and is_up:
            application.drain(config.http.drain_timeout_s, stop)
    except (Lost, RayServeException, RayError) as error:
        raise StartFailed(str(getattr(error, "cause", None) or error)) from None
    finally:
        _end(application, stop, is_own)


def _end(application: Application | None, stop: StopRequest, is_own: bool) -> None:
    """End Ray with all that runs on it, or of a cluster that was joined our application alone."""
    if is_own:
        ignore_signals()  # an impatient second Ctrl-C must not leave processes behind
    if not ray.is_initialized():
        return
    with _no_output():  # Ray reports that it ends what it was told to end
        try:
            if is_own:
                serve.shutdown()
            elif application is not None:
                application.delete(stop)
        except Lost as error:
            raise StartFailed(str(error)) from None
        finally:
            ignore_signals()
            ray.shutdown()


def _start_serve(config: ClusterConfig) -> ClusterConfig:
    """Start Serve, or join the one that runs. Return the configuration with the address at which it listens.

    Raises:
        StartFailed: the application's name or route is taken, or Serve does not listen as the configuration says.
    """
    http = config.http
    location = ProxyLocation.Disabled if http.direct else ProxyLocation.EveryNode
    options = HTTPOptions(host=http.host, port=http.port, keep_alive_timeout_s=http.keep_alive_s)
    try:
        serve.start(proxy_location=location, http_options=options)
        if is_local():
            return config
        found = shared_cluster.details()
        shared_cluster.require_room(config, found)
        return shared_cluster.with_proxies(config, shared_cluster.http_options(), found)
    except (ValueError, TimeoutError) as error:
        raise StartFailed(str(error)) from None


def _address(config: ClusterConfig) -> Address:
    """Return where clients reach the API."""
    if is_local():
        return Address.of(config)
    nodes = shared_cluster.listening_nodes(config, shared_cluster.details())
    return Address.of(config, nodes, ray.util.get_node_ip_address())


def _tell_phases(
    application: Application, phases: StartPhases, tell: Callable[[str], None], show: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Tell which phases replicas have ended since the last call. Returns the notices of these replicas."""
    starts = read_notices(application.name, "start")
    for line in phases.of_replicas(starts, time.monotonic()):
        tell(line)
    show(phases.now_in(starts))
    return starts


def _tell_of_room(config: ClusterConfig, room: RoomWatch, tell: Callable[[str], None]) -> None:
    """Tell what replicas wait for that no machine has free. Raises StartFailed: they have waited for too long."""
    models = [with_num_gpus(each, visible_gpus() > 0) for each in config.each_model]
    waiting = list(lacking_room(models, shared_cluster.unplaced(), shared_cluster.machines()))
    try:
        for line in room.hear(waiting, time.monotonic()):
            tell(line)
    except TimeoutError as error:
        raise StartFailed(str(error)) from None


def _stay(stop: StopRequest, application: Application, lost: LostReplicas, tell: Callable[[str], None]) -> None:
    """Wait for a signal, and tell of replicas that are lost and that come back.

    Raises:
        Lost: others have taken the application of a joined cluster away.
    """
    looked_at = read_at = time.monotonic()
    while True:
        stop.wait()
        if (now := time.monotonic()) - read_at > _READ_S:
            read_at = now
            losses, starts = (read_notices(application.name, subject) for subject in ("loss", "start"))
            for line in lost.hear(losses, starts, now):
                tell(line)
        if not is_local() and time.monotonic() - looked_at > _LOOK_S:
            application.require_ours()
            looked_at = time.monotonic()


def _try_to_start_ray(config: ClusterConfig) -> None:
    """Start Ray. Raises StartFailed with Ray's reason, e.g. that this machine was too busy to start it."""
    try:
        start_ray(config)
    except Exception as error:  # of any kind: for a start that takes too long Ray raises a plain Exception
        reason = f"Ray does not start: {error}" if is_local() else shared_cluster.join_failure(error)
        raise StartFailed(reason) from error


def start_ray(config: ClusterConfig) -> None:
    """Start a Ray on this machine, whose ports no other machine reaches, unless RAY_ADDRESS names a cluster to join."""
    joins = not is_local()
    for name, value in (ENVIRONMENT if joins else ENVIRONMENT | ON_ONE_MACHINE).items():
        os.environ.setdefault(name, value)
    if ray.is_initialized():
        return
    if joins:
        shared_cluster.ask_once()
        # Else this process would show the logs of all applications of the cluster.
        ray.init(log_to_driver=False, configure_logging=False)
        return
    ray_constants.ENABLE_RAY_CLUSTER = False  # Ray's processes read the variable; this one did so before it was set
    wanted = 1 + sum(pool.num_cpus * pool.num_ranks * pool.most for each in config.each_model for pool in each.pools)
    cores = os.cpu_count() or 1
    with without_unused_processes(), forking_workers(), closed_to_other_users():
        ray.init(
            address="local",
            _node_ip_address=_LOOPBACK,
            num_cpus=cores if config.models else max(cores, wanted),  # several models divide what there is
            include_dashboard=False,
            object_store_memory=80 << 20,  # tokens travel in messages, not in the object store
            log_to_driver=False,
            configure_logging=False,
        )


def quieten() -> None:
    """Silence what Ray, Serve and libraries report about themselves in this process. Errors are still seen."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("ray").setLevel(logging.ERROR)
    if is_local():
        without_noise()
    logging.getLogger("ray.serve").addFilter(lambda record: record.levelno >= logging.ERROR)  # Serve sets its level


def _on_one_node(config: ClusterConfig) -> ClusterConfig:
    """Return the configuration for one node: no Serve proxies; transfers on the loopback interface by default."""
    transfer = config.transfer.model_copy(update={"host": config.transfer.host or _LOOPBACK})
    http = config.http.model_copy(update={"direct": True})
    return config.model_copy(update={"http": http, "transfer": transfer})


@contextlib.contextmanager
def _keeping_signals(stop: StopRequest) -> Iterator[None]:
    """Keep SIGTERM in the hands of `stop` while Ray starts, which takes it twice.

    Ray's Python handler would raise SystemExit anywhere, so it is not installed. Ray's C++ handler prints a stack and
    calls ours: what is written to stderr meanwhile is held, and shown afterwards unless a signal has come.
    """
    install, ray_utils.set_sigterm_handler = ray_utils.set_sigterm_handler, lambda handler: None
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            stop.listen()
            ray_utils.set_sigterm_handler = install
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            held.seek(0)
            if not stop.has_come:
                os.write(2, held.read())


@contextlib.contextmanager
def _no_output() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield
