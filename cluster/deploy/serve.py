"""Ray Serve's config file: the application with its arguments, as `serve deploy` and a RayService take it."""

from typing import Any

from crossdock.cluster.config import ClusterConfig

IMPORT_PATH = "crossdock.cluster.serve.app:build"


def serve_config(config: ClusterConfig, *, host: str | None = None) -> dict[str, Any]:
    """In the shape of Serve's `ServeDeploySchema`. `host`: where proxies listen, instead of `http.host`.

    Raises:
        ValueError: API keys stand in the configuration itself, and would be readable to all who may read manifests.
    """
    if config.http.api_keys:
        raise ValueError(
            "http.api_keys: keys must not be written into manifests; put them into a file that every node has, and "
            "name it by http.api_keys_file"
        )
    application: dict[str, Any] = {
        "name": "crossdock",
        "route_prefix": "/",
        "import_path": IMPORT_PATH,
        "args": config.model_dump(mode="json", exclude_unset=True, exclude={"deploy"}),
    }
    if config.deploy.nodes:
        # The head has no cores to give, so an ingress that asks for one is not on it, and outlives it.
        application["deployments"] = [{"name": "ingress", "ray_actor_options": {"num_cpus": 1}}]
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": host or config.http.host, "port": config.http.port},
        "logging_config": {"encoding": "JSON", "enable_access_log": False},
        "applications": [application],
    }
