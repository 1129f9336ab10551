"""The Serve of a Ray cluster that others use: which names, routes and ports are taken, and by whom.

Nothing here changes the cluster, but for the end of actors that wait for a machine.
"""

import contextlib
import os
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from typing import Any

import ray
from ray._private.services import canonicalize_bootstrap_address
from ray._private.state import available_resources_per_node, state
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # of a compiled module
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.exceptions import RayTaskError
from ray.serve._private.client import ServeControllerClient
from ray.serve._private.common import ReplicaID
from ray.serve._private.constants import SERVE_NAMESPACE
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client
from ray.serve.generated.serve_pb2 import DeploymentRoute
from ray.serve.schema import APIType, ApplicationStatus, ProxyLocation, ProxyStatus

from crossdock.cluster.config import ClusterConfig
from crossdock.cluster.serve.app import INGRESS_NAME
from crossdock.cluster.serve.room import Demand, Machine

_STATUS_S = 10  # Ray has so long to tell what it has placed nowhere
_ANSWER_S = 30.0  # Serve's controller has so long to answer
_VERSION = "crossdock-serve-"  # how the versions of ingresses begin that the command deploys
_ASKS_FOR_TOKEN = "InvalidAuthToken"  # in what Ray reports of a join without the cluster's token


def details() -> dict[str, Any]:
    """Return the applications and proxies that Serve's controller knows, as `ray.serve.schema` has them."""
    found: dict[str, Any] = ray.get(_client()._controller.get_serve_instance_details.remote(), timeout=_ANSWER_S)
    return found


def http_options() -> HTTPOptions:
    """Return the options with which Serve's proxies were started."""
    return ray.get(_client()._controller.get_http_config.remote(), timeout=_ANSWER_S)


def new_version() -> str:
    """Return a version for an ingress that names the job which deploys it: Serve does not tell who deployed what."""
    return f"{_VERSION}{ray.get_runtime_context().get_job_id()}-{uuid.uuid4().hex}"


def version_of(application: str) -> str | None:
    """Return the version of an application's ingress; None: it has none, which is a deployment named as ours."""
    asking = _client()._controller.get_deployment_info.remote(INGRESS_NAME, application)
    try:
        found: str = DeploymentRoute.FromString(ray.get(asking, timeout=_ANSWER_S)).deployment_info.version
    except RayTaskError:  # a KeyError: no such deployment
        return None
    return found


def _client() -> ServeControllerClient:
    client = _get_global_client()
    assert client is not None  # else the call has raised
    return client


def ask_once() -> None:
    """Ask the cluster that RAY_ADDRESS names whether it can be joined.

    `ray.init` asks 20 times, also a cluster that refuses the token at once, and where nothing answers, which each time
    takes 40 s to find out.

    Raises:
        ray.exceptions.RayError: the cluster refuses the token, or does not answer.
    """
    if "://" not in os.environ["RAY_ADDRESS"]:  # else it names a server of Ray Client
        GcsClient(address=canonicalize_bootstrap_address(None))


def join_failure(error: BaseException) -> str:
    """Return why a Ray cluster could not be joined, and what to set where the cluster asks for a token."""
    address = os.environ.get("RAY_ADDRESS", "")
    causes: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        causes.append(str(cause))
        cause = cause.__cause__ or cause.__context__
    if any(_ASKS_FOR_TOKEN in text for text in causes):
        has_mode = os.environ.get("RAY_AUTH_MODE") == "token"
        wanted = "another token than the one of this process" if has_mode else "a token"
        mode = "" if has_mode else "set RAY_AUTH_MODE=token, and "
        return (
            f"RAY_ADDRESS={address}: the cluster asks for {wanted}: {mode}put the cluster's token into "
            f"~/.ray/auth_token or RAY_AUTH_TOKEN"
        )
    return f"RAY_ADDRESS={address}: the cluster cannot be joined: {causes[0]}"


def unplaced() -> list[Demand]:
    """Return the demands of actors and groups that Ray has placed nowhere; empty where Ray does not say."""
    try:
        found = get_cluster_status(ray.get_runtime_context().gcs_address, timeout=_STATUS_S).resource_demands
    except Exception:  # Ray raises all kinds
        return []
    actors = [
        Demand(request.bundle, request.count)
        for demand in found.ray_task_actor_demand
        for request in demand.bundles_by_count
    ]
    groups = [
        Demand(sum((Counter(each.bundle) for each in group.bundles_by_count for _ in range(each.count)), Counter()), 1)
        for group in found.placement_group_demand
    ]
    return actors + groups


def end_unplaced_actors(application: str) -> None:
    """End the replicas of an application whose actors no machine runs yet. Serve must be deleting the application."""
    for actor in state.actor_table(None, actor_state_name="PENDING_CREATION").values():
        name = actor["Name"]
        if ReplicaID.is_full_id_str(name) and ReplicaID.from_full_id_str(name).deployment_id.app_name == application:
            with contextlib.suppress(ValueError):  # it has ended meanwhile
                ray.kill(ray.get_actor(name, SERVE_NAMESPACE))


def machines() -> list[Machine]:
    """Return the machines of the cluster that are alive."""
    free = available_resources_per_node()
    return [
        Machine(node["Resources"], free.get(node["NodeID"], {}), node.get("Labels") or {})
        for node in ray.nodes()
        if node["Alive"]
    ]


# -- what is taken -----------------------------------------------------------------------------------------------------


def require_room(config: ClusterConfig, found: Mapping[str, Any]) -> None:
    """Check that the application's name and its route are free. `found`: the controller's details.

    Raises:
        ValueError: one of them is taken; the message says by whom, and what to set.
    """
    application = config.application
    taken = found["applications"].get(application.name)
    if taken is not None:
        raise ValueError(
            f"application.name: the cluster has an application {application.name!r} already, {_owner(taken)}. Choose "
            f"another name and route (--app-name, --route-prefix), or remove that one: {_removal(taken)}"
        )
    if config.http.direct:
        return  # no proxy routes to it
    for other in found["applications"].values():
        if other["route_prefix"] == application.route_prefix and other["status"] != ApplicationStatus.DELETING:
            raise ValueError(
                f"application.route_prefix: {application.route_prefix!r} is the route of the application "
                f"{other['name']!r}, {_owner(other)}. Choose another with --route-prefix, such as "
                f"/{application.name}"
            )


def _owner(application: Mapping[str, Any]) -> str:
    """Return who deployed an application, and when."""
    if application["status"] == ApplicationStatus.DELETING:
        return "which is being deleted: try again when it is gone"
    since = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(application["last_deployed_time_s"]))
    if application["source"] == APIType.DECLARATIVE:
        path = (application.get("deployed_app_config") or {}).get("import_path", "")
        return f"deployed at {since} from a Serve config file (import_path {path})"
    version = version_of(application["name"]) or ""
    known = [job for job in state.job_table() if version.startswith(f"{_VERSION}{job['JobID']}-")]
    if not known:
        return f"deployed at {since}"
    by = f"process {known[0]['DriverPid']} of {known[0]['DriverIPAddress']}"
    return f"deployed at {since} by {by}, which {'has ended' if known[0]['IsDead'] else 'runs'}"


def _removal(application: Mapping[str, Any]) -> str:
    if application["source"] == APIType.DECLARATIVE:
        return "take it out of that file, and deploy the file again"
    return removal(application["name"])


def removal(name: str) -> str:
    """Return the command that removes an application from the cluster that RAY_ADDRESS names."""
    return _command(f"serve.delete({name!r})")


def _command(code: str) -> str:
    """Return a line for a shell that runs a call of Serve on the cluster: Ray has no command that deletes one."""
    return f'RAY_ADDRESS={os.environ.get("RAY_ADDRESS", "")} python -c "from ray import serve; {code}"'


# -- where Serve listens -----------------------------------------------------------------------------------------------


def with_proxies(config: ClusterConfig, options: HTTPOptions, found: Mapping[str, Any]) -> ClusterConfig:
    """Return the configuration with the host and the port at which Serve's proxies listen.

    A Serve that runs keeps the options of its start. `found`: the controller's details.

    Raises:
        ValueError: the configuration names another host, port or limit; or there are no proxies.
    """
    http = config.http
    if http.direct:
        if found.get("proxies") and http.port == options.port:
            raise ValueError(f"http.port: Serve's proxies listen on {http.port}; with http.direct choose another port")
        return config
    if found["proxy_location"] in (ProxyLocation.Disabled, None):
        raise ValueError(
            "http.direct: Serve runs on this cluster without proxies (proxy_location: Disabled), so nothing would "
            "listen for this application; http.direct: true lets its ingresses listen themselves"
        )
    end = "" if found["applications"] else f". No application uses them now; end them: {_command('serve.shutdown()')}"
    runs = {"host": options.host, "port": options.port, "keep_alive_s": options.keep_alive_timeout_s}
    for name, value in runs.items():
        if name in http.model_fields_set and not _is_same(getattr(http, name), value):
            raise ValueError(
                f"http.{name}: Serve's proxies were started with {value!r}, which holds for all applications of the "
                f"cluster, not {getattr(http, name)!r}; leave it out{end}"
            )
    return config.model_copy(update={"http": http.model_copy(update=runs)})


def _is_same(wanted: Any, runs: Any) -> bool:
    return wanted == runs or {wanted, runs} <= {"localhost", "127.0.0.1"}


def listening_nodes(config: ClusterConfig, found: Mapping[str, Any]) -> list[str]:
    """Return the addresses of the nodes on which clients reach the application. `found`: the controller's details."""
    if config.http.direct:
        replicas = found["applications"][config.application.name]["deployments"][INGRESS_NAME]["replicas"]
        return sorted({replica["node_ip"] for replica in replicas})
    healthy = (ProxyStatus.HEALTHY, ProxyStatus.STARTING)
    return sorted(proxy["node_ip"] for proxy in (found["proxies"] or {}).values() if proxy["status"] in healthy)
