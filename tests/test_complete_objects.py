"""The check that no file assigns a field of an object which it did not make."""

from typing import Any

import pytest

from tests.checks import load_check


def check() -> Any:
    return load_check("complete_objects")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(model):\n    model.graphs = 'none'", [(2, "model", "graphs")]),
        ("def f(model):\n    model.layers, model.windows = [], []", [(2, "model", "layers"), (2, "model", "windows")]),
        (
            "def f(engine):\n    engine.model.encoder.most_embedding_tokens += 1",
            [(2, "engine.model.encoder", "most_embedding_tokens")],
        ),
        ("def f(self):\n    self.tokens = 3", []),
        ("def f():\n    made = Request()\n    made.tokens = 3", []),
        ("class Turn:\n    is_over: bool = False\ndef f(turn):\n    turn.is_over = True", []),
    ],
)
def test_field_assigned_outside_its_object_is_found(source: str, found: list[tuple[int, str, str]]) -> None:
    assert list(check().outside(source)) == found


def test_rooms_that_are_checked_make_complete_objects() -> None:
    assert check().main() == 0
