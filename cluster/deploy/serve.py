"""Ray Serve's config file: the application and its arguments, for `serve deploy` and a RayService."""

from typing import Any

from crossdock.cluster.config import ClusterConfig
from crossdock.cluster.serve.gpus import with_num_gpus

IMPORT_PATH = "crossdock.cluster.serve.app:build"


def serve_config(config: ClusterConfig, *, host: str | None = None) -> dict[str, Any]:
    """Return the config in the format of Serve's `ServeDeploySchema`. `host`: replaces `http.host` for proxies.

    Raises:
        ValueError: API keys stand in the configuration itself; everyone with access to manifests could read them.
    """
    if config.http.api_keys:
        raise ValueError(
            "http.api_keys: keys must not be written into manifests; put them into a file that every node has, and "
            "name it by http.api_keys_file"
        )
    gpus = {node.pool: node.gpus for node in config.deploy.nodes}
    if gpus:  # else the cluster's own GPUs decide, where it starts
        config = with_num_gpus(config, lambda pool: gpus.get(pool.name, 0) > 0)
    application: dict[str, Any] = {
        "name": "crossdock",
        "route_prefix": "/",
        "import_path": IMPORT_PATH,
        "args": config.model_dump(mode="json", exclude_unset=True, exclude={"deploy"}),
    }
    if config.is_elastic:
        application["external_scaler_enabled"] = True  # else Serve refuses what our scaler asks for
    if config.deploy.nodes:
        # The head offers no cores: an ingress that needs one runs elsewhere, and survives the loss of the head.
        application["deployments"] = [{"name": "ingress", "ray_actor_options": {"num_cpus": 1}}]
    return {
        "proxy_location": "EveryNode",
        "http_options": {
            "host": host or config.http.host,
            "port": config.http.port,
            "keep_alive_timeout_s": config.http.keep_alive_s,
        },
        "logging_config": {"encoding": "JSON", "enable_access_log": False},
        "applications": [application],
    }
