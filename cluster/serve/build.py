"""The application for Ray's own commands and for drivers in Python: `serve.run(build_app({...}))`.

`crossdock:build_app` is the import path for `serve run`, `serve deploy` and RayService manifests.
"""

import os
from collections.abc import Mapping
from typing import Any

import click
import ray
from ray import serve
from ray._private import worker

from crossdock.cluster.config import ClusterConfig
from crossdock.cluster.config_file import load
from crossdock.cluster.serve.app import application, visible_gpus
from crossdock.cluster.serve.gpus import gpus_here
from crossdock.cluster.serve.machine_paths import require_absolute_paths
from crossdock.cluster.serve.preparation import prepare, require_devices
from crossdock.cluster.serve.ray_environment import ENVIRONMENT, is_local

_ELSEWHERE = {  # settings that Serve itself has for an application that it runs, where ingresses do not listen
    "application.name": "serve.run(…, name=…), or `name` in a Serve config file, names the application",
    "application.route_prefix": "serve.run(…, route_prefix=…), or `route_prefix` in a Serve config file, is its route",
    "http.port": "serve.start(http_options={'port': …}), or `http_options` in a Serve config file, is Serve's port",
    "http.keep_alive_s": "Serve's proxies take it from http_options: {keep_alive_timeout_s: …}",
}
_OF_INGRESSES = ("http.port", "http.keep_alive_s")  # are theirs where they listen themselves (http.direct)


class ConfigurationError(click.ClickException, ValueError):
    """A setting is wrong. Ray's command `serve run` shows the message alone, as `crossdock serve` does."""


def build_app(args: ClusterConfig | Mapping[str, Any]) -> serve.Application:
    """Return the Serve application of a configuration: `serve.run(build_app({"model": {"path": "org/name"}}))`.

    Args:
        args: the settings of `crossdock config`, as a mapping or checked. A mapping may name a setting by its dotted
            name, as `--set` does: {"model.path": "org/name", "pools.mixed.replicas": 2}.

    What can be checked before anything is deployed is checked: all settings, and where Ray runs on this machine alone
    the model's files, GPUs and memory. Without a Ray, its start gets the environment that `crossdock serve` gives it.

    Raises:
        ConfigurationError: a ValueError with the words of `crossdock serve`.
    """
    try:
        return _checked(args)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None


def _checked(args: ClusterConfig | Mapping[str, Any]) -> serve.Application:
    if not isinstance(args, ClusterConfig | Mapping):
        raise ValueError(f"a mapping is expected ({', '.join(ClusterConfig.model_fields)}), not {args!r}")
    config = args if isinstance(args, ClusterConfig) else load(None, {str(name): args[name] for name in args})
    _refuse_settings_of_serve(config)
    if not ray.is_initialized():
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    if _is_own_ray():
        num_gpus = visible_gpus() if ray.is_initialized() else gpus_here()
        for each in config.each_model:
            prepare(each, has_gpus=num_gpus > 0)
        require_devices(config, num_gpus)
        return application(config, has_gpus=num_gpus > 0)
    if not ray.is_initialized():
        _require_known_gpus(config)
    elif not ray.get_runtime_context().runtime_env.get("working_dir"):
        require_absolute_paths(config)
    return application(config)


def _refuse_settings_of_serve(config: ClusterConfig) -> None:
    default = ClusterConfig.model_validate({})
    for name, reason in _ELSEWHERE.items():
        section, field = name.split(".")
        value = getattr(getattr(config, section), field)
        if value == getattr(getattr(default, section), field) or (config.http.direct and name in _OF_INGRESSES):
            continue
        raise ValueError(f"{name} ({value!r}) has no effect here, leave it out: {reason}")


def _is_own_ray() -> bool:
    """Return whether this process has started the Ray that it uses, or will: then all is on this machine."""
    if not ray.is_initialized():
        return is_local()
    node = worker._global_node
    return node is not None and node.is_head()


def _require_known_gpus(config: ClusterConfig) -> None:
    """Refuse to guess whether a cluster that was not joined yet has GPUs. Raises ValueError."""
    for each in config.each_model:
        for pool in each.pools:
            if pool.num_gpus is None and pool.emulated is None:
                raise ValueError(
                    f"pools.{pool.name}.num_gpus: null means a GPU for each rank where the cluster has any, and "
                    f"RAY_ADDRESS names a cluster that is not joined yet: call ray.init() before build_app, or give "
                    f"num_gpus (0: CPUs)"
                )
