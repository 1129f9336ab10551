"""Record steps as CUDA graphs, on every rank of a worker group or on none.

A recorded step is padded, so its all-reduces are larger than those of the step itself: a rank that replays does not fit
together with a rank that launches kernel by kernel. A rank that stops in the middle of a recording leaves the others
waiting inside a collective. So all ranks record the same steps in the same order, and agree between steps.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TypeAlias, TypeVar

import torch

from crossdock.workers.model.architecture import is_indexed, text_config
from crossdock.workers.model.cut.collectives import Collectives
from crossdock.workers.model.model import LoadedModel

_Recorded = TypeVar("_Recorded")
Record: TypeAlias = Callable[[Callable[[], None]], Callable[[], None]]
"""Records a function over tensors at fixed addresses; returns a function that does the same again."""


class OtherRankRefused(Exception):
    """Another rank of the worker group cannot record its part; the message says which rank, and why."""


def why_not(model: LoadedModel) -> str | None:
    """Return why no step of `model` can be recorded, as text, empty where no log needs the reason; None: steps can be.

    Every rank of a worker group gets the same answer.
    """
    if not _has_graphs(model.device):
        return ""
    if model.part.position.num_stages > 1:
        return "a pipeline's stages exchange hidden states within a step"
    if is_indexed(text_config(model.config)):
        return "indexers choose tokens in numbers that the host reads"
    if model.states is not None:
        return "recurrent layers run in transformers' own code, chunk by chunk"
    return None


def attempt(model: LoadedModel, make: Callable[[], _Recorded]) -> tuple[_Recorded | None, str]:
    """Return the result of `make` and an empty text; or None and the reason, if `make` raised on any rank of the group.

    Collective: every rank must call it. On all ranks the reason is that of the first rank that has one.
    """
    links = model.part.collectives
    try:
        made = make()
        if links is not None:
            _agree(links)
        return made, ""
    except OtherRankRefused as refusal:
        return None, str(refusal)
    except Exception as error:  # a model's own code may raise anything where it may not wait for the GPU
        reason = f"{type(error).__name__}: {error}"
    return None, reason if links is None else _first_reason(links, reason)


def recorder_for(model: LoadedModel) -> Record:
    """Return a `Record` by stream capture. Collective: every rank must record the same steps, in the same order."""
    links = model.part.collectives
    rehearse, capture = _stream_capture()

    def record(run: Callable[[], None]) -> Callable[[], None]:
        with model.part.alone():  # a rank that fails here leaves no other waiting inside a collective
            rehearse(run)
        if links is None:
            return capture(run)
        _agree(links)
        run()  # NCCL connects the ranks, which it cannot do within a capture
        return capture(run)

    return record


def _agree(links: Collectives) -> None:
    """Wait for all ranks. OtherRankRefused: one of them could not go on."""
    if reason := _first_reason(links, ""):
        raise OtherRankRefused(reason)


def _first_reason(links: Collectives, reason: str) -> str:
    """Return the reason of the first rank that has one, with its number. Collective."""
    reasons = enumerate(links.gather_texts(reason))
    return next((f"rank {rank}: {text}" for rank, text in reasons if text), "")


# -- the device ------------------------------------------------------------------------------------------------------


def _has_graphs(device: torch.device) -> bool:
    return device.type == "cuda"


@cache
def _capture_stream() -> torch.cuda.Stream:
    """Return the stream of all captures of this process: libraries keep a workspace for each stream that they see."""
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return stream


def _stream_capture() -> tuple[Callable[[Callable[[], None]], None], Record]:
    """Return a function that rehearses a step for a capture, and the capture.

    All graphs share one memory pool, since only one runs at a time.
    """
    memory = torch.cuda.graph_pool_handle()
    stream = _capture_stream()

    @contextmanager
    def aside() -> Iterator[None]:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # left also where a capture fails, which `torch.cuda.graph` would not do
            yield
        torch.cuda.current_stream().wait_stream(stream)

    def rehearse(run: Callable[[], None]) -> None:
        with aside(), _refusing_to_wait():
            run()  # compiles kernels, allocates the libraries' workspaces

    def capture(run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with aside(), torch.cuda.graph(graph, memory, stream, capture_error_mode="thread_local"):
            run()
        return graph.replay

    return rehearse, capture


@contextmanager
def _refusing_to_wait() -> Iterator[None]:
    """Raise where the host waits for the GPU. A capture would raise too, but leaves torch's allocator in disorder."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
