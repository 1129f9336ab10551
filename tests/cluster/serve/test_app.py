"""The application names its deployments by import paths, so that only their own processes import them."""

from importlib import import_module

import pytest

from crossdock.cluster.config_file import load
from crossdock.cluster.serve import app


@pytest.mark.parametrize("path", [app.INGRESS, app.SCALER, app.REPLICA])
def test_import_path_names_a_class(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert isinstance(getattr(import_module(module), name), type)


def test_scaler_of_application_follows_all_pools_but_those_that_encode() -> None:
    pools = [{"name": "encode"}, {"name": "vision", "role": "encode"}, {"name": "mixed", "max_replicas": 2}]
    ingress = app.build(load(None, {"model.path": "org/pictures", "pools": pools}))._bound_deployment
    _, engines, scaler = ingress.init_args
    assert [*engines] == ["encode", "vision", "mixed"]
    assert [*scaler._bound_deployment.init_args[1]] == ["mixed"]
