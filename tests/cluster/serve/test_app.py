"""The application names its deployments by import paths, so that only their own processes import them."""

from importlib import import_module

import pytest

from crossdock.cluster.serve import app


@pytest.mark.parametrize("path", [app.INGRESS, app.SCALER, app.REPLICA])
def test_import_path_names_a_class(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert isinstance(getattr(import_module(module), name), type)
