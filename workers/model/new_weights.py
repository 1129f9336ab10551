"""Other weights of the same model: read beside steps, and put in the place of the present ones between two steps.

The files of a checkpoint go through the same steps as at the start: names, merges, dtypes, and a rank's cut. Then each
copy that steps read is replaced: parameters in place, and what kernels have packed by the same kernels again.

Checksums prove both ways: those of the files are compared with the sender's, and those of all memory that steps read
with what was to be put there.
"""

import copy
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from crossdock.kernels.cpu.huge_pages import give_back
from crossdock.kernels.gpu.storage_memory import StorageMemory, keeps_addresses
from crossdock.workers.model.architecture import is_classifier
from crossdock.workers.model.checksums import checksum, checksums_in
from crossdock.workers.model.layers.coded_products import CodedExperts, CodedLinear
from crossdock.workers.model.layers.fusion import drop_fused, fused_tensors, fused_weights
from crossdock.workers.model.layers.triton_layers import TritonLayers
from crossdock.workers.model.loaders.held import HeldTensors
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.weight_group import WeightGroup, announced
from crossdock.workers.model.weights.finite import check_finite, weights_of
from crossdock.workers.model.weights.formats import PlainWeights
from crossdock.workers.model.weights.heap import trim_heap
from crossdock.workers.model.weights.packed_layers import PackedExperts, PackedLinear
from crossdock.workers.model.weights.scheme import E4M3_AT_LOAD, PLAIN, quantisation, scheme_at, scheme_of
from crossdock.workers.schedule.request.weight_version import unlike

Arrays: TypeAlias = Mapping[str, tuple[str, tuple[int, ...], Any, str]]
"""Whole tensors by their names in a checkpoint: dtype by name, shape, the bytes as an array of numpy, and checksum."""


class NewWeights:
    """The next weights of one rank's part of a model. `read` may run in another thread than steps."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._put: Callable[[], None] | None = None  # of weights that have been read
        self._proof = self._read_proof = Proof({}, {})  # of the present weights, and of those that have been read
        self._sent: dict[str, str] = {}  # the checksums that the trainer gave with its tensors
        self._group: WeightGroup | None = None  # of a trainer that sends tensors
        self._received: dict[str, Tensor] = {}
        self._memory: StorageMemory | None = None  # of the present weights, while a GPU lacks them
        self.are_given_up = False  # the present weights: no step may read them

    @property
    def is_read(self) -> bool:
        return self._put is not None

    def call(self, method: str, argument: str) -> dict[str, str]:
        """Do what the driver asks of every rank: `start` an update, `join` a trainer's group, `receive` tensors, `read`
        these or a folder, `leave` the group, `check` the present weights. `argument`: as JSON. Returns the checksums of
        the tensors that were read or checked.

        Raises:
            ValueError: the weights cannot be replaced, or the argument or the tensors are not right.
        """
        given = json.loads(argument)
        if method in ("start", "leave"):
            self.drop()
        if method == "start":
            self._check_replaceable()
        if method in ("join", "leave"):
            self._group = None
        if method == "join":
            self._group = WeightGroup(given["init_info"], given["first"] + self._rank, self._model.device)
        if method == "receive":
            if self._group is None:
                raise ValueError("there is no group to receive from: call /init_weight_transfer_engine first")
            self._received |= self._group.receive(announced(given["update_info"]))
            self._sent |= given["update_info"].get("checksums") or {}
        if method == "read":
            if given["folder"]:
                return self.read(Path(given["folder"]), given.get("checksums"))
            received, sent = self._received, self._sent
            self.drop()  # after a failure nothing keeps them
            return self.read_tensors(received, sent)
        return self.check() if method == "check" else {}

    def hold(self, arrays: Arrays) -> None:
        """Take whole tensors as if a group had sent them, for `call` to read. Their memory may be another process's: it
        is read alone, and must stay as it is until the weights are put in place."""
        self.drop()
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nothing writes to the tensors
        for name, (dtype, shape, array, sent) in arrays.items():
            self._received[name] = torch.from_numpy(array).view(getattr(torch, dtype)).view(shape)
            self._sent[name] = sent

    @property
    def _rank(self) -> int:
        return self._model.part.position.rank

    def _check_replaceable(self) -> None:
        if reason := self.why_not():
            raise ValueError(f"weights cannot be replaced: {reason}")

    def why_not(self) -> str:
        """Return why this model's weights cannot be replaced; empty: they can."""
        fields = self._model.config.to_dict()
        if quantisation(fields) == E4M3_AT_LOAD:
            return "quantization fp8 rounded the weights of the start; serve without it, or on CPUs with int8"
        if scheme_of(fields) is not PLAIN:
            return "the served checkpoint is quantised, and trainers have no weights of that form"
        if self._model.scales:
            return "kv_cache_dtype fp8: the scales of pages were measured with the weights of the start"
        if is_classifier(self._model.config.architectures):
            return "the model classifies, and ingresses have read its head at the start"
        if self._model.encoder is not None:
            return "the model encodes pictures, and embeddings of the weights of the start would be used again"
        return ""

    def read(self, folder: Path, sent: Mapping[str, str] | None = None) -> dict[str, str]:
        """Read this rank's part of a checkpoint in plain safetensors. The files may change afterwards.

        `sent`: checksums of tensors, by their names in the checkpoint. Returns those of all.

        Raises:
            ValueError: the weights cannot be replaced, the files are not all weights of this model, a tensor has
                another checksum than it was sent with, or a number is NaN or infinite.
        """
        self._put = None
        self._check_replaceable()
        if scheme_at(folder) is not PLAIN:
            raise ValueError(f"{folder} is quantised: give plain weights in safetensors")
        return self._read(folder, checksums_in(folder), sent)

    def _read(
        self, folder: Path, received: dict[str, str], sent: Mapping[str, str] | None, held: HeldTensors | None = None
    ) -> dict[str, str]:
        if wrong := unlike({name: received.get(name, "") for name in sent or ()}, sent or {}):
            raise ValueError(f"checksums: other bytes were received than were sent of {wrong}")
        model = self._model
        config = copy.deepcopy(model.config)
        plain, _ = PlainWeights().read(config, folder, model.dtype, model.part.collectives, held=held)
        plain.requires_grad_(False)
        check_finite(weights_of(plain), f"weights in {folder}" if sent is None else "weights that were sent")
        put, checksums = _prepared(model.module, plain, may_change=held is None)
        self._put, self._read_proof = put, Proof(received, checksums)
        return received

    def check(self) -> dict[str, str]:
        """Return the checksums of the tensors that an update has put in place, by their names in the checkpoint.

        Raises:
            ValueError: there was no update, or the memory that steps read is not what was to be put there.
        """
        if not self._proof.held:
            raise ValueError("no update has replaced the weights of the start: their checksums are those of the files")
        if self.are_given_up:
            raise ValueError("the weights are given up: use /wake_up first")
        found = held_checksums(self._model.module)
        if self._model.balance is not None:  # experts that have moved since the update lie at other places
            moved = tuple(self._model.balance.moved_names)
            found |= {name: value for name, value in self._proof.held.items() if name.startswith(moved)}
        if wrong := unlike(found, self._proof.held):
            raise ValueError(f"memory has changed since the update, of {wrong}")
        return self._proof.received

    def read_tensors(self, tensors: Mapping[str, Tensor], sent: Mapping[str, str]) -> dict[str, str]:
        """Read this rank's part of whole tensors, by their names in a checkpoint; as `read` otherwise.

        They are put in place from where they are, and must stay as they are until then.
        """
        self._put = None
        self._check_replaceable()
        held = HeldTensors(tensors)
        with tempfile.TemporaryDirectory(prefix="crossdock-weights-") as folder:
            self._model.config.save_pretrained(folder)
            held.write_heads(Path(folder))
            received = {name: checksum(tensor) for name, tensor in tensors.items()}
            return self._read(Path(folder), received, sent, held)

    @torch.inference_mode()
    def put(self) -> None:
        """Compute with the weights that were read from the next step on. Belongs between two steps."""
        assert self._put is not None, "no weights have been read"
        self.make_room()
        self._put()
        self._memory = None
        if self._model.balance is not None:
            self._model.balance.reset()
        self.are_given_up = False
        self._proof = self._read_proof
        self.drop()
        trim_heap()

    @property
    def are_kept(self) -> bool:
        """Return whether the present weights are given up, and the host's memory has them."""
        return self._memory is not None and self._memory.has_contents

    def give_up(self, *, keeps: bool = False) -> None:
        """Give the memory of the present weights back, until others are put in place, or until `take`.

        `keeps`: the host's memory gets the weights of a GPU. Else they are lost, also those that it has.
        """
        if not keeps_addresses(self._model.device):
            self._give_up_storages(keeps)
        else:
            for tensor in _tensors(self._model.module).values():
                if tensor.is_contiguous():
                    give_back(tensor)
            drop_fused(self._model.module)
        trim_heap()
        self.are_given_up = True

    def _give_up_storages(self, keeps: bool) -> None:
        if self._memory is None:
            module = self._model.module
            self._memory = StorageMemory([*_tensors(module).values(), *_packed_tensors(module)])
            self._memory.give_back(keeps=keeps)
        elif not keeps:
            self._memory.forget()

    def take(self) -> None:
        """Take the weights again that the host's memory has. ValueError: as `make_room`."""
        self.make_room()
        if self._memory is not None:
            self._memory.fill()
            self._memory = None
        self.are_given_up = False
        trim_heap()

    def make_room(self) -> None:
        """Take the memory of weights that were given up on a GPU again; it holds anything.

        Raises:
            ValueError: the GPU has not so much free memory. Nothing has changed.
        """
        if self._memory is not None:
            self._memory.take()

    def drop(self) -> None:
        """Forget what was received and read."""
        self._put = None
        self._received = {}
        self._sent = {}


class Proof(NamedTuple):
    """The checksums of one set of weights."""

    received: dict[str, str]  # of whole tensors, by their names in a checkpoint
    held: dict[str, str]  # of all memory that this rank's steps read, as `held_checksums`


@torch.inference_mode()
def held_checksums(module: nn.Module) -> dict[str, str]:
    """Return the checksum of each tensor that steps read: parameters by name, what kernels have packed by place."""
    tensors = _tensors(module) | fused_tensors(module)
    return {name: checksum(tensor) for name, tensor in tensors.items()}


@torch.inference_mode()
def _prepared(module: nn.Module, plain: nn.Module, may_change: bool) -> tuple[Callable[[], None], dict[str, str]]:
    """Return a function that puts the weights of `plain` into `module`, and what `held_checksums` must be afterwards.

    `may_change`: whether the memory of `plain` may change before that, as files that it maps may.

    Raises:
        ValueError: a tensor is missing, or of another shape.
    """
    source = plain.state_dict()
    held = _tensors(module)
    wrong = [name for name, tensor in held.items() if name not in source or source[name].shape != tensor.shape]
    if wrong:
        raise ValueError(f"no weights of the right shape for {', '.join(wrong[:3])}{', …' * (len(wrong) > 3)}")
    copies: dict[int, Tensor] = {}  # by memory: tied tensors are one
    pairs = {
        name: (tensor, copies.setdefault(new.data_ptr(), new.clone() if may_change else new))
        for name, tensor in held.items()
        for new in [source[name]]
    }
    put_fused, packed = fused_weights(module, plain)
    checksums = {name: checksum(new.to(tensor.dtype)) for name, (tensor, new) in pairs.items()}
    checksums |= {name: checksum(tensor) for name, tensor in packed.items()}

    def put() -> None:
        for tensor, new in pairs.values():
            tensor.copy_(new)
        put_fused()

    return put, checksums


def _tensors(module: Any) -> dict[str, Tensor]:
    """Return the tensors that steps read in place, by their names in a plain module."""
    found = dict(module.state_dict())
    for path, part in module.named_modules():
        if isinstance(part, TritonLayers):
            layers = path.rpartition(".")[0]
            found |= {f"{layers}.{name}": tensor for name, tensor in part.replaced[0].state_dict().items()}
    return found


def _packed_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors of packed weights on a GPU, which are no parameters."""
    for part in module.modules():
        if isinstance(part, TritonLayers):
            yield from _packed_tensors(part.replaced[0])
        elif isinstance(part, CodedLinear | CodedExperts):
            yield from part.kernel_tensors
        elif isinstance(part, PackedLinear):
            yield from part.packed.tensors
        elif isinstance(part, PackedExperts):
            yield from (tensor for parts in part.experts for matrix in parts for tensor in matrix.tensors)
