"""The check of the writing card reports a planted violation of each rule, and accepts plain text."""

from types import ModuleType

import pytest

from tests.checks import load_check


@pytest.fixture(scope="module")
def check() -> ModuleType:
    return load_check("plain_english")


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("for it in range(3):\n    pass\n", "names nothing"),
        ("total = [its for its in (1, 2)]\n", "names nothing"),
        ("def f(it: int) -> None:\n    pass\n", "names nothing"),
        ("smallest = min((1, 2), key=lambda it: -it)\n", "names nothing"),
        ("it: int = 3\n", "names nothing"),
        ('def f() -> None:\n    """Of a rank that has no pool yet."""\n', "starts with 'Of'"),
        ('class A:\n    """What a replica says."""\n', "starts with 'What'"),
        ('def f() -> None:\n    """Return what the step computes."""\n', "starts with 'Return what'"),
        ('def f() -> None:\n    """Return those of the pages that are free."""\n', "starts with 'Return those'"),
        ('def f() -> None:\n    """Return the same as `g`, in slices."""\n', "starts with 'Return the same'"),
        ('def f() -> None:\n    """Yield it, once for each page."""\n', "starts with 'Yield it'"),
        ("# whoever waits is ahead\n", "'whoever'"),
        ('"""Return the share of late.\n\nNobody waits."""\n', "'of late'"),
        ('raise ValueError("nobody may use it")\n', "'nobody'"),
        ("# see docs/no_such_page.md\n", "docs/no_such_page.md, which does not exist"),
        ("# measured, see facts/nixl.md\n", "facts/nixl.md, which does not exist"),
    ],
)
def test_python_with_a_planted_violation_is_reported(check: ModuleType, source: str, complaint: str) -> None:
    found = list(check.check_python("workers/planted.py", source))
    assert any(complaint in line for line in found), found


def test_prose_with_a_planted_violation_is_reported(check: ModuleType) -> None:
    assert list(check.check_prose("docs/planted.md", 7, "The queue is built anew.")) == [
        "docs/planted.md:7: 'anew'; write: again"
    ]
    assert list(check.check_prose("docs/planted.md", 1, "See `workers/schedule/missing.py`."))


def test_two_public_classes_of_one_name_are_reported(check: ModuleType) -> None:
    sources = {"router/a.py": "class Room: ...\n", "workers/b.py": "class Room: ...\nclass _Hidden: ...\n"}
    assert list(check.check_classes(sources)) == ["workers/b.py:1: class Room is also in router/a.py"]
    assert not list(check.check_classes({"router/a.py": "class _A: ...\n", "workers/b.py": "class _A: ...\n"}))


def test_plain_source_passes(check: ModuleType) -> None:
    source = '"""Return the pages that fit."""\n\nPAGES = 3  # see workers/schedule/table.py and docs/glossary.md\n'
    assert not list(check.check_python("workers/plain.py", source))
