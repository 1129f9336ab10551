"""The meaning of an adapter's name is the same at every ingress, also where one was not told of a change."""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crossdock.cluster.api.body.bodies import LoadAdapterRequest, UnloadAdapterRequest
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.routes.adapters import AdapterNames, Naming, Order
from crossdock.cluster.serve import shared_adapters
from crossdock.cluster.serve.shared_adapters import SharedAdapters
from crossdock.workers.schedule.request.submission import Adapter
from tests.waiting import until

REQUEST: Any = SimpleNamespace(state=SimpleNamespace(api_key=None))


class Ingress:
    """An ingress as others ask it. `listed`: those that Serve lists, which alone are told."""

    def __init__(self, name: str, listed: Sequence["Ingress"], folder: Path, modules: Sequence[str] = ()) -> None:
        self.name, self.listed, self.fails = name, listed, False
        self.shared = SharedAdapters(self._ask, name)
        tell = partial(self.shared.tell, "model")
        self.names = AdapterNames(read, folder, tell, learn=self.shared.learn, ingress=name)
        for each in modules:
            self.names.put(each, Adapter(each, "start", "start"))
        self.shared.start({"model": self.names})

    async def _ask(self, method: str, seconds: float, *arguments: Any, told_s: float = 0.0) -> list[Any]:
        if self.fails:
            raise RuntimeError("Ray is away")
        answers = {
            "adapters": lambda other: other.shared.known(),
            "put_adapter": lambda other: other.shared.hear(*arguments),
        }
        return [answers[method](other) for other in self.listed]

    async def load(self, name: str, path: str = "one") -> None:
        await self.names.load(REQUEST, LoadAdapterRequest(lora_name=name, lora_path=path))

    async def unload(self, name: str) -> None:
        await self.names.unload(REQUEST, UnloadAdapterRequest(lora_name=name))


def read(name: str, folder: Path) -> Adapter:
    return Adapter(name, str(folder), folder.name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    return tmp_path


async def test_ingress_that_starts_learns_of_loads_and_of_unloads(folder: Path) -> None:
    old = Ingress("old", [], folder, ["first"])
    await old.unload("first")
    await old.load("second")
    new = Ingress("new", [old], folder, ["first"])
    await new.shared.learn()
    assert set(new.names.by_name) == {"second"}
    await asyncio.gather(old.shared.close(), new.shared.close())


async def test_change_of_which_an_ingress_was_not_told_is_known_before_it_changes_the_name_itself(folder: Path) -> None:
    """Serve lists an ingress later than it answers requests."""
    old = Ingress("old", [], folder, ["first"])
    new = Ingress("new", [old], folder, ["first"])
    await old.unload("first")
    await new.load("first")
    old.listed = [new]
    await old.unload("first")
    with pytest.raises(ApiError, match="cannot be found"):
        await new.unload("first")
    await asyncio.gather(old.shared.close(), new.shared.close())


async def test_change_of_which_an_ingress_was_not_told_reaches_its_requests(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_adapters, "_EVERY_S", 0.01)
    old = Ingress("old", [], folder, ["first"])
    new = Ingress("new", [old], folder, ["first"])
    new.fails = True
    await old.unload("first")
    await asyncio.sleep(0)
    assert "first" in new.names.by_name
    new.fails = False
    await until(lambda: "first" not in new.names.by_name)
    new.shared.check()
    await asyncio.gather(old.shared.close(), new.shared.close())


async def test_end_of_the_looks_is_an_error_of_the_ingress(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_adapters, "_EVERY_S", None)
    one = Ingress("one", [], folder)

    def fails() -> bool:
        try:
            one.shared.check()
        except TypeError:
            return True
        return False

    await until(fails)


def test_newest_change_wins_in_whatever_order_changes_come() -> None:
    first, second = Adapter("a", "p", "1"), Adapter("a", "p", "2")
    changes = [Naming(first, Order(1, "x")), Naming(None, Order(2, "x")), Naming(second, Order(2, "y"))]
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0], [2, 0, 1]):
        names = AdapterNames()
        for number in order:
            names.take("a", changes[number])
        assert names.by_name == {"a": second}


def test_names_that_were_unloaded_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crossdock.cluster.api.routes.adapters._MOST", 3)
    names = AdapterNames()
    names.put("stays", Adapter("stays", "p", "1"))
    for number in range(9):
        names.take(f"{number}", Naming(None, Order(1, "x")))
    assert list(names.namings) == ["stays", "6", "7", "8"]
