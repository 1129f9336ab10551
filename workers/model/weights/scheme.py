"""How the weights of a checkpoint are stored, as its files say: a scheme that is read here, or a refusal. No torch."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Scheme(NamedTuple):
    """One way in which checkpoints store weights. To read a further one: a line in `SCHEMES`, and its rows in
    `stored_rows`."""

    method: str | None  # `quant_method` in the configuration; None: plain floats
    packed: frozenset[str] = frozenset()  # dtypes, as safetensors names them, of weights that need the scales beside


PLAIN = Scheme(None)
SCHEMES: Mapping[str | None, Scheme] = {
    None: PLAIN,
    "fp8": Scheme("fp8", frozenset({"F8_E4M3"})),  # by blocks, or one scale for a tensor
    "mxfp8": Scheme("mxfp8", frozenset({"F8_E4M3"})),
    "mxfp4": Scheme("mxfp4", frozenset({"U8"})),  # the experts of gpt-oss
}
"""The schemes that are read, by `quant_method`. All but plain weights are computed in plain floats as they are read."""

_PLAIN_INSTEAD = "serve the checkpoint that it was made from; on CPUs, --quantization int8 stores that in 8 bits"
_INSTEAD = {
    "compressed-tensors": f"llm-compressor wrote it: {_PLAIN_INSTEAD}",
    "awq": f"its name without -AWQ is often that of the plain weights: {_PLAIN_INSTEAD}",
    "gptq": f"its name without -GPTQ is often that of the plain weights: {_PLAIN_INSTEAD}",
    "bitsandbytes": f"bitsandbytes needs no file of its own: {_PLAIN_INSTEAD}",
    "modelopt": f"NVIDIA's Model Optimizer wrote it: {_PLAIN_INSTEAD}",
}
_OTHER_CONFIGS = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files beside config.json in which tools describe a quantisation; nothing here reads them."""


def scheme_of(config: Mapping[str, Any], files: Collection[str] = ()) -> Scheme:
    """Return the scheme of a checkpoint whose config.json holds `config`, and whose folder holds `files`.

    Raises:
        ValueError: weights stored so are not read; the message says what to serve instead.
    """
    found = _quantization(config)
    if found is None:
        if lone := next((name for name in _OTHER_CONFIGS if name in files), None):
            raise ValueError(
                f"{lone} says that the weights are quantised, and config.json has no quantization_config to read them "
                f"by: {_PLAIN_INSTEAD}. Remove {lone} if the weights are plain"
            )
        return PLAIN
    method = found.get("quant_method") if isinstance(found, Mapping) else None
    if method is None and isinstance(found, Mapping) and {"load_in_4bit", "load_in_8bit"} & found.keys():
        method = "bitsandbytes"
    if isinstance(method, str) and method in SCHEMES:
        return SCHEMES[method]
    raise ValueError(
        f"config.json says that the weights are quantised with quant_method {method!r}, which is not read: "
        f"{_INSTEAD.get(str(method), _PLAIN_INSTEAD)}. Read are {', '.join(filter(None, SCHEMES))}, and plain weights"
    )


def scheme_at(folder: Path) -> Scheme:
    """Return the scheme of the checkpoint in `folder`. ValueError as in `scheme_of`."""
    names = {file.name for file in folder.iterdir()}
    try:
        return scheme_of(json.loads((folder / "config.json").read_text()), names)
    except ValueError as error:
        raise ValueError(f"model: {folder}: {error}") from None


def _quantization(config: Mapping[str, Any]) -> Any:
    """Return the entry of a quantisation in a configuration or in that of its decoder; None: there is none."""
    parts = [config, *(config.get(name) for name in ("text_config", "llm_config"))]
    found = [part.get(key) for part in parts if isinstance(part, Mapping) for key in _KEYS]
    return next((each for each in found if each is not None), None)


_KEYS = ("quantization_config", "compression_config")
