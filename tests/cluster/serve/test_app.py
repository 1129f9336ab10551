"""The application names its deployments by import paths, so that only their own processes import them."""

from importlib import import_module

import pytest

from crossdock.cluster.config_file import load
from crossdock.cluster.serve import app


@pytest.mark.parametrize("path", [app.INGRESS, app.SCALER, app.REPLICA])
def test_import_path_names_a_class(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert isinstance(getattr(import_module(module), name), type)


def test_node_labels_bind_the_nodes_of_all_ranks() -> None:
    """A group whose first bundle alone is bound may be placed where its driver, which is bound too, cannot run."""
    labels = {"ray.io/accelerator-type": "H100"}
    config = load(
        None, {"pools": [{"name": "big", "tensor_parallel_size": 4, "node_labels": labels}, {"name": "small"}]}
    )
    big, small = (app.engine_deployment(config, pool)._bound_deployment._replica_config for pool in config.pools)
    assert big.placement_group_bundle_label_selector == [labels] * 4
    assert len(big.placement_group_bundles) == 4
    assert small.placement_group_bundle_label_selector is None
