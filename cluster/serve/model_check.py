"""Check a model against the settings by its files alone: context, layers, weights, adapters, pages. No torch, no Ray.

A replica checks all of this again, with the model in its hands. What is refused here is refused there too; here it
takes milliseconds, and nothing has been started.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ByteSize

from crossdock.cluster.config import ClusterConfig, PoolConfig
from crossdock.kernels.packages import has_package, require_backend
from crossdock.workers.model.architecture import decoder_fields, require_served_layers
from crossdock.workers.model.context_length import longest_request, own_length
from crossdock.workers.model.loaders.objects import origin_of
from crossdock.workers.model.lora.adapter_files import read_adapter
from crossdock.workers.model.memory.memory_budget import ON_CPUS
from crossdock.workers.model.model_spec import FITTING
from crossdock.workers.model.text_files import answer_of, longest_text
from crossdock.workers.model.weights.scheme import PLAIN, scheme_at
from crossdock.workers.model.weights.untrusted import naming, read_config_file, read_json_if_any
from crossdock.workers.replica.text_settings import check_text_settings
from crossdock.workers.replica.tiers.object_tier import NEEDS_OBSTORE, is_store
from crossdock.workers.report.kv_events import NEEDS_PYZMQ

_INDEX = "model.safetensors.index.json"
_NUMBERED = re.compile(r"(.*?)\.(\d+)\.(.*)")  # the first number in a name is that of the layer
_PLAIN_CACHES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite", "phi3")
"""Model types whose every layer keeps keys and values of all tokens, unless the configuration has windows."""

Shapes = Mapping[str, list[int]]


def check_model(config: ClusterConfig, folder: Path, *, has_gpus: bool) -> None:
    """Check the files of a model in `folder` against all settings that concern them.

    `has_gpus`: whether a pool without `num_gpus` runs on GPUs.

    Raises:
        ValueError: a replica would refuse the model or a setting; the message names the setting or the file.
    """
    fields = read_config_file(folder)
    view = _ConfigView(decoder_fields(fields))
    kinds = view.fields.get("layer_types")
    if isinstance(kinds, list):
        require_served_layers(str(fields.get("model_type")), map(str, kinds))
    if answer_of(fields, folder) is not None:
        _check_text_encoder(config, folder, fields)
        return
    longest_request(view, config.model.asked_length)
    engines = [pool.engine or config.engine for pool in config.pools]
    if any(engine.kv_events for engine in engines) and not has_package("zmq"):
        raise ValueError(NEEDS_PYZMQ)
    if any(is_store(engine.kv_files[0]) for engine in engines) and not has_package("obstore"):
        raise ValueError(NEEDS_OBSTORE)
    if config.is_emulated:
        return
    shapes = _shapes_in(folder)
    _check_layers(folder, view.fields, shapes)
    for name, path in config.model.lora_modules.items():
        _check_adapter(name, Path(path).expanduser().absolute(), config, folder, view.fields, shapes)
    for pool in config.pools:
        is_on_cpu = pool.num_gpus == 0 or (pool.num_gpus is None and not has_gpus)
        require_backend((pool.engine or config.engine).attention_backend, is_on_cpu=is_on_cpu)
        _check_pages(config, pool, view, is_on_cpu=is_on_cpu)


def _check_text_encoder(config: ClusterConfig, folder: Path, fields: Mapping[str, Any]) -> None:
    """Check the files of a text encoder, and the settings that it can have. ValueError: names the one that is wrong."""
    longest = longest_text(folder, fields, config.model.asked_length)
    if config.http.rollouts:
        raise ValueError("http.rollouts: the weights of a text encoder are not replaced while it runs; leave it out")
    for pool in config.pools:
        spec = config.replica_spec(pool)
        check_text_settings(spec)
        tokens = spec.engine.max_num_batched_tokens
        if 0 < tokens < longest:
            raise ValueError(
                f"engine.max_num_batched_tokens ({tokens}) must be 0 or at least the longest text ({longest} tokens), "
                "which one step reads whole; or lower model.max_model_len (--max-model-len)"
            )
    _check_layers(folder, fields, _shapes_in(folder))


class _ConfigView:
    """The fields of a config.json under the names that transformers gives them, without transformers.

    A field that the file does not have is missing here, too: then nothing is concluded from it.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields
        positions = fields.get("max_position_embeddings")
        self.max_position_embeddings = positions if isinstance(positions, int) else None
        scaling = fields.get("rope_parameters") or fields.get("rope_scaling")
        if isinstance(scaling, dict):
            kind = scaling.get("rope_type", scaling.get("type"))
            self.rope_parameters = {**scaling, **({} if kind is None else {"rope_type": kind})}
        elif "rope_theta" in fields:
            self.rope_parameters = {"rope_type": "default"}

    def get_text_config(self, decoder: bool = True) -> "_ConfigView":
        """Return itself: the fields are those of the decoder."""
        return self


def _shapes_in(folder: Path) -> Shapes:
    """Return the shapes of all tensors by their names, from the heads of the files.

    Raises:
        ValueError: there are no weights, or a file is cut off or no safetensors.
    """
    from safetensors import safe_open

    if origin_of(folder) is not None:
        return {}  # the bytes are in an object store; the heads were checked when they were fetched
    index = read_json_if_any(folder / _INDEX)
    whole = folder / "model.safetensors"
    if index:
        files = sorted({folder / name for name in index["weight_map"].values()})
    else:
        files = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"model: {folder} has no weights in safetensors; expected is model.safetensors or its parts")
    shapes: dict[str, list[int]] = {}
    for file in files:
        with naming(file), safe_open(file, framework="np") as reader:
            names = reader.keys()
            shapes |= {name: reader.get_slice(name).get_shape() for name in names}
    return shapes


def _check_layers(folder: Path, fields: Mapping[str, Any], shapes: Shapes) -> None:
    """Check that the files have tensors of as many layers as config.json says. ValueError: a layer has none."""
    num_layers = fields.get("num_hidden_layers")
    if not isinstance(num_layers, int):
        return
    found: dict[str, set[int]] = defaultdict(set)
    for name in shapes:
        if match := _NUMBERED.fullmatch(name):
            found[match[1]].add(int(match[2]))
    wanted = set(range(num_layers))
    if not found or any(wanted <= layers for layers in found.values()):
        return
    most = max(found.values(), key=len)
    raise ValueError(
        f"model: {folder / 'config.json'} has num_hidden_layers {num_layers}, and the files of weights have no tensor "
        f"of layer {min(wanted - most)}; config.json or a part of the weights is of another model"
    )


def _check_adapter(
    name: str, folder: Path, config: ClusterConfig, model: Path, fields: Mapping[str, Any], shapes: Shapes
) -> None:
    """Check the files of an adapter, and its shapes where the model's files have a tensor of the same name."""
    try:
        files = read_adapter(folder, config.engine.max_lora_rank)
        if scheme_at(model) is not PLAIN:
            return  # packed weights have other shapes and names
        for module, (a, b) in files.factors.items():
            shape = shapes.get(f"{module}.weight")
            if shape is not None and shape != [b.rows, a.columns]:
                raise ValueError(
                    f"{module} of the adapter is [{b.rows}, {a.columns}], and of the model {shape}: the adapter is of "
                    f"another model"
                )
            number = _NUMBERED.fullmatch(module)
            num_layers = fields.get("num_hidden_layers")
            if number is not None and isinstance(num_layers, int) and int(number[2]) >= num_layers:
                raise ValueError(f"the adapter has {module}, and the model has {num_layers} layers")
    except (OSError, ValueError) as error:
        raise ValueError(f"model.lora_modules: {name!r} cannot be served: {error}") from None


def _check_pages(config: ClusterConfig, pool: PoolConfig, view: _ConfigView, *, is_on_cpu: bool) -> None:
    """Check that the KV pages of a rank hold one request of `max_model_len`, where this can be told without the model.

    The bytes that are counted are the least that such a request can need.
    """
    engine = pool.engine or config.engine
    memory = engine.kv_cache_memory or (ON_CPUS if is_on_cpu else None)
    per_token = _least_bytes_per_token(view.fields, _bytes_of_number(config, pool))
    longest = None if config.model.max_model_len == FITTING else config.model.max_model_len or own_length(view)
    if memory is None or per_token is None or longest is None:
        return
    needed = longest * per_token // pool.num_ranks
    if needed > memory:
        where = f"pools.{pool.name}.engine" if pool.engine else "engine"
        raise ValueError(
            f"{where}.kv_cache_memory ({ByteSize(memory).human_readable()}) is too small: one request of max_model_len "
            f"({longest}) needs {ByteSize(needed).human_readable()} or more on each rank; give it, or lower "
            f"model.max_model_len (--max-model-len; auto: what fits)"
        )


def _bytes_of_number(config: ClusterConfig, pool: PoolConfig) -> int:
    """Return the fewest bytes that a number of a KV page may have."""
    if (pool.engine or config.engine).kv_cache_dtype == "fp8":
        return 1
    return 4 if (pool.dtype or config.model.dtype) == "float32" else 2


def _least_bytes_per_token(fields: Mapping[str, Any], bytes_of_number: int) -> int | None:
    """Return the bytes of keys and values of a token in all layers; None: not every layer keeps both in full."""
    windows = fields.get("sliding_window") is not None and fields.get("use_sliding_window", True)
    kinds = fields.get("layer_types") or ["full_attention"]
    if fields.get("model_type") not in _PLAIN_CACHES or windows or {*kinds} != {"full_attention"}:
        return None
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    sizes = [fields.get(name) for name in names]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    num_layers, num_heads, width = (int(size or 0) for size in sizes)
    kv_heads = fields.get("num_key_value_heads") or num_heads
    head_dim = fields.get("head_dim") or width // num_heads
    return int(num_layers * 2 * kv_heads * head_dim * bytes_of_number)
