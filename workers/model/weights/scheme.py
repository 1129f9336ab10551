"""How the weights of a checkpoint are stored, as its files say: a scheme that is read here, or a refusal. No torch."""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from crossdock.kernels.options import CHECKPOINT_METHODS, CodeKind
from crossdock.workers.model.architecture import DECODERS
from crossdock.workers.model.weights.patterns import NamePattern, Steps
from crossdock.workers.model.weights.untrusted import read_config_file, read_json


class PackedForm(NamedTuple):
    """How one matrix [N, K] is packed: what `PackedMatrix` says of it before its tensors are read."""

    layout: str  # the names of its tensors in files, see `LAYOUTS` of unpack.py
    kind: CodeKind  # see `PackedMatrix`
    group: int | None  # columns that share a scale; None: all
    block_rows: int | None = 1  # rows that share a scale; None: all
    has_offsets: bool = False  # zero points
    has_order: bool = False  # columns in an order of their own
    scale_bytes: int = 4

    def __str__(self) -> str:
        if self.group is None:
            shared = "a scale for each tensor" if self.block_rows is None else "a scale for each output"
        elif self.block_rows == 1:
            shared = f"groups of {self.group}"
        else:
            shared = f"blocks of {self.block_rows} x {self.group}"
        return f"{self.kind}, {shared}{', zero points' * self.has_offsets}{', act-order' * self.has_order}"


class Rule(NamedTuple):
    """The linears that are packed in one form."""

    form: PackedForm
    targets: tuple[str | NamePattern, ...] = ("Linear",)  # class, names, or patterns, in files `re:` with a pattern


class Scheme(NamedTuple):
    """One way in which weights are held: as files store them, or made from plain files."""

    method: str | None  # `quant_method` in the configuration; None: plain floats
    rules: tuple[Rule, ...] = ()
    ignored: tuple[str | NamePattern, ...] = ()  # linears in plain floats: names, parts of names, wildcards, patterns
    is_made_at_load: bool = False  # the files are plain, and their weights get this scheme as they are read

    def form_of(self, name: str) -> PackedForm | None:
        """Return the form of the linear `name` of a checkpoint; None: its weight is plain."""
        if any(_names(pattern, name) for pattern in self.ignored):
            return None
        found = (
            rule.form for rule in self.rules if any(each == "Linear" or _names(each, name) for each in rule.targets)
        )
        return next(found, None)

    def __str__(self) -> str:
        return f"{self.method} ({'; '.join(dict.fromkeys(str(rule.form) for rule in self.rules))})"


PLAIN = Scheme(None)

E4M3_AT_LOAD: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    },
    "ignore": ["lm_head", "embed_tokens", "router", "gate", "shared_expert_gate"],
}
"""The quantisation that `quantization: fp8` gives plain weights, as a checkpoint of such weights describes it."""

_PLAIN_INSTEAD = "serve the checkpoint that it was made from; on CPUs, --quantization int8 stores that in 8 bits"
_BESIDE = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files beside config.json in which older tools describe a quantisation, and their methods."""


def scheme_of(config: Mapping[str, Any]) -> Scheme:
    """Return the scheme of a checkpoint by its configuration.

    Raises:
        ValueError: weights stored so are not read; the message says what to serve instead.
    """
    found = quantisation(config)
    if found is None:
        return PLAIN
    method = found.get("quant_method") if isinstance(found, Mapping) else None
    if method is None and isinstance(found, Mapping) and {"load_in_4bit", "load_in_8bit"} & found.keys():
        method = "bitsandbytes"
    if isinstance(method, str) and method in _READERS:
        try:
            return _checked(_READERS[method](found))
        except (TypeError, AttributeError, LookupError, ArithmeticError, ValueError) as error:
            reason = error if isinstance(error, _NotReadError) else f"its fields are not as expected ({error!r})"
            raise ValueError(f"config.json: quantization_config of {method}: {reason}: {_PLAIN_INSTEAD}") from error
    raise ValueError(
        f"config.json says that the weights are quantised with quant_method {method!r}, which is not read: "
        f"{_PLAIN_INSTEAD}. Read are {', '.join(_READERS)}, and plain weights"
    )


def scheme_at(folder: Path) -> Scheme:
    """Return the scheme of the checkpoint in `folder`. ValueError as in `scheme_of`."""
    try:
        return scheme_of({KEYS[0]: quantisation_at(folder)})
    except ValueError as error:
        raise ValueError(f"model: {folder}: {error}") from None


def quantisation_at(folder: Path) -> Any:
    """Return the entry of a quantisation in config.json, or in a file beside it; None: weights are plain.

    Raises:
        ValueError: a file is not JSON.
    """
    found = quantisation(read_config_file(folder))
    for name, method in _BESIDE.items():
        if found is None and (folder / name).is_file():
            beside = read_json(folder / name)
            inner = beside.get("quantization", beside)
            if not isinstance(inner, dict):
                raise ValueError(f"{folder / name}: 'quantization' is no object")
            found = {"quant_method": method, **inner}
    return found


def check_asked(quantization: str | None, scheme: Scheme) -> None:
    """Check that a checkpoint of `scheme` is what the setting `quantization` asks for.

    Raises:
        ValueError: weights are stored in another way.
    """
    if quantization in (None, "int8"):
        if quantization and scheme is not PLAIN:
            raise ValueError(
                f"quantization int8 rounds plain weights, and this checkpoint is quantised with {scheme.method}; "
                f"serve it without --quantization"
            )
        return
    if quantization == "fp8" and scheme is PLAIN:
        return
    if quantization != scheme.method:
        stored = "plain" if scheme is PLAIN else f"quantised with {scheme.method}"
        raise ValueError(
            f"quantization {quantization} is for checkpoints of that quant_method, and these weights are {stored}; "
            f"leave --quantization out. Plain weights are rounded as they are loaded by fp8, and on CPUs by int8"
        )


def loaded_scheme(quantization: str | None, scheme: Scheme) -> Scheme:
    """Return the scheme of a checkpoint's weights once they are loaded. ValueError as in `check_asked`."""
    check_asked(quantization, scheme)
    return ROUNDED if quantization == "fp8" and scheme is PLAIN else scheme


def quantisation(config: Mapping[str, Any]) -> Any:
    """Return the entry of a quantisation in a configuration or in that of its decoder; None: there is none."""
    parts = [config, *(config.get(name) for name in DECODERS)]
    found = [part.get(key) for part in parts if isinstance(part, Mapping) for key in KEYS]
    return next((each for each in found if each is not None), None)


KEYS = ("quantization_config", "compression_config")
_MOST_NAMES = 1 << 13  # of modules, in one configuration
_MOST_STEPS = 1 << 26  # of all patterns of one configuration; 20,000 linears take 40 each of an ordinary pattern


def _checked(scheme: Scheme) -> Scheme:
    """Return a scheme whose numbers and names are such. ValueError: the configuration gives others."""
    names = [*(target for rule in scheme.rules for target in rule.targets), *scheme.ignored]
    if len(names) > _MOST_NAMES or not all(isinstance(name, str) for name in names):
        raise _NotReadError(f"names of modules are texts, at most {_MOST_NAMES}")
    for form in (rule.form for rule in scheme.rules):
        for size in (form.group, form.block_rows):
            if size is not None and (type(size) is not int or not 0 < size < 1 << 31):
                raise _NotReadError(f"groups and blocks of {size!r:.50} are none")
    steps = Steps(_MOST_STEPS)

    def read(found: Sequence[Any]) -> tuple[str | NamePattern, ...]:
        return tuple(NamePattern(each[3:], steps) if each.startswith("re:") else each for each in found)

    rules = tuple(rule._replace(targets=read(rule.targets)) for rule in scheme.rules)
    return scheme._replace(rules=rules, ignored=read(scheme.ignored))


class _NotReadError(ValueError):
    """A form of a known method that is not read; the message names it."""


def _names(pattern: str | NamePattern, name: str) -> bool:
    """Report whether a pattern of a configuration means the linear `name`, or a module that holds it."""
    if isinstance(pattern, NamePattern):
        return pattern.begins(name)
    if any(each in pattern for each in "*?["):
        return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
    return f".{pattern}." in f".{name}."


def _fp8(found: Mapping[str, Any]) -> Scheme:
    if (form := found.get("fmt", "e4m3")) != "e4m3":
        raise _NotReadError(f"fmt {form!r} is not read, only e4m3")
    layout = "scale of a weight"
    rows, columns = found.get("weight_block_size") or (None, None)
    return Scheme(found["quant_method"], (Rule(PackedForm(layout, "e4m3", columns, rows)),), _plain_ones(found))


def _fbgemm_fp8(found: Mapping[str, Any]) -> Scheme:
    form = PackedForm("scale of a weight", "e4m3", None, 1)
    return Scheme("fbgemm_fp8", (Rule(form),), _plain_ones(found))


def _mxfp4(found: Mapping[str, Any]) -> Scheme:
    form = PackedForm("blocks of experts", "e2m1", 32, scale_bytes=2)
    return Scheme("mxfp4", (Rule(form, ("re:.*experts",)),), _plain_ones(found))


def _awq(found: Mapping[str, Any]) -> Scheme:
    bits = found.get("bits", found.get("w_bit", 4))
    version = str(found.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise _NotReadError(f"{bits} bits in version {version} are not read, only 4 bits in version gemm")
    group = found.get("group_size", found.get("q_group_size", 128))
    form = PackedForm("awq", "int4", None if group == -1 else group, 1, has_offsets=bool(found.get("zero_point", True)))
    return Scheme("awq", (Rule(form),), _plain_ones(found))


def _gptq(found: Mapping[str, Any]) -> Scheme:
    bits = found["bits"]
    group = found.get("group_size", 128)
    version = found.get("checkpoint_format", "gptq")
    if bits not in (4, 8) or version not in ("gptq", "gptq_v2"):
        raise _NotReadError(f"{bits} bits in checkpoint_format {version} are not read, only 4 and 8 in gptq or gptq_v2")
    if positive := [name for name in found.get("dynamic") or {} if not name.startswith("-")]:
        raise _NotReadError(f"dynamic: settings for single layers ({positive[0]}) are not read")
    has_offsets = not found.get("sym", False)
    has_order = bool(found.get("desc_act", False))
    form = PackedForm(
        version, "int4" if bits == 4 else "int8", None if group == -1 else group, 1, has_offsets, has_order
    )
    ignored = _plain_ones(found)[: -1 if found.get("lm_head") else None]
    return Scheme("gptq", (Rule(form),), ignored)


def _bitsandbytes(found: Mapping[str, Any]) -> Scheme:
    kind = found.get("bnb_4bit_quant_type", "fp4") if found.get("load_in_4bit") else "8 bits"
    if kind != "nf4":
        raise _NotReadError(f"{kind} is not read, only bnb_4bit_quant_type nf4 with load_in_4bit")
    ignored = (*(found.get("llm_int8_skip_modules") or ()), "lm_head")
    return Scheme("bitsandbytes", (Rule(PackedForm("nf4", "nf4", 64)),), ignored)


def _gguf(found: Mapping[str, Any]) -> Scheme:
    """Return the scheme that `pack_gguf` writes: for each form the modules that have it."""
    rules = [
        Rule(PackedForm("gguf", each["kind"], each["group"], 1, bool(each["has_offsets"])), tuple(each["modules"]))
        for each in found["forms"]
    ]
    return Scheme("gguf", tuple(rules))


def _modelopt(found: Mapping[str, Any]) -> Scheme:
    forms = {
        "FP8": PackedForm("scale of a weight", "e4m3", None, None),
        "FP8_PER_CHANNEL_PER_TOKEN": PackedForm("scale of a weight", "e4m3", None, 1),
        "FP8_PB_WO": PackedForm("scale of a weight", "e4m3", 128, 128),
        "MXFP8": PackedForm("scale of a weight", "e4m3", 32),
        "NVFP4": PackedForm("two scales of a weight", "e2m1", 16),
    }
    algorithm = found.get("quant_algo")
    if algorithm is None:  # of KV pages alone
        return Scheme("modelopt")
    if algorithm not in forms:
        raise _NotReadError(f"quant_algo {algorithm!r} is not read, only {', '.join(forms)}")
    ignored = found.get("exclude_modules") or found.get("ignore") or ()
    return Scheme("modelopt", (Rule(forms[algorithm]),), (*_plain_ones(found), *ignored))


def _compressed_tensors(found: Mapping[str, Any]) -> Scheme:
    if found.get("transform_config"):
        raise _NotReadError("transform_config: weights that need rotations as they are used are not read")
    if (found.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise _NotReadError("sparsity_config: sparse weights are not read")
    groups = found["config_groups"].values()
    rules = tuple(
        Rule(_compressed_form(group.get("format") or found.get("format"), group["weights"]), tuple(group["targets"]))
        for group in groups
    )
    return Scheme("compressed-tensors", rules, tuple(found.get("ignore") or ()))


def _compressed_form(layout: str | None, weights: Mapping[str, Any]) -> PackedForm:
    """Return the form of one group of compressed-tensors. Activations stay as they are, which costs no accuracy."""
    bits = weights["num_bits"]
    kind = weights["type"]
    strategy = weights.get("strategy") or "tensor"
    blocks = tuple(weights.get("block_structure") or ())
    group, rows = {
        "tensor": (None, None),
        "channel": (None, 1),
        "group": (weights.get("group_size"), 1),
        "tensor_group": (weights.get("group_size"), 1),
        "block": (blocks or (None, None))[::-1],
    }.get(strategy, (0, 0))
    has_offsets = not weights.get("symmetric", True)
    has_order = weights.get("actorder") in ("group", True)
    kinds: Mapping[str, Mapping[tuple[Any, Any], CodeKind]] = {
        "pack-quantized": {(4, "int"): "int4", (8, "int"): "int8"},
        "int-quantized": {(8, "int"): "int8"},
        "naive-quantized": {(8, "int"): "int8", (8, "float"): "e4m3"},
        "float-quantized": {(8, "float"): "e4m3"},
        "nvfp4-pack-quantized": {(4, "float"): "e2m1"},
        "mxfp4-pack-quantized": {(4, "float"): "e2m1"},
    }
    code = kinds.get(str(layout), {}).get((bits, kind))
    if code is None or group == 0 or rows == 0:
        raise _NotReadError(
            f"format {layout!r} of {bits} bits ({kind}, {strategy}) is not read, only {', '.join(kinds)} of 4 or 8 bits"
        )
    layout = {"naive-quantized": "int-quantized", "float-quantized": "scale of a weight"}.get(str(layout), str(layout))
    layout = "scale of a weight" if code == "e4m3" else layout
    scale_bytes = 2 if layout == "mxfp4-pack-quantized" else 4
    return PackedForm(layout, code, group, rows, has_offsets, has_order, scale_bytes)


def _plain_ones(found: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of linears that stay plain, and the output projection, which tools leave plain."""
    names: Sequence[str] = [*(found.get("modules_to_not_convert") or ()), *(found.get("ignored_layers") or ())]
    return (*names, "lm_head")


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "fp8": _fp8,  # by blocks, or one scale for a tensor
    "fbgemm_fp8": _fbgemm_fp8,
    "mxfp8": _fp8,
    "mxfp4": _mxfp4,  # the experts of gpt-oss
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "gguf": _gguf,
    "bitsandbytes": _bitsandbytes,
}
"""The readers of `quantization_config` by `quant_method`. `CHECKPOINT_METHODS` names the same for settings."""
assert set(_READERS) == set(CHECKPOINT_METHODS)

ROUNDED = scheme_of({KEYS[0]: E4M3_AT_LOAD})._replace(is_made_at_load=True)
"""The scheme of plain weights that `quantization: fp8` rounds."""
