"""Reasons that a user reads when the application does not start."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ray import serve
from ray.exceptions import RayTaskError
from transformers import LlamaConfig

from crossdock.cluster.config_file import load
from crossdock.cluster.serve import lifetime
from crossdock.cluster.serve.application import start_reason
from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.memory.memory_fit import check_fits
from crossdock.workers.model.probe import refuse_by_config
from tests.cluster.ports import free_port

SMALL = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, vocab_size=64)

LINES = 'ray::ServeReplica:crossdock:mixed.initialize() (pid=7)\n  File "/a/replica.py", line 3, in initialize\n'
HEAD = "The deployment failed to start 1 times in a row. See controller logs for details. Error:\n"


def message(error: Exception) -> str:
    """Return Serve's message about a replica whose constructor has raised `error`."""
    last = f"    self.start()\n    ^^^^^^^^^^^^\n{type(error).__name__}: {error}"
    return HEAD + str(RayTaskError("initialize", LINES + last, error).as_instanceof_cause())


def test_user_error_is_shown_without_its_traceback_and_once() -> None:
    reasons = [
        "Failed to update the deployments.",
        message(ValueError("page_size (3): wrong\ngive 16")),
        message(ValueError("page_size (3): wrong\ngive 16")),
        "",
    ]
    assert start_reason(reasons, has_ended=False) == "page_size (3): wrong\ngive 16"


@pytest.mark.parametrize(
    "load",
    [
        lambda: refuse_by_config(LlamaConfig(num_hidden_layers=1, layer_types=["compressed_sparse_attention"])),
        lambda: check_fits(SMALL, RankPosition(), torch.float32, 1 << 60, "cpu"),
    ],
    ids=["model that is not served", "model that does not fit"],
)
def test_refusal_of_a_model_is_shown_without_its_traceback(load: Callable[[], None]) -> None:
    with pytest.raises(ValueError, match=r"layers of type|are missing") as refusal:
        load()
    assert start_reason([message(refusal.value)], has_ended=False) == str(refusal.value)


def test_error_that_is_no_user_error_keeps_its_traceback() -> None:
    messages = ["Failed.", message(RuntimeError("a bug: ValueError: no"))]
    assert start_reason(messages, has_ended=False) is None, "another try may succeed"
    reason = start_reason(messages, has_ended=True)
    assert reason is not None
    assert reason.startswith(f"Failed.\n{HEAD.strip()}")
    assert 'File "/a/replica.py", line 3' in reason


def test_message_without_a_traceback_is_kept() -> None:
    assert start_reason(["", "ValueError: of Serve itself"], has_ended=True) == "ValueError: of Serve itself"


def test_serve_with_too_little_memory_fails_with_the_replicas_reason_alone(
    ray_cluster: None, small_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifetime.ray, "shutdown", lambda: None)  # this Ray is other tests' as well
    settings = {"model.path": str(small_model_dir), "engine.kv_cache_memory": "1KiB", "http.port": free_port()}
    phases: list[str] = []
    with pytest.raises(lifetime.StartFailed, match=r"^kv_cache_memory \(1\.0KiB\) holds 0 tokens.*$"):
        lifetime.serve_forever(load(None, settings), phases.append, pytest.fail, pytest.fail)
    assert tuple(phases) == lifetime.STARTING
    assert not serve.status().applications
