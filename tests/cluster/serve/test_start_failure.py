"""Reasons that a user reads when the application does not start."""

from ray.exceptions import RayTaskError

from crossdock.cluster.serve.start_failure import start_reason

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


def test_error_that_is_no_user_error_keeps_its_traceback() -> None:
    messages = ["Failed.", message(RuntimeError("a bug: ValueError: no"))]
    assert start_reason(messages, has_ended=False) is None, "another try may succeed"
    reason = start_reason(messages, has_ended=True)
    assert reason is not None
    assert reason.startswith(f"Failed.\n{HEAD.strip()}")
    assert 'File "/a/replica.py", line 3' in reason


def test_message_without_a_traceback_is_kept() -> None:
    assert start_reason(["", "ValueError: of Serve itself"], has_ended=True) == "ValueError: of Serve itself"
