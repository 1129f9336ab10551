"""The checks of tests report a planted violation of each rule, and accept tests that assert and wait as they should."""

from types import ModuleType

import pytest

from tests.checks import load_check


@pytest.fixture(scope="module")
def check() -> ModuleType:
    return load_check("checks_of_tests")


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("def test_a():\n    f()\n", "asserts nothing"),
        ("def test_a():\n    test_a()\n", "asserts nothing"),
        ("def helper():\n    print()\ndef test_a():\n    helper()\n", "asserts nothing"),
        ("async def test_a():\n    assert 1\n    await asyncio.sleep(0.2)\n", "waits for 0.2 s"),
        ("def test_a():\n    assert 1\n    while f():\n        time.sleep(0.01)\n", "without a deadline"),
        ("def f():\n    httpx.get(url)\n", "gives up too early"),
        ("def f():\n    httpx.Client(verify=False)\n", "gives up too early"),
        ("def f():\n    httpx.Client(timeout=60)\n", "gives up after 60 s"),
        ("def f():\n    subprocess.run(['true'], timeout=60)\n", "gives up after 60 s"),
        ("def f():\n    thread.join(10)\n", "gives up after 10 s"),
        ("async def f():\n    await asyncio.wait_for(event.wait(), 20.5)\n", "gives up after 20.5 s"),
        ("async def f():\n    async with asyncio.timeout(5):\n        await g()\n", "gives up after 5 s"),
        ("def f():\n    eventually(g, 'never', 120)\n", "gives up after 120 s"),
        ("def f():\n    deadline = time.monotonic() + 60\n", "gives up after 60 s"),
        ("def f():\n    assert time.monotonic() - begin < 25\n", "must be over in 25 s"),
        ("def f():\n    assert (time.perf_counter() - begin <= 0.5) == is_fast\n", "must be over in 0.5 s"),
    ],
)
def test_planted_violation_is_reported(check: ModuleType, source: str, complaint: str) -> None:
    (found,) = check.violations({"tests/test_x.py": source})
    assert complaint in found


@pytest.mark.parametrize(
    "source",
    [
        "def test_a():\n    assert f()\n",
        "def test_a():\n    with pytest.raises(ValueError):\n        f()\n",
        "def test_a():\n    subprocess.run(['true'], check=True)\n",
        "def inner():\n    assert 1\ndef outer():\n    inner()\ndef test_a():\n    outer()\n",
        "def fixture():\n    assert 1\ndef test_a(fixture):\n    pass\n",
        "def test_a():\n    assert 1\n    while time.monotonic() < end:\n        time.sleep(0.1)\n",
        "async def f():\n  async with asyncio.timeout(240):\n    while g():\n      await asyncio.sleep(9)\n",
        "async def f():\n    with pytest.raises(TimeoutError):\n        await asyncio.wait_for(event.wait(), 5)\n",
        "def f():\n    eventually(g, 'never')\n    thread.join(0.1)\n    thread.join()\n    ', '.join(names)\n",
        "def f():\n    model.start(seconds=3)\n    receiver.wait(request, 1, 2.0)\n",
        "def f():\n    time.sleep(600)\n",
        "def f():\n    assert 0.2 < time.monotonic() - begin\n    assert time.monotonic() - begin < 240\n",
        "def f():\n    httpx.get(url, timeout=240)\n    httpx.AsyncClient(transport=app)\n",
        "async def f():\n    while g():\n        await asyncio.sleep(0)\n",
    ],
)
def test_test_that_asserts_and_has_deadlines_is_accepted(check: ModuleType, source: str) -> None:
    assert list(check.violations({"tests/test_x.py": source})) == []


def test_file_with_more_waits_than_allowed_is_reported(check: ModuleType) -> None:
    path, allowed = next(iter(check.ALLOWED.items()))
    wait = "time.sleep(0.2)\n"
    assert list(check.violations({path: wait * allowed})) == []
    assert len(list(check.violations({path: wait * (allowed + 1)}))) == allowed + 1
