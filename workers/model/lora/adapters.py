"""The LoRA adapters in a rank's memory, and the rows of a step that each of them changes.

A step with adapters adds `scale * B A x` to the outputs of each linear, for the rows of each adapter in turn. The base
model's weights may be stored in any format: an adapter only sees inputs and outputs.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby, pairwise
from math import frexp
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from crossdock.kernels.low_rank import Pair
from crossdock.workers.model.cut.part import ModelPart, TensorSlice
from crossdock.workers.model.device_copies import to_device
from crossdock.workers.model.forward.forward_context import context_or_none
from crossdock.workers.model.forward.row_adapters import AdapterRows, AdapterWeights, RowAdapters
from crossdock.workers.model.lora.adapter_files import (
    WEIGHTS,
    AdapterFiles,
    Factor,
    fingerprint,
    read_adapter,
)
from crossdock.workers.model.weights.packed_layers import PackedLinear
from crossdock.workers.schedule.request.submission import Adapter

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_Spans: TypeAlias = dict[str, list[tuple[int, int]]]
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Site(NamedTuple):
    """A linear that adapters may change: its size in the whole model, and the part of its weight that is here."""

    out_features: int
    in_features: int
    kept: TensorSlice | None  # None: all


class FusedStack(Protocol):
    """Layers whose kernels compute what adapters change as well. They read bfloat16 beside any inputs."""

    @property
    def sites(self) -> Iterable[str]:
        """The names of all linears that the layers compute."""

    def deltas_of(self, weights: AdapterWeights) -> object:
        """Return the matrices of an adapter as the kernels read them. The first call takes a millisecond or two."""


@dataclass(slots=True, eq=False)
class Adapters:
    """The adapters that a rank holds, by fingerprint. `load` may run in another thread than steps."""

    sites: Mapping[str, Site]  # by name of the module
    held_layers: range  # the numbers of this rank's layers
    num_layers: int  # of the whole model
    device: torch.device
    dtype: torch.dtype
    max_rank: int
    most: int = 1  # in memory at once
    in_triton: bool = False  # steps compute them in Triton; else in torch, or in the kernels of `stacks`
    stacks: Sequence[FusedStack] = ()
    loaded: dict[str, AdapterWeights] = field(default_factory=dict, init=False)
    _in_stacks: frozenset[str] = field(init=False)  # names of linears

    def __post_init__(self) -> None:
        self._in_stacks = frozenset(name for stack in self.stacks for name in stack.sites)

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes of as many adapters as may be in memory, each of the largest rank in every linear."""
        sizes = [
            [site.out_features, site.in_features]
            if site.kept is None
            else site.kept.shape_of([site.out_features, site.in_features])
            for site in self.sites.values()
        ]
        return self.most * self.max_rank * self.dtype.itemsize * sum(map(sum, sizes))

    def check(self, files: AdapterFiles) -> None:
        """Check that an adapter fits this model. ValueError: names a module that does not.

        Sizes of modules in other pipeline stages are known by the modules of that name here, unless these differ.
        """
        for name in files.factors:
            self._is_here(files, name)

    def load(self, adapter: Adapter) -> None:
        """Read the files of an adapter, and keep this rank's part of its weights.

        Raises:
            ValueError: the files have changed since the adapter got its fingerprint, or do not fit this model.
            OSError: the files cannot be read.
        """
        files = read_adapter(Path(adapter.path), self.max_rank)
        self.check(files)
        content = files.read_weights()  # once: a file may change, a mapped one may shrink
        if fingerprint(files.folder, content) != adapter.fingerprint:
            raise ValueError(f"{files.folder} has other bytes than when adapter {adapter.name!r} was loaded first")
        files.check_numbers(content)
        alike: dict[Any, list[str]] = {}
        for name, (a, b) in files.factors.items():
            if self._is_here(files, name):
                own_name = name.rpartition(".")[2]  # of one name, matrices are mostly as far apart from layer to layer
                kind = (own_name, a[:3], b[:3], files.scales[name], self.sites[name].kept, name in self._in_stacks)
                alike.setdefault(kind, []).append(name)
        in_file = {name: a.offset for name, (a, _) in files.factors.items()}
        for names in alike.values():
            names.sort(key=in_file.__getitem__)
        pairs = dict(chain.from_iterable(self._pairs(files, names, content) for names in alike.values()))
        weights = AdapterWeights(pairs, self._table(pairs))
        for stack in self.stacks:
            stack.deltas_of(weights)  # makes them in the thread of loads, so that no step waits for that
        self.loaded[adapter.fingerprint] = weights

    def _table(self, pairs: Mapping[str, Pair]) -> Tensor:
        """Return the addresses and the rank of each site's matrices, [sites, 3]; zeros where there are none."""
        rows = [[0, 0, 0]] * len(self.sites)
        for number, name in enumerate(self.sites):
            if name in pairs:
                a, b = pairs[name]
                rows[number] = [a.data_ptr(), b.data_ptr(), a.shape[0]]
        return torch.tensor(rows, dtype=torch.int64)

    @property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.sites)}

    def drop(self, fingerprint: str) -> None:
        """Forget an adapter. A step in flight keeps the weights that it reads."""
        self.loaded.pop(fingerprint, None)

    def rows(self, adapters: Sequence[str], query_start: NDArray[np.int32]) -> RowAdapters | None:
        """Return the rows of each adapter in a step; None: no row has one.

        adapters: of each of the step's S sequences, a fingerprint or an empty text. query_start: [S+1].
        """
        spans = _spans(adapters, query_start)
        if not spans:
            return None
        if not self.in_triton:
            return RowAdapters([AdapterRows(self.loaded[name], self._rows_of(own)) for name, own in spans.items()])
        groups = [AdapterRows(self.loaded[name], slice(0)) for name in spans]  # keeps the weights until the step ends
        from crossdock.kernels.gpu.triton_low_rank import LowRankRows  # late: Triton is not installed everywhere

        return RowAdapters(groups, self._numbers, LowRankRows.of(*self._listed(spans), self.device))

    def room(self, num_rows: int) -> RowAdapters | None:
        """Return where recorded steps of up to `num_rows` rows read their adapters; None: steps compute them in torch.

        No row has an adapter yet: see `enter`.
        """
        if not self.in_triton:
            return None
        from crossdock.kernels.gpu.triton_low_rank import LowRankRows  # as in `rows`

        sizes = self.most, len(self.sites), num_rows, self.max_rank
        return RowAdapters((), self._numbers, LowRankRows.room(*sizes, self.device))

    def enter(self, room: RowAdapters, adapters: Sequence[str], query_start: NDArray[np.int32]) -> None:
        """Copy the rows of each adapter in a step to `room`; see `rows`. Some row has one."""
        assert room.in_triton is not None
        room.in_triton.enter(*self._listed(_spans(adapters, query_start)))

    def _listed(self, spans: _Spans) -> tuple[Tensor, list[NDArray[np.int64]]]:
        """Return the table and the numbers of the rows of each adapter, as `LowRankRows` takes them."""
        tables = torch.stack([self.loaded[name].table for name in spans])
        return tables, [np.concatenate([np.arange(*span) for span in own]) for own in spans.values()]

    def _rows_of(self, spans: Sequence[tuple[int, int]]) -> Tensor | slice:
        if len(spans) == 1:
            return slice(*spans[0])
        return to_device(np.concatenate([np.arange(*span) for span in spans]), self.device)

    def _is_here(self, files: AdapterFiles, name: str) -> bool:
        """Return whether this rank has the module. ValueError: the model has no such linear, or one of another size."""
        site = self.sites.get(name)
        if site is None:
            found = _LAYER.search(name)
            is_elsewhere = found is not None and int(found[1]) in {*range(self.num_layers)} - {*self.held_layers}
            if is_elsewhere and (sizes := self._sizes_of_like(name)):
                if len(sizes) == 1:
                    _check_size(files, name, *sizes.pop())
                return False
            raise ValueError(
                f"{files.folder / WEIGHTS}: {name:.200} is no linear of this model that adapters can change"
            )
        _check_size(files, name, site.out_features, site.in_features)
        return True

    def _sizes_of_like(self, name: str) -> set[tuple[int, int]]:
        """Return the outputs and inputs of the modules here that have the name of a module in another layer."""
        pattern = _LAYER.sub(r".layers.N.", name)
        alike = (site for each, site in self.sites.items() if _LAYER.sub(r".layers.N.", each) == pattern)
        return {(site.out_features, site.in_features) for site in alike}

    def _pairs(self, files: AdapterFiles, names: Sequence[str], content: memoryview) -> Iterable[tuple[str, Pair]]:
        """Return this rank's part of A [rank, K] and of scale * B [N, rank] of modules whose matrices are alike.

        All in one: an operator for each of some hundred modules would keep the interpreter from steps for 30 ms.
        """
        kept = self.sites[names[0]].kept
        scale = files.scales[names[0]]
        a, b = (_matrices([files.factors[name][which] for name in names], content) for which in (0, 1))
        if kept is not None:
            a, b = (a, kept.read(b, 2)) if kept.dim == 0 else (kept.read(a, 2), b)
        rounds_nothing = a.dtype == b.dtype == torch.bfloat16 and frexp(scale)[0] == 0.5
        dtype = torch.bfloat16 if rounds_nothing and names[0] in self._in_stacks else self.dtype
        a = a.to(self.device, dtype, copy=True).contiguous()
        b = b.transpose(1, 2)  # kernels read the outputs of one rank after the other
        if rounds_nothing and dtype == torch.bfloat16:
            b = b.to(self.device, memory_format=torch.contiguous_format, copy=True).mul_(scale)
        else:
            b = b.to(self.device, torch.float32, copy=True).mul_(scale).to(dtype).contiguous()
        return zip(names, zip(a.unbind(), b.transpose(1, 2).unbind(), strict=True), strict=True)


def _spans(adapters: Sequence[str], query_start: NDArray[np.int32]) -> _Spans:
    """Return the rows of each adapter in a step as ranges, by its fingerprint; see `Adapters.rows`."""
    spans: _Spans = {}
    for name, numbers in groupby(range(len(adapters)), key=lambda number: adapters[number]):
        if name:
            first, *rest = numbers
            last = rest[-1] if rest else first
            spans.setdefault(name, []).append((int(query_start[first]), int(query_start[last + 1])))
    return spans


def _check_size(files: AdapterFiles, name: str, out_features: int, in_features: int) -> None:
    """Check the matrices of a module. ValueError: the module of this model has another size."""
    a, b = files.factors[name]
    if (b.rows, a.columns) != (out_features, in_features):
        raise ValueError(
            f"{files.folder / WEIGHTS}: {name:.200} has {a.columns} inputs and {b.rows} outputs; this model's has "
            f"{in_features} and {out_features}"
        )


def _matrices(factors: Sequence[Factor], content: memoryview) -> Tensor:
    """Return matrices of one shape [n, rows, columns], over the file's bytes where they lie evenly in there.

    They do where layers are alike, and a view for each matrix would take the interpreter longer.
    """
    first = factors[0]
    dtype = _DTYPES[factors[0].dtype]
    offsets = [factor.offset for factor in factors]
    size = first.rows * first.columns
    gaps = {after - before for before, after in pairwise(offsets)} or {first.num_bytes}
    if len(gaps) > 1 or min(gaps) < first.num_bytes or min(gaps) % dtype.itemsize:
        return torch.cat([_matrices([factor], content) for factor in factors])
    step = gaps.pop() // dtype.itemsize
    data = torch.frombuffer(content, dtype=dtype, count=step * (len(factors) - 1) + size, offset=first.offset)
    return data.as_strided((len(factors), first.rows, first.columns), (step, first.columns, 1))


def sites_of(module: Any, part: ModelPart) -> dict[str, Site]:
    """Return the linears of the decoder layers that adapters may change, by name.

    Left out are experts, whose rows are those of their tokens alone, and projections that other code than the linear's
    own reads.
    """
    decoder = module.get_decoder()
    found = {}
    prefix = next(name for name, each in module.named_modules() if each is decoder)
    for name, linear in module.named_modules():
        layer = _LAYER.match(name, len(prefix))
        if not isinstance(linear, nn.Linear | PackedLinear) or not name.startswith(prefix) or layer is None:
            continue
        if int(layer[1]) not in part.held_layers:
            continue
        owner = module.get_submodule(name.rpartition(".")[0])
        if ".experts." in name or (hasattr(owner, "expand_kv") and name.endswith(".kv_b_proj")):
            continue
        shape = [linear.out_features, linear.in_features]
        kept = part.slices.get(f"{name}.weight")
        out_features, in_features = shape if kept is None else kept.whole_shape(shape)
        found[name] = Site(out_features, in_features, kept)
    return found


def hook_adapters(module: Any, sites: Mapping[str, Site]) -> None:
    """Let each linear of `sites` add what adapters change to its outputs, before ranks add these up."""
    for name in sites:
        module.get_submodule(name).register_forward_hook(partial(_add, name), prepend=True)


def _add(name: str, _: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
    """Add what adapters change, as a hook of the linear `name`."""
    context = context_or_none()
    if context is not None and context.adapters is not None:
        x = args[0]
        context.adapters.add(name, x if x.dim() == 2 else x[0], out if out.dim() == 2 else out[0])
