"""The Ray Serve application: an ingress with the OpenAI API, and one engine deployment per pool.

Deployments are named, not imported: only a process that runs one of them loads its libraries.
"""

from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from crossdock.cluster.config import ClusterConfig, PoolConfig
from crossdock.cluster.dispatch.pinning import PinningRouter
from crossdock.cluster.serve.gpus import with_num_gpus
from crossdock.cluster.serve.own_ray.forked_replicas import runtime_env

APP_NAME = "crossdock"  # unless application.name is another
INGRESS_NAME = "ingress"
INGRESS = "crossdock.cluster.serve.ingress.ServedIngress"
SCALER = "crossdock.cluster.serve.scaler.Scaler"
REPLICA: Any = "crossdock.workers.replica.serving.replica.Replica"
_NEVER_QUEUE = 1_000_000  # requests; the engine decides about admission, and Serve's own limit must not interfere
_ENDING_S = 5.0  # after the drain of an ingress, until Serve ends its process
_TINY_BUNDLE = 0.001  # CPUs; Ray accepts no bundle without resources


def application(args: ClusterConfig, version: str | None = None, has_gpus: bool | None = None) -> serve.Application:
    """Return the application of a configuration.

    Where `num_gpus` is null, the pool's ranks have a GPU each if `has_gpus`; None: if Ray's cluster has any now.
    `version`: by which Serve tells this ingress deployment from another one of this name; None: Serve chooses.
    """
    if has_gpus is None:
        has_gpus = visible_gpus() > 0
    models = [with_num_gpus(each, has_gpus).with_slow_promises() for each in args.each_model]
    pools = [(each, pool) for each in models for pool in each.pools]
    engines = {pool.name: engine_deployment(each, pool) for each, pool in pools}
    ingress = serve.deployment(
        name=INGRESS_NAME,
        num_replicas=args.http.replicas,
        max_ongoing_requests=_NEVER_QUEUE,
        ray_actor_options={"num_cpus": 0, **runtime_env("ingress")},
        graceful_shutdown_timeout_s=args.http.drain_timeout_s + _ENDING_S,
        graceful_shutdown_wait_loop_s=0.1,
    )(INGRESS)
    if version is not None:
        ingress = ingress.options(version=version, _internal=True)
    if not args.is_elastic:
        return ingress.bind(models, engines)
    scaler = serve.deployment(name="scaler", num_replicas=1, ray_actor_options={"num_cpus": 0})(SCALER)
    return ingress.bind(models, engines, scaler.bind(models, engines))


def visible_gpus() -> float:
    """Return how many GPUs Ray's cluster has now; 0 without a Ray."""
    return float(ray.cluster_resources().get("GPU", 0)) if ray.is_initialized() else 0.0


def engine_deployment(config: ClusterConfig, pool: PoolConfig) -> serve.Application:
    """Return the deployment of one pool's replicas."""
    spec = config.replica_spec(pool)
    deployment = serve.deployment(
        name=pool.name,
        num_replicas=max(pool.replicas, 1),  # Serve cannot begin with none: the scaler ends this one
        max_ongoing_requests=_NEVER_QUEUE,
        ray_actor_options={
            "num_cpus": pool.num_cpus,
            "num_gpus": pool.num_gpus or 0,
            **({"label_selector": pool.node_labels} if pool.node_labels and pool.num_ranks == 1 else {}),
            **({} if config.is_emulated else runtime_env("replica")),
        },
        request_router_config=RequestRouterConfig(request_router_class=PinningRouter),
        graceful_shutdown_timeout_s=config.http.drain_timeout_s,
        graceful_shutdown_wait_loop_s=0.1,
        **(_placement_group(pool) if pool.num_ranks > 1 else {}),
    )(REPLICA)
    return deployment.bind(spec)


def _placement_group(pool: PoolConfig) -> dict[str, Any]:
    """Return a bundle for each rank of a replica. The first is the Serve replica's own."""
    bundle = {"CPU": pool.num_cpus or _TINY_BUNDLE, **({"GPU": pool.num_gpus} if pool.num_gpus else {})}
    group: dict[str, Any] = {
        "placement_group_bundles": [bundle] * pool.num_ranks,
        "placement_group_strategy": pool.placement,
    }
    if pool.node_labels:  # of the nodes of all ranks, not of the driver's alone
        group["placement_group_bundle_label_selector"] = [pool.node_labels] * pool.num_ranks
    return group
