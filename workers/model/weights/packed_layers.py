"""Linears and experts over packed matrices, in the places of transformers' own."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from crossdock.kernels.cpu.packed_linear import num_panel_bytes, why_not_packed
from crossdock.kernels.packed import (
    IN_NIBBLES,
    ExpertCodes,
    PackedMatrix,
    RoundedRows,
    join_rows,
    packed_product,
    plain_rows,
    scaled_product,
)
from crossdock.workers.model.cut.part import ModelPart, TensorSlice
from crossdock.workers.model.cut.position import CannotCut
from crossdock.workers.model.weights.scheme import PackedForm, Scheme

_Codes = TypeVar("_Codes", PackedMatrix, ExpertCodes)


class PackedLinear(nn.Module):
    """A linear whose weight is a packed matrix: x [..., K] to [..., N]."""

    packed: PackedMatrix
    bias: Tensor | None
    in_features: int
    out_features: int

    def forward(self, x: Tensor, rounded: RoundedRows | None = None) -> Tensor:
        """Return the product. `rounded`: the rows of x in e4m3, where a kernel has rounded them already."""
        if rounded is not None:
            return scaled_product(x, self.packed, self.bias, rounded)
        return packed_product(x, self.packed, self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move the matrix too, as torch's own `to` asks."""
        self.packed = _moved(self.packed, fn)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, kind={self.packed.kind}"


class PackedExperts(nn.Module):
    """The packed matrices of experts, in the place of their parameter [E, N, K], or [E, K, N] if transposed.

    An expert's matrix is dequantised each time that it is read.
    """

    def __init__(self, experts: Sequence[Sequence[PackedMatrix]], dtype: torch.dtype, is_transposed: bool) -> None:
        """Store, for each expert, the matrices whose rows lie one after the other."""
        super().__init__()
        self.experts = experts
        self.dtype = dtype
        self._is_transposed = is_transposed
        self.stacked: ExpertCodes | None = None  # see `stack`

    def stack(self) -> None:
        """Put the matrices of all experts into one memory, which a kernel reads."""
        self._take(ExpertCodes.of([join_rows(parts) for parts in self.experts]))

    def _take(self, codes: ExpertCodes) -> None:
        self.stacked, self.experts = codes, [[codes.matrix(number)] for number in range(len(self.experts))]

    def tensors_of(self, expert: int) -> Sequence[Tensor]:
        """Return the tensors of one expert."""
        return [tensor for matrix in self.experts[expert] for tensor in matrix.tensors]

    def add_empty(self, number: int) -> None:
        """Make room for further experts. Their memory has numbers of the first one."""
        added = [[matrix.map(torch.clone) for matrix in self.experts[0]] for _ in range(number)]
        self.experts = [*self.experts, *added]

    def __getitem__(self, expert: Any) -> Tensor:
        weight = plain_rows(self.experts[int(expert)], self.dtype)
        return weight.T if self._is_transposed else weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move the matrices too, as torch's own `to` asks."""
        if self.stacked is None:
            self.experts = [[_moved(matrix, fn) for matrix in expert] for expert in self.experts]
        else:
            self._take(_moved(self.stacked, fn))
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


def can_be_packed(model: Any, name: str) -> bool:
    """Report whether the parameter `name` of a transformers model, on the meta device, may be a packed matrix.

    All other parameters are dequantised as they are loaded: those of other modules than linears, those that are tied,
    and the up-projections of latents and the weights of an indexer's heads, which other code than the linear's own
    reads.
    """
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    owner = model.get_submodule(path.rpartition(".")[0])
    tied = model.all_tied_weights_keys
    if type(module) is nn.Linear:
        is_up_projection = hasattr(owner, "expand_kv") and path.endswith(".kv_b_proj")
        is_read = is_up_projection or path.endswith(".indexer.weights_proj")
        return attribute == "weight" and not is_read and name not in {*tied, *tied.values()}
    return hasattr(module, "is_transposed") and getattr(module, attribute).dim() == 3  # experts that read one at a time


def forms_at_load(model: Any, scheme: Scheme) -> dict[str, PackedForm]:
    """Return the forms of the parameters of a transformers model, on the meta device, that get `scheme` at load.

    Of its decoder, those that may be packed, without routers: encoders, embeddings and norms stay.
    """
    decoder = {id(module) for module in model.get_decoder().modules()}
    forms = {}
    for name, _ in model.named_parameters():
        owner = name.rpartition(".")[0]
        module = model.get_submodule(owner)
        form = scheme.form_of(owner)
        if form is not None and id(module) in decoder and can_be_packed(model, name):
            is_transposed = getattr(module, "is_transposed", False)
            forms[name] = form._replace(layout="columns to round" if is_transposed else "rows to round")
    return forms


def put_linear(linear: Any, packed: PackedMatrix) -> None:
    """Turn an `nn.Linear` into a `PackedLinear`, which keeps its hooks and its bias."""
    linear.__class__ = PackedLinear
    linear._parameters.pop("weight", None)
    linear.packed = packed


def put_experts(module: Any, attribute: str, experts: Sequence[Sequence[PackedMatrix]], dtype: torch.dtype) -> None:
    """Replace a parameter of a module of experts."""
    module._parameters.pop(attribute, None)
    setattr(module, attribute, PackedExperts(experts, dtype, module.is_transposed))
    module._is_hf_initialized = True  # transformers would fill the parameter with random numbers


def part_of(
    name: str, matrix: PackedMatrix, kept: TensorSlice | None, number: int = 0, is_transposed: bool | None = None
) -> PackedMatrix:
    """Return the part of a matrix that a rank holds of the parameter `name`, with memory of its own.

    `kept`: the rank's part of the parameter; None: all. Where the parameter holds several tensors along a dimension,
    and the matrix is one of them, it is the one of this `number`. `is_transposed`: whether the parameter is [E, K, N];
    None: it is [N, K], and not of experts.

    Raises:
        CannotCut: a group or block of scales would be divided.
    """
    if kept is None:
        return matrix
    dims = {None: (0, 1), False: (None, 0, 1), True: (None, 1, 0)}[is_transposed]
    dim = dims[kept.dim]
    ranges = kept.ranges
    parts = []
    first = 0
    if dim is None:
        raise CannotCut(f"{name}: its packed experts cannot be divided among ranks")
    if sum(each.whole for each in ranges) != matrix.shape[dim]:
        ranges = ranges[min(number, len(ranges) - 1) :][:1]
    try:
        for start, stop, whole in ranges:
            parts.append(matrix.part(dim, first + start, first + stop))
            first += whole
        if dim == 1 and len(parts) > 1:
            raise ValueError("several tensors lie along its columns")
        return join_rows(parts).map(lambda tensor: tensor.clone(memory_format=torch.contiguous_format))
    except ValueError as error:
        raise CannotCut(
            f"{name} cannot be divided among so many ranks: {error}; set a smaller tensor_parallel_size, or pipeline "
            f"stages, which hold whole layers"
        ) from error


def put_forms(
    model: Any, part: ModelPart, form_of: Callable[[str], PackedForm | None], dtype: torch.dtype
) -> list[str]:
    """Replace parameters of a model on the meta device with packed matrices without bytes, and return their names.

    `form_of` returns the form of a parameter; None: it stays.

    Raises:
        CannotCut: a group or block of scales would be divided.
    """
    put = []
    for name, parameter in list(model.named_parameters()):
        form = form_of(name)
        if form is None or not can_be_packed(model, name):
            continue
        kept = part.slices.get(name)
        shape = list(parameter.shape) if kept is None else kept.whole_shape(parameter.shape)
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        if len(shape) == 2:
            put_linear(module, part_of(name, _without_bytes(form, *shape), kept))
        else:
            rows, columns = shape[:0:-1] if module.is_transposed else shape[1:]
            count = 2 if "gate_up" in attribute and not module.is_transposed else 1
            matrix = _without_bytes(form, rows // count, columns)
            kept = None if name in part.experts else kept
            parts = [part_of(name, matrix, kept, number, module.is_transposed) for number in range(count)]
            put_experts(module, attribute, [parts] * len(parameter), dtype)
        put.append(name)
    return put


def add_empty_slots(model: Any, part: ModelPart) -> None:
    """Make room for all slots of a rank's experts, of which those have weights that the rank has read."""
    for slots in part.slots:
        experts = model.get_submodule(slots.name)
        for name, parameter in list(experts.named_parameters(recurse=False)):
            empty = parameter.new_zeros(slots.num_slots - len(parameter), *parameter.shape[1:])
            setattr(experts, name, nn.Parameter(torch.cat([parameter.data, empty]), requires_grad=False))
        for child in experts.children():
            if isinstance(child, PackedExperts):
                child.add_empty(slots.num_slots - len(child.experts))


def packed_bytes(model: Any) -> int:
    """Return the bytes of all packed matrices of a model."""
    return sum(each.nbytes for each in packed_tensors(model))


def count_numbers(model: Any) -> int:
    """Return how many numbers the parameters and the packed matrices of a model stand for."""
    plain: int = sum(parameter.numel() for parameter in model.parameters())
    return plain + sum(matrix.shape[0] * matrix.shape[1] for matrix in _matrices(model))


def packed_tensors(model: Any) -> list[Tensor]:
    """Return the tensors of all packed matrices of a model."""
    return [tensor for matrix in _matrices(model) for tensor in matrix.tensors]


def panel_bytes(model: Any) -> int:
    """Return by how many bytes the packed matrices of a model grow in the panels of CPU kernels."""
    found = [each for each in _matrices(model) if why_not_packed(each) is None]
    return sum(num_panel_bytes(each) - each.nbytes for each in found)


def _matrices(model: Any) -> list[PackedMatrix]:
    linears = [each.packed for each in model.modules() if isinstance(each, PackedLinear)]
    experts = [each.experts for each in model.modules() if isinstance(each, PackedExperts)]
    return [*linears, *(matrix for each in experts for one in each for matrix in one)]


def _moved(matrix: _Codes, fn: Callable[[Tensor], Tensor]) -> _Codes:
    """Return a matrix, or those of experts, after `fn` of each tensor.

    Raises:
        TypeError: `fn` changes a dtype, which would round scales or codes.
    """

    def move(tensor: Tensor) -> Tensor:
        moved = fn(tensor)
        if moved.dtype != tensor.dtype:
            raise TypeError(f"a packed matrix keeps its dtypes; {tensor.dtype} would become {moved.dtype}")
        return moved

    return matrix.map(move)


def _without_bytes(form: PackedForm, rows: int, columns: int) -> PackedMatrix:
    """Return a matrix of a form on the meta device."""
    group = form.group or columns
    block_rows = form.block_rows or rows
    grid = torch.empty(-(-rows // block_rows), -(-columns // group), device="meta")
    grid = grid.bfloat16() if form.scale_bytes == 2 else grid
    dtype = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}.get(form.kind, torch.uint8)
    codes = torch.empty(rows, columns // (2 if form.kind in IN_NIBBLES else 1), dtype=dtype, device="meta")
    order = torch.empty(columns, dtype=torch.int64, device="meta") if form.has_order else None
    return PackedMatrix(form.kind, codes, grid, grid if form.has_offsets else None, group, block_rows, order)
