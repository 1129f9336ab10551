"""The tensors in a checkpoint's files: plain ones, and those that together are one packed matrix."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from copy import copy
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_utils import DownloadKwargs, _get_resolved_checkpoint_files

from crossdock.kernels.packed import PackedMatrix
from crossdock.workers.model.loaders.file_slice import DTYPES, FLOATS, OpenFile
from crossdock.workers.model.loaders.files import Files, open_files
from crossdock.workers.model.loaders.objects import origin_of
from crossdock.workers.model.weights.scheme import PackedForm, Scheme
from crossdock.workers.model.weights.unpack import LAYOUTS, MOST_STATE_BYTES, Layout, nf4_state
from crossdock.workers.model.weights.untrusted import check_index, naming

_SCALES_OF_KV = re.compile(r"\.(k_scale|v_scale|q_scale|output_scale|kv_scale)$")
"""Scales of KV pages, which a replica measures itself."""


class StoredTensor:
    """A tensor in a file of a checkpoint. Stands in for a slice of safetensors, and gives a tensor without bytes."""

    def __init__(self, file: str, key: str, dtype: str, shape: Sequence[int]) -> None:
        self.file, self.key, self.dtype, self.shape = file, key, dtype, list(shape)

    def __getitem__(self, _everything: Any) -> Tensor:
        return torch.empty(self.shape, dtype=DTYPES[self.dtype], device="meta")

    def get_dtype(self) -> str:
        return self.dtype

    def get_shape(self) -> list[int]:
        return self.shape

    def opened(self, files: Files, _dtype: torch.dtype) -> Any:
        """Return a stand-in for a slice of safetensors, whose bytes are read when they are asked for."""
        return files.slice_of(self.file, self.key)

    def rows(self, files: Files, rows: Tensor) -> Tensor:
        """Return rows [R, K] of a matrix in float64, for the check of what was loaded. rows: [R] int64."""
        return torch.cat(self.read_rows(files, rows)).double()

    def read_rows(self, files: Files, rows: Tensor) -> list[Tensor]:
        """Read all that `rows` reads. Returns the tensors as they are stored."""
        source = files.slice_of(self.file, self.key)
        return [source[row : row + 1] for row in rows.tolist()]


class PackedTensor(StoredTensor):
    """Several tensors in files that are one matrix, or one for each expert: a weight in floats for all who ask."""

    def __init__(self, form: PackedForm, pieces: Mapping[str, StoredTensor]) -> None:
        codes = pieces["codes"]
        self.form = form
        self.pieces = pieces
        self._experts: range | None = None  # of a tensor for each expert, those that are read; None: all
        self._layout = LAYOUTS[form.layout]
        shape = self._layout.shape(form, codes.shape)
        if (state := pieces.get("state")) is not None:  # of codes in one line
            if prod(state.shape) > MOST_STATE_BYTES:
                raise ValueError(f"its state has more than {MOST_STATE_BYTES} bytes")
            with open_files(Path(state.file).parent) as files:
                shape = nf4_state(files.slice_of(state.file, state.key)[...], codes.shape)["shape"]
        super().__init__(codes.file, codes.key, "BF16", shape)

    @property
    def is_per_expert(self) -> bool:
        return len(self.shape) == 3

    def matrices(self, files: Files) -> list[PackedMatrix]:
        """Read the matrix, or one for each expert. Rows are outputs. ValueError: the tensors are not as expected."""
        tensors = self.read_pieces(files)
        with naming(Path(self.file)):
            if not self.is_per_expert:
                return [self._layout.unpack(self.form, tensors)]
            experts = range(len(tensors["codes"]))
            return [self._layout.unpack(self.form, {name: each[i] for name, each in tensors.items()}) for i in experts]

    def of_experts(self, experts: range) -> "PackedTensor":
        """Return this tensor, which has a matrix for each expert, without those of other experts."""
        own = copy(self)
        own._experts = experts
        return own

    def read_rows(self, files: Files, _rows: Tensor) -> list[Tensor]:
        return list(self.read_pieces(files).values())

    def read_pieces(self, files: Files) -> dict[str, Tensor]:
        kept = ... if self._experts is None else slice(self._experts.start, self._experts.stop)
        return {name: files.slice_of(piece.file, piece.key)[kept] for name, piece in self.pieces.items()}

    def opened(self, files: Files, dtype: torch.dtype) -> Any:
        """Return a stand-in for a slice of safetensors that gives the weight in plain floats."""
        return _Dequantised(self, files, dtype)

    def rows(self, files: Files, rows: Tensor) -> Tensor:
        (matrix,) = self.matrices(files)
        return torch.cat([matrix.dequantise(torch.float64, slice(row, row + 1)) for row in rows.tolist()])


class _Dequantised:
    def __init__(self, tensor: PackedTensor, files: Files, dtype: torch.dtype) -> None:
        self._tensor = tensor
        self._files = files
        self._dtype = dtype

    def __getitem__(self, key: Any) -> Tensor:
        found = [matrix.dequantise(self._dtype) for matrix in self._tensor.matrices(self._files)]
        whole = torch.stack(found).transpose(1, 2) if self._tensor.is_per_expert else found[0]
        part: Tensor = whole[key]
        return part

    def get_dtype(self) -> str:
        return next(name for name, dtype in FLOATS.items() if dtype is self._dtype)

    def get_shape(self) -> list[int]:
        return self._tensor.shape


class Stored(NamedTuple):
    """The tensors of a checkpoint by name, each packed matrix by the name of its weight."""

    tensors: dict[str, StoredTensor]
    faults: list[str]  # packed matrices that are not whole, as text


def stored_in(config: PretrainedConfig, path: Path, scheme: Scheme) -> Stored:
    """Return the tensors of a checkpoint in `path`. OSError: there are no weights in safetensors."""
    tensors = {
        each.key: each for each in _tensors(config, path) if not _SCALES_OF_KV.search(each.key) or not scheme.rules
    }
    faults: list[str] = []
    for layout in {rule.form.layout for rule in scheme.rules}:
        _group(tensors, scheme, LAYOUTS[layout], layout, faults.append)
    return Stored(tensors, faults)


def _group(
    tensors: dict[str, StoredTensor], scheme: Scheme, layout: Layout, name: str, report: Callable[[str], None]
) -> None:
    """Put one `PackedTensor` in the place of the tensors of each matrix in a layout."""
    for key in [key for key in tensors if key.endswith(layout.codes)]:
        base = key.removesuffix(layout.codes)
        form = scheme.form_of(base)
        if form is None or form.layout != name or tensors[key].dtype not in layout.dtypes:
            continue
        pieces = {"codes": tensors[key]}
        for role, suffixes in layout.others.items():
            if found := next((f"{base}{suffix}" for suffix in suffixes if f"{base}{suffix}" in tensors), None):
                pieces[role] = tensors[found]
        if missing := [role for role in layout.needed if role not in pieces]:
            report(f"{key} ({tensors[key].dtype} without {' and '.join(missing)})")
            continue
        for unused in (*(piece.key for piece in pieces.values()), *(f"{base}{suffix}" for suffix in layout.unused)):
            tensors.pop(unused, None)
        try:
            tensors[f"{base}{layout.weight}"] = PackedTensor(form, pieces)
        except (ValueError, LookupError, TypeError) as error:
            report(f"{key} ({error})")


def _tensors(config: PretrainedConfig, path: Path) -> Iterator[StoredTensor]:
    own_name = getattr(config, "transformers_weights", None)
    if own_name is not None and (not isinstance(own_name, str) or Path(own_name).name != own_name):
        raise ValueError(f"{path / 'config.json'}: transformers_weights is no name of a file beside it")
    check_index(path)
    with naming(path, kept=(OSError,)):
        files, _ = _get_resolved_checkpoint_files(
            pretrained_model_name_or_path=str(path),
            variant=None,
            gguf_file=None,
            use_safetensors=True,
            download_kwargs=DownloadKwargs(local_files_only=True),
            user_agent={},
            is_remote_code=False,
            transformers_explicit_filename=own_name,
        )
    for file in files or ():
        with naming(Path(file)):
            yield from _heads_of(file) if origin_of(path) is not None else _checked_by_safetensors(file)


def _checked_by_safetensors(file: str) -> Iterator[StoredTensor]:
    with safe_open(file, framework="pt", device="cpu") as reader:
        for key in reader.keys():  # noqa: SIM118  # the reader is no mapping
            tensor = reader.get_slice(key)
            yield StoredTensor(file, key, tensor.get_dtype(), tensor.get_shape())


def _heads_of(file: str) -> Iterator[StoredTensor]:
    """Yield the tensors of a file in an object store, of which safetensors checked the head when it was fetched."""
    with closing(OpenFile(Path(file))) as opened:
        for key in opened.keys():  # noqa: SIM118  # it is no mapping
            place = opened.slice_of(key)
            yield StoredTensor(file, key, place.get_dtype(), place.get_shape())
