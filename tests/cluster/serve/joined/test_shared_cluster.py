"""Names, routes and ports of a Serve that others use, as its controller tells them."""

import os
from typing import Any

import pytest
import ray
from ray.exceptions import AuthenticationError, RayError, RpcError
from ray.serve.config import HTTPOptions
from ray.serve.schema import APIType, ApplicationStatus, ProxyLocation, ProxyStatus

from crossdock.cluster.config_file import load
from crossdock.cluster.serve import lifetime, shared_cluster
from crossdock.cluster.serve.address import Address
from crossdock.cluster.serve.shared_cluster import join_failure, listening_nodes, require_room, with_proxies

DECLARED = {
    "name": "search",
    "route_prefix": "/search",
    "status": ApplicationStatus.RUNNING,
    "source": APIType.DECLARATIVE,
    "last_deployed_time_s": 0.0,
    "deployed_app_config": {"import_path": "search:app"},
    "deployments": {},
}
OPTIONS = HTTPOptions(host="0.0.0.0", port=8100)


def found(*applications: dict[str, Any], **other: Any) -> dict[str, Any]:
    proxies = {str(n): {"node_ip": f"10.0.0.{n}", "status": ProxyStatus.HEALTHY} for n in (1, 2)}
    everywhere = {"proxy_location": ProxyLocation.EveryNode, "proxies": proxies}
    return {"applications": {each["name"]: each for each in applications}} | everywhere | other


def test_name_of_an_application_from_a_file_is_refused_with_its_file_as_the_remedy() -> None:
    with pytest.raises(
        ValueError, match=r"'search' already, deployed at 1970-01-01 00:00 UTC from a Serve config file"
    ) as error:
        require_room(load(None, {"application.name": "search"}), found(DECLARED))
    assert "(import_path search:app)" in str(error.value)
    assert "take it out of that file, and deploy the file again" in str(error.value)


def test_application_that_is_being_deleted_keeps_its_name_but_not_its_route() -> None:
    leaving = found({**DECLARED, "status": ApplicationStatus.DELETING})
    require_room(load(None, {"application.route_prefix": "/search"}), leaving)
    with pytest.raises(ValueError, match="which is being deleted: try again when it is gone"):
        require_room(load(None, {"application.name": "search"}), leaving)


def test_ingresses_that_listen_themselves_take_no_route() -> None:
    taken = {"application.route_prefix": "/search"}
    require_room(load(None, {**taken, "http.direct": True}), found(DECLARED))
    with pytest.raises(ValueError, match="'/search' is the route of the application 'search'"):
        require_room(load(None, taken), found(DECLARED))


def test_address_that_is_not_given_is_that_of_the_running_proxies() -> None:
    """So is who may connect: without a key, an ingress on 127.0.0.1 answers to local names alone."""
    http = with_proxies(load(), OPTIONS, found()).http
    assert (http.host, http.port, http.keep_alive_s) == ("0.0.0.0", 8100, OPTIONS.keep_alive_timeout_s)
    assert http.is_open_to_others


@pytest.mark.parametrize(("name", "value"), [("port", 8000), ("host", "127.0.0.1"), ("keep_alive_s", 75)])
def test_address_that_the_running_proxies_do_not_have_is_refused(name: str, value: object) -> None:
    wanted = load(None, {f"http.{name}": value})
    with pytest.raises(ValueError, match=rf"http\.{name}: Serve's proxies were started with .*; leave it out$"):
        with_proxies(wanted, OPTIONS, found(DECLARED))
    with pytest.raises(ValueError, match=r"No application uses them now; end them: RAY_ADDRESS=.*serve\.shutdown\(\)"):
        with_proxies(wanted, OPTIONS, found())


def test_serve_without_proxies_needs_ingresses_that_listen_themselves() -> None:
    disabled = found(proxy_location=ProxyLocation.Disabled, proxies=None)
    with pytest.raises(ValueError, match=r"http\.direct: true lets its ingresses listen"):
        with_proxies(load(), OPTIONS, disabled)
    direct = load(None, {"http.direct": True, "http.port": 8100})
    assert with_proxies(direct, OPTIONS, disabled) is direct
    with pytest.raises(ValueError, match=r"http\.port: Serve's proxies listen on 8100"):
        with_proxies(direct, OPTIONS, found())


@pytest.mark.parametrize(
    ("host", "own", "url", "node"),
    [
        ("0.0.0.0", "10.0.0.2", "http://127.0.0.1:8100/llm", ""),
        ("0.0.0.0", "10.0.0.9", "http://10.0.0.1:8100/llm", ""),
        ("127.0.0.1", "10.0.0.1", "http://127.0.0.1:8100/llm", ""),
        ("127.0.0.1", "10.0.0.9", "http://127.0.0.1:8100/llm", "10.0.0.1"),
        ("::1", "10.0.0.1", "http://[::1]:8100/llm", ""),
        ("serve.example", "10.0.0.9", "http://serve.example:8100/llm", ""),
    ],
)
def test_printed_address_is_one_that_answers(host: str, own: str, url: str, node: str) -> None:
    config = load(None, {"http.host": host, "http.port": 8100, "application.route_prefix": "/llm"})
    address = Address.of(config, listening_nodes(config, found()), own)
    assert (address.url, address.node) == (url, node)
    assert bool(address.warning) == (host in ("0.0.0.0", "serve.example")), "other machines reach it, and no key is set"


def test_ingresses_that_listen_themselves_are_where_their_replicas_are() -> None:
    config = load(None, {"http.direct": True})
    replicas = [{"node_ip": "10.0.0.7"}, {"node_ip": "10.0.0.7"}]
    ours = {**DECLARED, "name": "crossdock", "deployments": {"ingress": {"replicas": replicas}}}
    assert listening_nodes(config, found(ours)) == ["10.0.0.7"]


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("disabled", "asks for a token: set RAY_AUTH_MODE=token, and put"),
        ("token", "asks for another token than the one of this process: put"),
    ],
)
def test_failed_join_for_lack_of_a_token_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, mode: str, message: str
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    error = ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379")
    assert join_failure(error) == f"RAY_ADDRESS=10.0.0.1:6379: the cluster cannot be joined: {error}"
    error.__cause__ = RuntimeError("AuthenticationError: RPC error: InvalidAuthToken: Authentication token is missing")
    assert message in join_failure(error)


@pytest.mark.parametrize(
    "error", [AuthenticationError("wrong token"), RpcError("no answer")], ids=["refuses", "silent"]
)
def test_cluster_that_cannot_be_joined_is_asked_once(monkeypatch: pytest.MonkeyPatch, error: RayError) -> None:
    asked = []

    def refuse(address: str) -> None:
        asked.append(address)
        raise error

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(lifetime, "ENVIRONMENT", {})
    monkeypatch.setattr(shared_cluster, "GcsClient", refuse)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("ray.init asks 20 times"))
    with pytest.raises(RayError) as raised:
        lifetime.start_ray(load(None, {}))
    assert raised.value is error
    assert asked == ["10.0.0.1:6379"]


def test_version_of_an_ingress_names_the_job_that_deployed_it(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve's own record of who deployed what is lost on its way to those who ask."""
    version = shared_cluster.new_version()
    assert version != shared_cluster.new_version()
    monkeypatch.setattr(shared_cluster, "version_of", lambda name: version)
    ours = {**DECLARED, "source": APIType.IMPERATIVE, "name": "crossdock"}
    with pytest.raises(ValueError, match=f"by process {os.getpid()} of .*, which runs"):
        require_room(load(), found(ours))
