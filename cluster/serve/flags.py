"""The flags of `crossdock serve` and `crossdock config`: one table, from which options are made.

A flag names the setting that it overrides. The setting's field decides the flag's type, metavar and help. What given
flags mean, alone and together, is in flag_settings.py.
"""

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel, ByteSize

from crossdock.cluster.config import field_at
from crossdock.cluster.serve.arguments import FlagsCommand


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag, or the argument if `names` is ("MODEL",).

    Its type, metavar and help are those of the field of the setting `key`, unless they are given here.
    """

    key: str  # dotted name of the setting, or the flag's own name where several settings or none follow from it
    names: tuple[str, ...] = ()
    help: str = ""
    kind: Any = None  # type that typer parses
    metavar: str | None = None
    envvar: str | None = None
    show_default: str | None = None  # where the default is none of the setting

    @property
    def parameter(self) -> str:
        """The name of the command's parameter."""
        return self.name.strip("-").lower().replace("-", "_")

    def signature(self, panel: str) -> inspect.Parameter:
        """Return the command's parameter as typer reads it."""
        field = field_at(self.key.split("."))
        kind, metavar = (self.kind, None) if field is None else _parsed_type(self.kind or field.annotation)
        text = self.help or (None if field is None else _without_null(field.description or ""))
        info: Any
        if self.names == ("MODEL",):
            info = typer.Argument(help=text, show_default=self._default())
        else:
            info = typer.Option(
                *self._names(),
                help=text,
                metavar=metavar if self.metavar is None else self.metavar,
                envvar=self.envvar,
                show_default=self._default(),
                rich_help_panel=panel,
            )
        annotation = Annotated[kind | None, info]  # type: ignore[valid-type]  # made here, for typer alone to read
        return inspect.Parameter(self.parameter, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    def value(self, text: Any) -> Any:
        """Return the setting's value that a word of the command line means.

        Numbers are those of vLLM: 8k is 8,000 and 8K is 8,192. What cannot be read is left to the configuration, whose
        errors name what is accepted.

        Raises:
            ValueError: the word must be JSON and is not; or only other servers know this value.
        """
        field = field_at(self.key.split("."))
        if field is None or not isinstance(text, str):
            return text
        if text in (words := _WORDS_OF_OTHERS.get(self.key, {})):
            return words[text]
        if text in (reasons := _REFUSED_WORDS.get(self.key, {})):
            raise ValueError(f"{self.name} {text}: {reasons[text]}")
        kind = _required(field.annotation)
        if kind is ByteSize:
            return self._size(text)
        if kind is int:
            return _number(text)
        if get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, BaseModel)):
            try:
                return json.loads(text)
            except ValueError:
                raise ValueError(f"{self.name}: {text!r} is not JSON") from None
        return text

    def _default(self) -> str | bool:
        """Return the default as the help shows it; False: none, or the model or the machine decides."""
        if isinstance(self.show_default, str):
            return self.show_default
        field = field_at(self.key.split("."))
        default = None if field is None else field.get_default(call_default_factory=True)
        if default is None or isinstance(default, BaseModel | list | tuple | dict):
            return False
        if isinstance(default, bool):
            return "on" if default else "off"
        if _required(field.annotation) is ByteSize and default > 0:  # type: ignore[union-attr]  # it has a default
            return ByteSize(default).human_readable().replace(".0", "")
        return str(default)

    @property
    def name(self) -> str:
        """The flag as users write it, for errors."""
        return self._names()[0].split("/")[0]

    def _size(self, text: str) -> int | str:
        """Return the bytes that a text means. ValueError: a number that can only mean another unit, such as 2."""
        size = _number(text)
        if text.strip().isdigit() and 0 < int(text) < _LEAST_SIZE:
            raise ValueError(f"{self.name} {text}: that is {text} bytes; give a unit, such as {text}GiB or {text}MiB")
        return size

    def _names(self) -> tuple[str, ...]:
        """Return the option's names; by default the last part of the key, and for booleans also its `--no-` form."""
        if self.names or self.key.startswith("--"):
            return self.names or (self.key,)
        name = self.key.rpartition(".")[2].replace("_", "-")
        field = field_at(self.key.split("."))
        assert field is not None, self.key
        return (f"--{name}/--no-{name}",) if _parsed_type(field.annotation)[0] is bool else (f"--{name}",)


PANELS: dict[str, tuple[Flag, ...]] = {
    "Everyday": (
        Flag("model.path", ("MODEL",), show_default="SmolLM2"),
        Flag(
            "model.served_name",
            ("--served-model-name",),
            kind=list[str],
            help="Name of the model for clients; given again: further names.",
        ),
        Flag("model.max_model_len", metavar="INTEGER|auto"),
        Flag(
            "pools.*.tensor_parallel_size",
            ("--tensor-parallel-size", "--tp-size", "--tp", "-tp"),
            help="Ranks that divide every layer of a replica, in all pools.",
        ),
        Flag(
            "pools",
            kind=str,
            metavar="NAME=REPLICAS[xtpN][xppN],…",
            help="Pools of replicas, by name, and their ranks: mixed=2, or prefill=2xtp1,decode=1xtp2.",
        ),
        Flag("engine.gpu_memory_utilization"),
        Flag("http.host"),
        Flag("http.port"),
        Flag(
            "http.api_keys",
            ("--api-key",),
            kind=list[str],
            help="Key that clients must send; given again: any of them.",
            envvar="CROSSDOCK_API_KEY",
        ),
        Flag("--config", ("--config", "-c"), kind=Path, help="YAML file; flags win over it."),
    ),
    "Model": (
        Flag("--revision", kind=str, metavar="REVISION", help="Revision of a hub MODEL: MODEL@REVISION says the same."),
        Flag("model.tokenizer"),
        Flag("model.chat_template"),
        Flag("model.chat_template_content_format"),
        Flag(
            "model.lora_modules",
            kind=list[str],
            metavar="NAME=PATH",
            help="LoRA adapter and the name that clients ask for; given again: further ones. Also JSON, as in vLLM.",
        ),
        Flag("http.lora_folder"),
        Flag("http.default_chat_template_kwargs"),
        Flag("http.trust_request_chat_template"),
        Flag("http.enable_auto_tool_choice"),
        Flag("http.tool_call_parser"),
        Flag("http.reasoning_parser"),
        Flag("model.dtype"),
        Flag(
            "model.hf_overrides",
            metavar="JSON",
            help='Values in place of those of config.json: \'{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}\'.',
        ),
        Flag("model.generation_config", metavar="auto|vllm|DIR"),
        Flag(
            "model.override_generation_config",
            kind=str,
            metavar="JSON",
            help="Sampling that wins over generation_config: '{\"temperature\": 0.5}'.",
        ),
        Flag(
            "model.pooler_config",
            kind=str,
            metavar="JSON",
            help='How /v1/embeddings makes a vector of a text: \'{"pooling_type": "MEAN"}\'.',
        ),
    ),
    "Engine (names as in vLLM)": (
        Flag("engine.max_num_batched_tokens"),
        Flag("engine.max_num_seqs"),
        Flag("engine.kv_cache_memory", ("--kv-cache-memory", "--kv-cache-memory-bytes")),
        Flag("engine.kv_cache_host_memory"),
        Flag("engine.kv_cache_files"),
        Flag("engine.kv_cache_dtype"),
        Flag("engine.kv_events_config"),
        Flag("engine.mm_encoder_cache"),
        Flag("engine.disable_hybrid_kv_cache_manager"),
        Flag("engine.enforce_eager"),
        Flag("engine.log_chunks"),
        Flag("engine.async_scheduling"),
        Flag("engine.speculative_config"),
        Flag("engine.enable_lora"),
        Flag("engine.max_loras"),
        Flag("engine.max_lora_rank"),
        Flag("engine.attention_backend"),
        Flag("engine.cpu_kernels"),
        Flag("engine.batch_invariant"),
        Flag("engine.quantization", ("--quantization", "-q")),
        Flag("engine.load_format"),
        Flag("engine.page_size", ("--page-size", "--block-size")),
    ),
    "Chunks and who goes first": (
        Flag("engine.chunk_policy"),
        Flag("engine.min_chunk_tokens"),
        Flag("engine.max_prefill_tokens"),
        Flag("engine.long_prefill_token_threshold"),
        Flag(
            "--chunked-prefill-size",
            kind=int,
            help="As in SGLang: N is --max-num-batched-tokens N; -1 is --no-enable-chunked-prefill, with "
            "steps of the whole context.",
        ),
        Flag("engine.max_num_partial_prefills"),
        Flag("engine.max_long_partial_prefills"),
        Flag("engine.prefill_order"),
        Flag("engine.admission"),
    ),
    "Engine: on unless switched off": (
        Flag("engine.enable_chunked_prefill"),
        Flag("engine.mixed_chunks"),
        Flag("engine.enable_prefix_caching"),
    ),
    "HTTP": (
        Flag("http.max_logprobs"),
        Flag("http.logprobs_mode"),
        Flag("http.root_path"),
        Flag("http.keep_alive_s"),
        Flag(
            "http.allowed_origins",
            kind=list[str],
            help="Other web site whose pages may call the API; given again: any of them. Also a JSON list, as in vLLM.",
        ),
        Flag(
            "http.allowed_hosts",
            kind=list[str],
            help="Name besides localhost under which a server without keys answers on loopback; given again: any.",
        ),
        Flag(
            "http.force_include_usage",
            ("--enable-force-include-usage/--no-enable-force-include-usage",),
        ),
        Flag(
            "http.allowed_media_domains",
            kind=list[str],
            help="Host that pictures may be fetched from, or .example for all hosts below; given again: any of them.",
        ),
        Flag("http.allowed_local_media_path"),
        Flag("http.limit_mm_per_prompt", kind=str, metavar="JSON"),
        Flag("http.mm_processor_kwargs", kind=str, metavar="JSON"),
        Flag("http.media_io_kwargs", kind=str, metavar="JSON"),
        Flag("http.max_queued_requests", ("--max-queued-requests", "--max-num-queued-reqs")),
        Flag("http.vllm_metrics"),
        Flag("http.batch_folder"),
        Flag("http.weights_folder"),
        Flag("http.rollouts", ("--enable-rollouts/--no-enable-rollouts",)),
    ),
    "Cluster and file": (
        Flag("application.name", ("--app-name",)),
        Flag("application.route_prefix"),
        Flag(
            "pools.*.pipeline_parallel_size",
            ("--pipeline-parallel-size", "--pp-size", "--pp", "-pp"),
            help="Consecutive stages of layers of a replica, in all pools.",
        ),
        Flag(
            "pools.*.enable_expert_parallel",
            ("--enable-expert-parallel/--no-enable-expert-parallel", "-ep"),
            help="Whole experts on each rank, or a slice of every expert, in all pools; by default the faster way.",
        ),
        Flag(
            "pools.*.enable_eplb",
            ("--enable-eplb/--no-enable-eplb",),
            help="Move whole experts between ranks by counted rows, and copy hot ones, in all pools.",
        ),
        Flag("pools.*.eplb_config", ("--eplb-config",)),
        Flag(
            "--device",
            kind=str,
            metavar="auto|cpu|cuda|emulated:PROFILE",
            help="Device of all ranks: cuda gives each a GPU (pools.*.num_gpus 1), cpu none; auto: a GPU where there "
            "are any; emulated: steps take the seconds of a profile (pools.*.emulated), such as emulated:h100-8b, "
            "or of a GPU for MODEL, emulated:h100-tp2.",
        ),
        Flag(
            "--verbose",
            ("--verbose/--no-verbose",),
            kind=bool,
            metavar="",
            help="Show what Ray, Serve and libraries report about themselves.",
            envvar="CROSSDOCK_VERBOSE",
        ),
        Flag(
            "--strict",
            ("--strict/--no-strict",),
            kind=bool,
            metavar="",
            help="End the start for each flag of vLLM or SGLang that is not here, in place of a warning.",
        ),
        Flag(
            "--set",
            kind=list[str],
            metavar="KEY=VALUE",
            help="Any setting by its dotted name, as in `crossdock config`.",
        ),
    ),
}


def takes_flags(configure: Callable[[Mapping[str, Any]], object]) -> Callable[..., Any]:
    """Return a decorator: a command with **flags gets the parameters of the table, as typer sees them.

    `configure`: reads the values of the flags; its ValueError has a line for each that is wrong.
    """
    parameters = [flag.signature(panel) for panel, flags in PANELS.items() for flag in flags]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        command.command_class = type(  # type: ignore[attr-defined]
            "ServeCommand", (FlagsCommand,), {"configure": staticmethod(configure)}
        )
        return command

    return decorate


def _without_null(text: str) -> str:
    """Return a setting's description for a flag, which has no null: the flag is left out."""
    text = re.sub(r"\bnull is\b|\bnull:", lambda found: "without it" + ":" * found[0].endswith(":"), text)
    return re.sub(r"\bis null\b", "is not given", text)


def _required(annotation: Any) -> Any:
    """Return the annotation of a field without its None."""
    if get_origin(annotation) in (typing.Union, types.UnionType):
        (annotation,) = (member for member in get_args(annotation) if member is not types.NoneType)
    return annotation


def _parsed_type(annotation: Any) -> tuple[Any, str | None]:
    """Return the type that typer parses for a field's annotation, and the metavar; None: typer's own metavar.

    What stays text here is read by `Flag.value`, or checked by the configuration, whose errors name what is accepted.
    """
    annotation = _required(annotation)
    if get_origin(annotation) is Literal:
        return str, "|".join(get_args(annotation))
    if get_origin(annotation) is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return str, "JSON"
    if annotation in _METAVARS:
        return str, _METAVARS[annotation]
    return annotation, "" if annotation is bool else None


_WORDS_OF_OTHERS: Mapping[str, Mapping[str, str | None]] = {  # setting: words of vLLM and SGLang, and ours
    "model.dtype": {"half": "float16", "float": "float32"},
    "engine.kv_cache_dtype": {"fp8_e4m3": "fp8", "fp8_e4m3fn": "fp8"},
    "engine.attention_backend": {
        "FLASH_ATTN": "flash_attn",
        "TRITON_ATTN": "triton",
        "TORCH_SDPA": "torch",
        "fa2": "flash_attn",
        "fa3": "flash_attn_3",
        "FLASHINFER": "flashinfer",
        "torch_native": "torch",
    },
    "engine.quantization": {  # kernels and variants of one form, which is read from the checkpoint
        **dict.fromkeys(("awq_marlin", "cpu_awq"), "awq"),
        **dict.fromkeys(("gptq_marlin", "gptq_bitblas", "marlin", "cpu_gptq"), "gptq"),
        **dict.fromkeys(("modelopt_fp8", "modelopt_fp4", "modelopt_mxfp8", "petit_nvfp4"), "modelopt"),
        **dict.fromkeys(("w8a8_int8", "w8a8_fp8"), "compressed-tensors"),
        **dict.fromkeys(("deepseek_v4_fp8", "deepgemm_fp8", "fp8_per_channel", "ptpc_fp8"), "fp8"),
        "auto_awq": "awq",
        "auto_gptq": "gptq",
        "gpt_oss_mxfp4": "mxfp4",
        "moe_wna16": None,  # AWQ or GPTQ, as the checkpoint says
        "unquant": None,  # plain weights
    },
}
_LEAST_SIZE = 1 << 20  # bytes; no cache of a model is smaller
_NOT_READ = "such weights are not read: serve the checkpoint that they were made from, or one in AWQ, GPTQ or FP8"
_AS_LOADED = "plain weights are rounded as they are loaded by fp8, with a scale for each output, and on CPUs by int8"
_REFUSED_WORDS: Mapping[str, Mapping[str, str]] = {
    "engine.quantization": {
        **dict.fromkeys(
            ("auto-round", "auto-round-int8", "inc", "quark", "quark_int4fp8_moe", "torchao", "hqq", "aqlm", "qqq"),
            _NOT_READ,
        ),
        **dict.fromkeys(("fp_quant", "qoq", "w4afp8", "modelslim", "modelopt_mixed", "gptq_marlin_24"), _NOT_READ),
        **dict.fromkeys(("humming", "mxfp_w4a8", "mlx_q4", "mlx_q8"), _NOT_READ),
        **dict.fromkeys(("fp8_per_tensor", "fp8_per_block", "experts_int8", "online", "rtn"), _AS_LOADED),
        **dict.fromkeys(("int8_per_channel_weight_only", "nvfp4_per_token"), _AS_LOADED),
        **dict.fromkeys(("nvfp4_online", "quark_mxfp4"), _AS_LOADED),
    },
}
_METAVARS = {ByteSize: "SIZE", int: "INTEGER"}
_MULTIPLES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def _number(text: str) -> int | str:
    """Return the number that a text means in vLLM: 8192, 8K, 8k or 25.6k. Any other text is returned as it is."""
    found = re.fullmatch(r"(-?\d+)|(\d+)([KMGT])|(\d+(?:\.\d+)?)([kmgt])", text.strip())
    if found is None:
        return text
    plain, whole, binary, decimal, multiple = found.groups()
    if plain is not None:
        return int(plain)
    return int(whole) * _MULTIPLES[binary] if whole is not None else round(float(decimal) * _MULTIPLES[multiple])
