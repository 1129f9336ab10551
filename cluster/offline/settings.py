"""Settings of an engine in this process: flags of `crossdock serve` as arguments, without those of a server."""

import warnings
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from crossdock.cluster.config import ClusterConfig
from crossdock.cluster.serve.flag_settings import configuration
from crossdock.cluster.serve.flags import PANELS, Flag
from crossdock.cluster.serve.other_flags import answer, verdict

OF_A_SERVER = {
    **{f"http.{name}": "it is of a server's port" for name in ("host", "port", "root_path", "keep_alive_s")},
    **{
        f"http.{name}": "there are no clients to keep out"
        for name in ("allowed_origins", "allowed_hosts", "api_keys", "max_queued_requests")
    },
    **dict.fromkeys(
        ("model.lora_modules", "http.lora_folder", "engine.enable_lora", "engine.max_loras", "engine.max_lora_rank"),
        "a server has adapters (`crossdock serve --lora-modules`); merge one into the weights",
    ),
    "http.force_include_usage": "there are no streams",
    "http.vllm_metrics": "there is no /metrics",
    **dict.fromkeys(("http.rollouts", "http.weights_folder"), "weights change in a server alone"),
    "http.batch_folder": "`crossdock run-batch` runs a file of requests",
    "engine.kv_events_config": "there is no router that would read them",
    "engine.admission": "all prompts wait, none is refused",
    **dict.fromkeys(("application.name", "application.route_prefix"), "it is of a server on Ray"),
    "pools": "one engine runs in this process; tensor_parallel_size and pipeline_parallel_size divide it",
    "--config": "give its settings as arguments",
    "--verbose": "use Python's logging",
}
_NOT_OF_SERVE = {
    "skip_tokenizer_init": "not supported: answers always have text; prompts may be token ids",
}
_CALLER = 3  # frames from a warning here to the call of `LLM`
# Throughput is what counts: no stream waits for a reader, so chunks fill the step. Users' own values win.
_BATCH = {
    "engine.default_slo_class": "batch",
    "engine.chunk_policy": "fixed",
    "engine.short_lane_share": "0",
    "engine.admission": "queue",
}


def offline_configuration(model: str | None, settings: Mapping[str, Any]) -> ClusterConfig:
    """Return the configuration that the arguments mean.

    An argument of vLLM's `LLM` that is not here, and without which no answer changes, is left out with a warning.

    Raises:
        ValueError: an argument does not exist, belongs to a server, or has a wrong value; the message names it.
    """
    flags = {flag.parameter: flag for panel in PANELS.values() for flag in panel}
    names = {name: flag for flag in flags.values() for name in _names(flag)}
    given: dict[str, Any] = dict.fromkeys(flags)
    given[names["model"].parameter] = model
    for name, value in settings.items():
        if value is None:
            continue
        flag = names.get(name)
        if flag is None and (line := _left_out(name)) is not None and not settings.get("strict"):
            warnings.warn(line, stacklevel=_CALLER)
            continue
        if flag is None:
            raise ValueError(_unknown(name, names))
        if flag.key in OF_A_SERVER:
            raise ValueError(f"{name} is not accepted: {OF_A_SERVER[flag.key]}")
        given[flag.parameter] = value
    chosen = {flag.key for flag in flags.values() if given[flag.parameter] is not None}
    own = given["set"] or []
    given["set"] = [*(f"{key}={value}" for key, value in _BATCH.items() if key not in chosen), *own]
    return configuration(given)


def _names(flag: Flag) -> list[str]:
    """Return the names of a flag as arguments: with underscores, as vLLM's `LLM` has them."""
    spellings = [flag.parameter] if flag.names is None else [*flag.names, flag.parameter]
    plain = [spelling.split("/")[0].lstrip("-").replace("-", "_") for spelling in spellings]
    return [name.lower() for name in plain]


def _left_out(name: str) -> str | None:
    """Return the line about an argument of vLLM's `LLM` without which no answer changes; None: it is no such one."""
    found = None if name in _NOT_OF_SERVE else verdict(f"--{name.replace('_', '-')}")
    return found.line(name) if found is not None and found.state in ("needless", "lost") else None


def _unknown(name: str, names: Mapping[str, Flag]) -> str:
    flag = f"--{name.replace('_', '-')}"
    if (reason := _NOT_OF_SERVE.get(name) or answer(flag)) is not None:
        return f"{name}: {reason.removeprefix(f'{flag}: ')}"
    similar = get_close_matches(name, names, 1)
    return f"{name} is no argument of LLM{f'; did you mean {similar[0]}?' if similar else ''}"
