"""The LoRA adapters that clients name as their model: those of the start, and POST /v1/load_lora_adapter."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from fastapi import Request, Response

from crossdock.cluster.api.body.bodies import LoadAdapterRequest, UnloadAdapterRequest
from crossdock.cluster.api.errors import ApiError
from crossdock.workers.model.weights.untrusted import check_links
from crossdock.workers.schedule.request.submission import Adapter

ReadAdapter: TypeAlias = Callable[[str, Path], Adapter]
"""Looks at the files of an adapter, given its name and folder. ValueError: no replica could serve it."""

CheckAdapter: TypeAlias = Callable[[str], Awaitable[None]]
"""Compares the adapter in a folder with the model of the replicas. ValueError: it does not fit. ReplicaLost: none is
up."""


@dataclass(frozen=True, slots=True, order=True)
class Order:
    """Order the changes of a name, at every ingress alike."""

    number: int = 0  # of the name's change; 0: it means this since the start
    ingress: str = ""  # the ingress that made the change: two may make the same number


@dataclass(frozen=True, slots=True)
class Naming:
    """The meaning of a name since its newest change."""

    adapter: Adapter | None  # None: the name was unloaded
    order: Order = Order()


Notify: TypeAlias = Callable[[str, Naming], Awaitable[object]]
"""Tells the other ingresses what a name means from now on."""

_MOST = 4096  # names, and likewise names that were unloaded


class AdapterNames:
    """The names of adapters, at one ingress. Replicas know none: each request brings the folder of its adapter."""

    def __init__(
        self,
        read: ReadAdapter | None = None,
        folder: Path | None = None,
        notify: Notify | None = None,
        base_names: Collection[str] = (),
        check: CheckAdapter | None = None,
        learn: Callable[[], Awaitable[object]] | None = None,
        ingress: str = "",
    ) -> None:
        """`read` None: replicas take no adapters. `folder`: below which clients may load some; None: nowhere.
        `base_names`: of the base model, which no adapter may have. `check` None: adapters are compared with no model.
        `learn`: takes over what names mean at other ingresses. `ingress`: the name of this one.
        """
        self.by_name: dict[str, Adapter] = {}
        self.namings: dict[str, Naming] = {}  # also of names that were unloaded; the newest change is last
        self.learn = learn
        self._ingress = ingress
        self._read = read
        self._folder = folder
        self._notify = notify
        self._base_names = base_names
        self._check = check
        self._turn = asyncio.Lock()  # of loads: two with one name would race

    @property
    def are_taken(self) -> bool:
        """Whether replicas take adapters."""
        return self._read is not None

    def put(self, name: str, adapter: Adapter) -> None:
        """Let a name mean an adapter since the start."""
        self.take(name, Naming(adapter))

    def take(self, name: str, naming: Naming) -> None:
        """Let a name mean this, unless a newer change is known. Requests that run keep the adapter that they have."""
        known = self.namings.get(name)
        if known is not None and known.order >= naming.order:
            return
        self.namings.pop(name, None)
        self.namings[name] = naming
        if naming.adapter is None:
            self.by_name.pop(name, None)
        else:
            self.by_name[name] = naming.adapter
        unloaded = [each for each, known in self.namings.items() if known.adapter is None]
        for each in unloaded[:-_MOST]:
            del self.namings[each]

    async def load(self, request: Request, body: LoadAdapterRequest) -> Response:
        """Name an adapter. Statuses and texts are vLLM's."""
        read, folder = self._allowed(request)
        if not body.lora_name or not body.lora_path:
            raise ApiError("Both 'lora_name' and 'lora_path' must be provided.", kind="InvalidUserInput")
        if body.lora_name in self._base_names:
            reason = f"'lora_name' {body.lora_name!r} is a name of the base model."
            raise ApiError(reason, kind="InvalidUserInput", param="lora_name")
        async with self._turn:
            await self._learn()
            if body.lora_name in self.by_name and not body.load_inplace:
                reason = f"The lora adapter '{body.lora_name}' has already been loaded."
                raise ApiError(reason, kind="InvalidUserInput", param="lora_name")
            if len(self.by_name) >= _MOST and body.lora_name not in self.by_name:
                raise ApiError(f"There are {_MOST} adapters; unload one before.", kind="InvalidUserInput")
            try:
                path = await asyncio.to_thread(below, folder, body.lora_path)
                if self._check is not None:  # before all bytes are read: a file that fits is not too large
                    await self._check(str(path))
                adapter = await asyncio.to_thread(read, body.lora_name, path)
            except FileNotFoundError:
                reason = f"No adapter is at 'lora_path' {body.lora_path!r}."
                raise ApiError(reason, status=404, kind="NotFoundError", param="lora_path") from None
            except (ValueError, OSError) as error:
                raise ApiError(f"{error}", kind="BadRequestError", param="lora_path") from None
            await self._put(body.lora_name, adapter)
        return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.", media_type="text/plain")

    async def unload(self, request: Request, body: UnloadAdapterRequest) -> Response:
        """Forget an adapter's name. Requests that run end as they would have."""
        self._allowed(request)
        if not body.lora_name:
            reason = "'lora_name' needs to be provided to unload a LoRA adapter."
            raise ApiError(reason, kind="InvalidUserInput", param="lora_name")
        async with self._turn:
            await self._learn()
            if body.lora_name not in self.by_name:
                reason = f"The lora adapter '{body.lora_name}' cannot be found."
                raise ApiError(reason, status=404, kind="NotFoundError", param="lora_name")
            await self._put(body.lora_name, None)
        return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.", media_type="text/plain")

    async def _learn(self) -> None:
        """Take over what other ingresses know. One of them may have just answered another load of this name."""
        if self.learn is not None:
            await self.learn()

    async def _put(self, name: str, adapter: Adapter | None) -> None:
        known = self.namings.get(name)
        number = 1 if known is None else known.order.number + 1
        naming = Naming(adapter, Order(number, self._ingress))
        self.take(name, naming)
        if self._notify is not None:
            await self._notify(name, naming)

    def _allowed(self, request: Request) -> tuple[ReadAdapter, Path]:
        """Return the reader of adapters, and the folder above them. ApiError 403: the client may not load any."""
        if self._read is None or self._folder is None:
            reason = "This server loads no adapters while it runs: start it with --enable-lora --lora-folder FOLDER."
            raise ApiError(reason, status=403, code="adapters_are_fixed")
        check_operator(request)
        return self._read, self._folder


def check_operator(request: Request) -> None:
    """Raise ApiError 403 for an API key that may not change what others get."""
    key = request.state.api_key
    if key is not None and not key.sees_all_requests:
        reason = "This API key may not do that: it needs a key with sees_all_requests."
        raise ApiError(reason, status=403, code="not_allowed")


def below(folder: Path, path: str, param: str = "lora_path", kind: str = "adapters (--lora-folder)") -> Path:
    """Return the folder that a client means. FileNotFoundError: there is none.

    ValueError: it is not below `folder`, or a file in it is a link that leads out.

    `param` names the path, and `kind` the folder, in the errors.
    """
    if "\0" in path:
        raise ValueError(f"'{param}' has a character 0")
    try:
        whole = folder.resolve()
        found = (folder / path).resolve()
        is_folder = found.is_dir()
    except (OSError, RuntimeError) as error:  # a name that is too long, a circle of links, a folder without permission
        raise _unreadable(param, path, error) from None
    if not found.is_relative_to(whole):
        raise ValueError(f"'{param}' must be below the folder of {kind}, not {path!r:.200}")
    if not is_folder:
        raise FileNotFoundError(path)
    try:
        check_links(found)
    except (OSError, RuntimeError) as error:  # a file in the folder is a circle of links
        raise _unreadable(param, path, error) from None
    return found


def _unreadable(param: str, path: str, error: Exception) -> ValueError:
    """Return the error for a path that the operating system does not follow."""
    reason = getattr(error, "strerror", None) or error
    return ValueError(f"'{param}' cannot be read: {reason}: {path!r:.200}")
