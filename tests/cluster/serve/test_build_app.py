"""`build_app`: an application for Ray's own commands and drivers, with the messages of the command line."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
import ray
from ray import serve
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as as_serve_builds

import crossdock
from crossdock.cluster.config_file import load
from crossdock.cluster.serve import build
from crossdock.cluster.serve.build import ConfigurationError
from tests.cluster.ports import free_port
from tests.cluster.watch.terminal import run
from tests.waiting import eventually

EMULATED = {"pools": [{"name": "mixed", "emulated": "h100-8b"}]}


def own(monkeypatch: pytest.MonkeyPatch, num_gpus: float = 0.0) -> None:
    """Have no Ray, on a machine with so many GPUs."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(build, "gpus_here", lambda: num_gpus)
    for name in build.ENVIRONMENT:
        monkeypatch.setenv(name, build.ENVIRONMENT[name])


def joined(monkeypatch: pytest.MonkeyPatch, working_dir: str | None = None) -> None:
    """Have a Ray that another process has started."""

    class Context:
        runtime_env: Mapping[str, Any] = {} if working_dir is None else {"working_dir": working_dir}

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 8})
    monkeypatch.setattr(ray, "get_runtime_context", Context)
    monkeypatch.setattr(build.worker, "_global_node", None)


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({"engin": {"max_num_seqs": 4}}, ["--set", "engin.max_num_seqs=4"]),
        ({"engine": {"max_num_seq": 4}}, ["--set", "engine.max_num_seq=4"]),
        ({"engine.max_num_seq": 4}, ["--set", "engine.max_num_seq=4"]),
        ({"http": {"replicas": 0}}, ["--set", "http.replicas=0"]),
        ({"pools": [{"name": "prefill"}]}, ["--pools", "prefill=1"]),
        ({"model": {"path": "/no/such/model"}}, ["/no/such/model"]),
        ({"model": {"path": "/no/such/model.gguf"}}, ["/no/such/model.gguf"]),
        ({"http": {"api_keys": [{"key": "hunter2", "classes": ["absent"]}]}}, None),
    ],
)
def test_wrong_setting_is_refused_in_the_words_of_the_command(
    settings: dict[str, Any], flags: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    own(monkeypatch)
    with pytest.raises(ConfigurationError) as refusal:
        crossdock.build_app(settings)
    error = refusal.value
    assert error.__suppress_context__, "no traceback of pydantic"
    assert "hunter2" not in str(error)
    assert isinstance(error, ValueError)
    assert isinstance(error, click.ClickException), "`serve run` shows the message alone"
    if flags is not None:
        command = run("serve", *flags, "--port", "0")
        assert command.exit_code == 2
        assert command.stderr.splitlines() == [f"error: {line}" for line in str(error).splitlines()]


@pytest.mark.parametrize("args", ["cluster.yaml", ["model"], 3, None])
def test_arguments_that_are_no_mapping_are_refused(args: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"a mapping is expected \(model, engine, pools, .*\), not "):
        crossdock.build_app(args)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"application.name": "mine"}, r"application\.name \('mine'\) has no effect here, .* serve\.run\(…, name=…\)"),
        ({"application.route_prefix": "/llm"}, r"application\.route_prefix .*route_prefix=…\)"),
        ({"http.port": 9000}, r"http\.port \(9000\) has no effect here, .*http_options"),
        ({"http.keep_alive_s": 5}, r"http\.keep_alive_s \(5\) has no effect here, .*keep_alive_timeout_s"),
    ],
)
def test_setting_that_serve_has_itself_is_refused(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own(monkeypatch)
    with pytest.raises(ConfigurationError, match=message):
        crossdock.build_app({**EMULATED, **settings})


def test_ingresses_that_listen_themselves_have_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    own(monkeypatch)
    assert crossdock.build_app({**EMULATED, "http.port": 9000, "http.direct": True})


def test_machine_with_too_few_gpus_is_refused_before_anything_is_deployed(
    monkeypatch: pytest.MonkeyPatch, small_model_dir: Path
) -> None:
    own(monkeypatch, num_gpus=1)
    with pytest.raises(
        ConfigurationError, match=r"2 GPUs are needed, and this machine has 1 \(pools\.mixed\.replicas 2"
    ):
        crossdock.build_app({"model.path": str(small_model_dir), "pools.mixed.replicas": 2})


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_ranks_have_the_gpus_of_a_machine_whose_ray_has_not_started(
    num_gpus: int, monkeypatch: pytest.MonkeyPatch, small_model_dir: Path
) -> None:
    """`serve run` builds the application before it starts Ray."""
    own(monkeypatch, num_gpus)
    app = crossdock.build_app({"model.path": str(small_model_dir)})
    (models, engines) = app._bound_deployment.init_args
    assert models[0].pools[0].num_gpus == num_gpus
    assert engines["mixed"]._bound_deployment.ray_actor_options["num_gpus"] == num_gpus


def test_cluster_that_is_not_joined_yet_needs_a_number_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    own(monkeypatch)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ConfigurationError, match=r"pools\.mixed\.num_gpus: null means .* call ray\.init\(\) before"):
        crossdock.build_app({})
    assert crossdock.build_app({"pools.mixed.num_gpus": 0})
    assert crossdock.build_app(EMULATED)


def test_relative_path_on_a_joined_cluster_is_refused_unless_it_is_below_the_working_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joined(monkeypatch)
    assert crossdock.build_app({"model.path": "/on/every/node"}), "not looked for on this machine"
    with pytest.raises(ConfigurationError, match=r"model\.path: '\./model' is relative"):
        crossdock.build_app({"model.path": "./model"})
    joined(monkeypatch, working_dir="gcs://package.zip")
    assert crossdock.build_app({"model.path": "./model"})


def test_configuration_and_mapping_build_the_same_and_serve_takes_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve passes the `args` of a file as a mapping, and those of `serve run` as texts by their dotted names."""
    joined(monkeypatch)
    given = {"pools.mixed.emulated": "h100-8b", "http.replicas": "2"}
    config = load(None, given)
    apps = [crossdock.build_app(config), crossdock.build_app(given), as_serve_builds(crossdock.build_app, given)]
    assert [app._bound_deployment.num_replicas for app in apps] == [2, 2, 2]
    assert [app._bound_deployment.init_args[0][0].http for app in apps] == [config.http] * 3
    assert isinstance(config, crossdock.ClusterConfig)


def test_rays_command_shows_the_message_alone() -> None:
    command = [Path(sys.executable).with_name("serve"), "run", "crossdock:build_app", "engine.max_num_seq=4"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == "Error: engine.max_num_seq: no such setting; did you mean max_num_seqs?"
    assert "Traceback" not in ended.stderr


def test_import_of_the_package_loads_no_ray() -> None:
    code = "import sys, crossdock; assert 'build_app' in crossdock.__all__; print('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_application_that_a_driver_runs_answers_a_chat(ray_cluster: None, small_model_dir: Path) -> None:
    settings = {"path": str(small_model_dir), "served_name": "small"}
    engine = {"kv_cache_memory": "40MiB", "max_num_batched_tokens": 128}
    port = free_port()  # its ingress listens itself: the Serve of these tests may have no proxy
    http = {"direct": True, "port": port}
    serve.run(
        crossdock.build_app({"model": settings, "engine": engine, "http": http}), name="python", route_prefix=None
    )
    try:
        body = {"model": "small", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        eventually(lambda: httpx.post(url, json=body, timeout=240).status_code == 200)
        assert httpx.post(url, json=body, timeout=240).json()["usage"]["completion_tokens"] == 3
    finally:
        serve.delete("python")


def test_pools_that_grow_without_serves_external_scaler_end_the_start_with_what_to_set(ray_cluster: None) -> None:
    growing = crossdock.build_app({"pools": [{"name": "mixed", "emulated": "h100-8b", "max_replicas": 2}]})
    serve.run_many(
        [serve.RunTarget(growing, "growing", None)],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )
    try:

        def said() -> bool:
            app = serve.status().applications["growing"]
            return any("external_scaler_enabled=True" in each.message for each in app.deployments.values())

        eventually(said, lambda: serve.status().applications["growing"])
    finally:
        serve.delete("growing")
