"""Which settings a replica with a text encoder can have. No torch."""

from crossdock.workers.replica.config import EngineConfig, ReplicaSpec

_NO_PAGES = "a text encoder keeps no KV pages"
_NO_OUTPUT = "a text encoder makes no tokens"


def check_text_settings(spec: ReplicaSpec) -> None:
    """Check that a text encoder can be served with the settings of a replica.

    Raises:
        ValueError: a setting has no meaning for text encoders, or is not possible yet; the message names the setting.
    """
    engine = spec.engine
    wrong = {
        "tensor_parallel_size": (spec.tensor_parallel_size, 1, "a text encoder is not divided; run more replicas"),
        "pipeline_parallel_size": (spec.pipeline_parallel_size, 1, "a text encoder is not divided; run more replicas"),
        "pools: role": (spec.role, "mixed", f"{_NO_PAGES} that one replica could send to another"),
        "pools: emulated": (spec.emulated and spec.emulated.name, None, "an emulated device computes no vectors"),
        "engine.enable_lora": (engine.enable_lora, False, "a text encoder takes no adapters"),
        "model.lora_modules": (dict(spec.lora_modules), {}, "a text encoder takes no adapters"),
        "engine.speculative_config": (engine.speculative_config, None, _NO_OUTPUT),
        "engine.quantization": (engine.quantization, None, "the weights of a text encoder stay as they are stored"),
        "engine.kv_cache_host_memory": (engine.kv_cache_host_memory, None, _NO_PAGES),
        "engine.kv_cache_files": (engine.kv_cache_files, None, _NO_PAGES),
        "engine.kv_cache_memory": (engine.kv_cache_memory, None, _NO_PAGES),
        "engine.kv_cache_dtype": (engine.kv_cache_dtype, "auto", _NO_PAGES),
        "engine.kv_events_config": (engine.kv_events and engine.kv_events_config, None, _NO_PAGES),
        "engine.attention_backend": (engine.attention_backend, "auto", "torch computes a text encoder's attention"),
        "engine.cpu_kernels": (engine.cpu_kernels, "auto", "torch computes a text encoder's products"),
        "engine.batch_invariant": (engine.batch_invariant, False, "torch's products of a text encoder may differ"),
        "engine.async_scheduling": (engine.async_scheduling or None, None, "no step of a text encoder needs another's"),
        "engine.load_format": (
            "auto" if engine.load_format == "safetensors" else engine.load_format,
            "auto",
            "transformers reads the files of a text encoder",
        ),
    }
    for name, (value, needed, reason) in wrong.items():
        if value != needed:
            shown = "null" if needed is None else str(needed).lower() if isinstance(needed, bool) else needed
            raise ValueError(f"{name} must be {shown}, not {value}: {reason}")


def of_text_engine(engine: EngineConfig) -> EngineConfig:
    """Return the settings with which a text encoder runs: whole texts in each step, and no cached prefixes."""
    return engine.model_copy(update={"enable_chunked_prefill": False, "enable_prefix_caching": False})
