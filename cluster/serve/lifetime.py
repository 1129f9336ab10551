"""One run of `crossdock serve`: Ray, Serve and the application start, and all of them end on SIGINT or SIGTERM."""

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
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.schema import ApplicationStatus, LoggingConfig

from crossdock.cluster.config import ClusterConfig
from crossdock.cluster.serve.app import APP_NAME, build, visible_gpus
from crossdock.cluster.serve.gpus import check_cores_suffice, check_gpus_suffice, check_memory_suffices, with_num_gpus
from crossdock.cluster.serve.own_ray.forked_replicas import forking_workers
from crossdock.cluster.serve.own_ray.ray_processes import without_unused_processes
from crossdock.cluster.serve.ray_environment import ENVIRONMENT, ON_ONE_MACHINE, is_local
from crossdock.cluster.serve.start_failure import start_reason
from crossdock.cluster.serve.stop_signals import StopRequest, StopSignal, ignore_signals
from crossdock.workers.model.loaders.objects import bytes_of_weights
from crossdock.workers.model.memory.host_memory import free_on_host
from crossdock.workers.model.weights.checkpoint import resolve_model

STARTING = ("Ray", "Serve", "replicas: model and warm-up")  # the phases of the start, in order
_ANSWER_S = 30.0  # ingresses have so long to answer what the command asks
_NO_ANSWER = TimeoutError, RayError, DeploymentUnavailableError
_DRAIN_TURN_S = 0.5  # between two looks for a signal while requests end
_LOOPBACK = "127.0.0.1"


class StartFailed(RuntimeError):
    """Ray or the application did not start; the message is Ray's or Serve's."""


def serve_forever(
    config: ClusterConfig,
    starting: Callable[[str], None],
    started: Callable[[list[dict[str, Any]]], None],
    stopping: Callable[[], None],
) -> None:
    """Start everything; end everything on SIGINT or SIGTERM.

    After SIGTERM, requests that run may end within `http.drain_timeout_s`; SIGINT, or a second signal, ends them.
    Calls `starting` with each of `STARTING` as that phase begins, `started` with what the replicas report of
    themselves, and `stopping` when a signal has come.

    Raises:
        StartFailed: Ray or the replicas cannot start; the message gives the reason.
    """
    stop, is_up = StopRequest(), False
    try:
        starting(STARTING[0])
        with _keeping_signals(stop):
            _try_to_start_ray(config)
        stop.check()
        if is_local():
            config = _on_one_node(config)
            _require_devices(config)
        location = ProxyLocation.Disabled if config.http.direct else ProxyLocation.EveryNode
        starting(STARTING[1])
        http = config.http
        options = HTTPOptions(host=http.host, port=http.port, keep_alive_timeout_s=http.keep_alive_s)
        serve.start(proxy_location=location, http_options=options)
        stop.check()
        starting(STARTING[2])
        log = LoggingConfig(enable_access_log=False)
        app = serve.RunTarget(
            build(config), name=APP_NAME, external_scaler_enabled=config.is_elastic, logging_config=log
        )
        serve.run_many([app], wait_for_applications_running=False)
        while not _is_running() or not is_connected(config.http.replicas):
            stop.wait()
        is_up = True
        started(_replicas())
        while True:
            stop.wait()
    except StopSignal:
        stopping()
        if is_up:
            _drain(config.http.drain_timeout_s, stop)
    finally:
        ignore_signals()  # an impatient second Ctrl-C must not leave processes behind
        if ray.is_initialized():
            with _no_output():  # Ray reports that it ends what it was told to end
                serve.shutdown()
                ray.shutdown()


def _try_to_start_ray(config: ClusterConfig) -> None:
    """Start Ray. Raises StartFailed with Ray's reason, e.g. that this machine was too busy to start it in 30 s."""
    try:
        start_ray(config)
    except Exception as error:  # of any kind: for a start that takes too long Ray raises a plain Exception
        raise StartFailed(f"Ray does not start: {error}") from error


def start_ray(config: ClusterConfig) -> None:
    """Start a Ray on this machine, whose ports no other machine reaches, unless RAY_ADDRESS names a cluster to join."""
    joins = not is_local()
    for name, value in (ENVIRONMENT if joins else ENVIRONMENT | ON_ONE_MACHINE).items():
        os.environ.setdefault(name, value)
    if ray.is_initialized():
        return
    if joins:
        ray.init()
        return
    ray_constants.ENABLE_RAY_CLUSTER = False  # Ray's processes read the variable; this one did so before it was set
    wanted = 1 + sum(pool.num_cpus * pool.num_ranks * pool.most for each in config.each_model for pool in each.pools)
    cores = os.cpu_count() or 1
    with without_unused_processes(), forking_workers():
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
    logging.getLogger("ray.serve").addFilter(lambda record: record.levelno >= logging.ERROR)  # Serve sets its level


def _on_one_node(config: ClusterConfig) -> ClusterConfig:
    """Return the configuration for one node: no Serve proxies; transfers on the loopback interface by default."""
    transfer = config.transfer.model_copy(update={"host": config.transfer.host or _LOOPBACK})
    http = config.http.model_copy(update={"direct": True})
    return config.model_copy(update={"http": http, "transfer": transfer})


def _require_devices(config: ClusterConfig) -> None:
    """Raise StartFailed if this machine has too few GPUs, or too few cores or bytes for several models."""
    num_gpus = visible_gpus()
    models = [with_num_gpus(each, num_gpus > 0) for each in config.each_model]
    try:
        if config.models:
            check_cores_suffice(models, os.cpu_count() or 1)
            check_memory_suffices(models, lambda model: bytes_of_weights(resolve_model(model)), free_on_host())
        check_gpus_suffice(models, num_gpus)
    except ValueError as error:
        raise StartFailed(str(error)) from None


def _is_running() -> bool:
    """Return whether every deployment is up. Raises StartFailed at a user error, or once Serve has given up."""
    app = serve.status().applications[APP_NAME]
    messages = [app.message, *(each.message for each in app.deployments.values())]
    reason = start_reason(messages, has_ended=app.status == ApplicationStatus.DEPLOY_FAILED)
    if reason is not None:
        raise StartFailed(reason)
    return bool(app.status == ApplicationStatus.RUNNING)


def is_connected(num_ingresses: int) -> bool:
    """Return whether so many ingresses have their replicas: Serve may say that these run before an ingress hears of
    them."""
    try:
        connected = serve.get_app_handle(APP_NAME).broadcast("is_connected").results(timeout_s=_ANSWER_S)
    except _NO_ANSWER:
        return False
    return all(connected) and len(connected) >= num_ingresses


def _replicas() -> list[dict[str, Any]]:
    """Return the replicas' reports of themselves; empty if they do not answer in time."""
    try:
        described: list[dict[str, Any]] = serve.get_app_handle(APP_NAME).replicas.remote().result(timeout_s=_ANSWER_S)
    except _NO_ANSWER:
        return []
    return described


def _drain(seconds: float, stop: StopRequest) -> None:
    """Have the ingresses take no further request, and finish running ones in `seconds`, or until that is urgent."""
    ingresses, deadline = serve.get_app_handle(APP_NAME), time.monotonic() + seconds
    with contextlib.suppress(*_NO_ANSWER):  # an ingress was lost: its requests are gone
        is_drained = False
        while not is_drained:
            left = 0.0 if stop.is_urgent else max(0.0, deadline - time.monotonic())
            drained = ingresses.broadcast("drain", min(left, _DRAIN_TURN_S)).results(timeout_s=_ANSWER_S)
            is_drained = all(drained) or not left


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
