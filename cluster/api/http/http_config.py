"""The settings of the HTTP API."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from crossdock.cluster.api.body.parser_names import AUTO, REASONING_PARSERS, TOOL_PARSERS, family_of
from crossdock.cluster.api.body.pictures import VideoReading
from crossdock.cluster.api.http.keys import ApiKey
from crossdock.workers.schedule.request.submission import LogprobsMode

OPEN_TO_OTHERS = (
    "No API key is set: every client that reaches %s port %d can use this server. "
    "Set --api-key, http.api_keys_file, or --host 127.0.0.1."
)


NOT_TEMPLATE_VARIABLES = frozenset(  # requests have fields for these, or transformers takes them itself
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


class ModelHttpConfig(BaseModel):
    """Describe one model to the API: its names, how its messages are read, and their pictures."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_aliases: tuple[str, ...] = Field((), description="Further names that the served model answers to.")
    default_chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Variables of the chat template in every chat; a request's win over them."
    )
    limit_mm_per_prompt: dict[Literal["image", "video", "audio"], Annotated[int, Field(ge=0)]] = Field(
        {"image": 32, "video": 1},
        description='Most pictures and videos of a request: {"image": 8, "video": 2}. Sound is not supported: 0.',
    )
    mm_processor_kwargs: dict[str, Any] = Field(
        default_factory=dict, description='Arguments of the image processor: {"max_pixels": 1003520}.'
    )
    media_io_kwargs: dict[Literal["video"], VideoReading] = Field(
        default_factory=dict, description='How videos are read: {"video": {"num_frames": 32, "fps": 2}}.'
    )
    enable_auto_tool_choice: bool = Field(
        True, description="Read the calls that the model writes by itself. Without it they stay text."
    )
    tool_call_parser: str = Field(
        AUTO, description="How the model writes tool calls: auto (by its chat template), none, or vLLM's name."
    )
    reasoning_parser: str = Field(
        AUTO, description="How the model marks its reasoning: auto (by its chat template), none, or vLLM's name."
    )

    @field_validator("tool_call_parser", "reasoning_parser")
    @classmethod
    def _check_parser(cls, name: str, info: ValidationInfo) -> str:
        family_of(name, TOOL_PARSERS if info.field_name == "tool_call_parser" else REASONING_PARSERS)
        return name

    @field_validator("limit_mm_per_prompt", mode="before")
    @classmethod
    def _only_counts(cls, limits: Any) -> Any:
        """Return numbers. vLLM's other form gives the size of a picture beside its `count`, to measure memory alone."""
        if not isinstance(limits, Mapping):
            return limits
        return {kind: limit.get("count") if isinstance(limit, Mapping) else limit for kind, limit in limits.items()}

    @field_validator("limit_mm_per_prompt")
    @classmethod
    def _check_kinds(cls, limits: dict[str, int]) -> dict[str, int]:
        if limits.get("audio"):
            raise ValueError("audio is not supported, so its limit must be 0")
        return limits

    @field_validator("default_chat_template_kwargs")
    @classmethod
    def _check_variables(cls, variables: dict[str, Any]) -> dict[str, Any]:
        if reserved := NOT_TEMPLATE_VARIABLES & variables.keys():
            raise ValueError(f"must not set {', '.join(sorted(reserved))}: these are no variables of templates")
        return variables


class HttpConfig(ModelHttpConfig):
    """How the API is reached, and by whom."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)  # some fields are secret

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 is every address of the machine.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on.")
    replicas: int = Field(1, ge=1, description="Ingress replicas.")
    direct: bool = Field(
        False, description="Ingresses listen on host and port themselves, without Serve's proxies: for one node."
    )
    root_path: str = Field(
        "",
        pattern=r"^(/[A-Za-z0-9._~-]+)*$",
        description="Path under which a gateway shows the API: /llm. Requests may come with it or without it.",
    )
    keep_alive_s: int = Field(75, ge=1, description="How long a connection without a request stays open.")
    allowed_origins: tuple[str, ...] = Field(
        (), description="Other web sites whose pages may call the API, e.g. https://chat.example; '*': all."
    )
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="Names besides localhost under which a server without keys answers on loopback: llm.example, which "
        "a proxy of this machine passes on; '*': any.",
    )
    drain_timeout_s: float = Field(60.0, ge=0, description="How long running requests may go on after a stop.")
    api_keys: tuple[ApiKey, ...] = Field(
        (),
        repr=False,
        description="Strings, or objects with key, classes, limits and more. None here and no file: open to all.",
    )
    api_keys_file: str | None = Field(
        None,
        json_schema_extra={"format": "path"},
        description="A file with further keys, checked every second: YAML as in api_keys, or one key a line.",
    )
    tenant_header: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9-]+$",
        description="A header whose value names the tenant: X-Tenant. Read in requests of keys with names_tenants, and "
        "where no key is required: only a gateway may reach such a server.",
    )
    tenant_weights: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="Weights of tenants that the header names, by name; others have the key's."
    )
    max_body_bytes: int = Field(20 << 20, ge=1)
    request_memory_bytes: int = Field(
        2 << 30,
        ge=1 << 20,
        description="Memory of an ingress for bodies, prompts and unread answers of all requests; more get 429. One "
        "API key may have half of it.",
    )
    max_queued_requests: int = Field(
        4096, ge=1, description="Outputs that may wait for their first token at an ingress; further ones get 429."
    )
    request_timeout_s: float | None = Field(None, gt=0, description="Limit of a whole request, streams included.")
    write_timeout_s: float = Field(
        60.0, gt=0, description="A client that reads nothing of its answer for so long is disconnected, where direct."
    )
    otlp_endpoint: str | None = Field(
        None, description="Where traces go, by OTLP over HTTP: http://collector:4318/v1/traces; null: no traces."
    )
    trace_sample_ratio: float = Field(
        0.01, ge=0, le=1, description="Share of requests that are traced, among those that arrive without a trace."
    )
    vllm_metrics: bool = Field(
        False,
        description="Show metrics at /metrics under vLLM's names too, for dashboards and autoscalers made for it.",
    )
    metrics_hold_s: float = Field(
        1.0,
        ge=0,
        description="An ingress answers /metrics with the same text for so long: every replica writes its part.",
    )
    max_logprobs: int = Field(
        20, ge=-1, description="Most alternatives a request may ask for, per token; -1: the whole vocabulary."
    )
    logprobs_mode: LogprobsMode = Field(
        "raw_logprobs",
        description="What answers give as logprobs: of the model's logits (raw), or of those that a token is drawn "
        "from, after penalties, masks, temperature, top-k and top-p (processed); or these logits themselves.",
    )
    response_store_bytes: int = Field(
        64 << 20, ge=0, description="Memory of an ingress for responses that /v1/responses stores; 0: none is stored."
    )
    response_ttl_s: float = Field(3600.0, gt=0, description="How long a stored response can be fetched and continued.")
    batch_folder: str | None = Field(
        None,
        json_schema_extra={"format": "path"},
        description="Folder for /v1/files and /v1/batches, on a volume that all ingresses share; null: no batches.",
    )
    batch_file_bytes: ByteSize = Field(ByteSize(200 << 20), gt=0, description="Largest file of a batch, e.g. 200MiB.")
    batch_bytes: ByteSize = Field(
        ByteSize(64 << 30),
        gt=0,
        description="Bytes of all files and results of batches on the volume; one API key may have half of them.",
    )
    force_include_usage: bool = Field(False, description="Each event of a stream has usage, also unasked.")
    trust_request_chat_template: bool = Field(
        False, description="Accept chat templates in requests. A template is a program: trust every client first."
    )

    allowed_media_domains: tuple[str, ...] = Field(
        (),
        description="Hosts that pictures may be fetched from: images.example, or .example for all hosts below it.",
    )
    allowed_local_media_path: str | None = Field(
        None,
        json_schema_extra={"format": "path"},
        description="Folder of the ingress's machine below which requests may name pictures by file:// URLs.",
    )
    lora_folder: str | None = Field(
        None,
        json_schema_extra={"format": "path"},
        description="Folder below which /v1/load_lora_adapter may load adapters, of ingresses' and replicas' machines; "
        "null: adapters are those of lora_modules.",
    )
    rollouts: bool = Field(
        False,
        description="Serve the paths with which trainers stop generation and replace weights, those of vLLM's "
        "development mode.",
    )
    weights_folder: str | None = Field(
        None,
        json_schema_extra={"format": "path"},
        description="Folder below which /update_weights_from_disk may read checkpoints, of replicas' machines; null: "
        "none.",
    )
    media_max_bytes: int = Field(20 << 20, ge=1, description="Largest file of a picture or a video.")
    media_max_pixels: int = Field(
        32 << 20, ge=1, description="Most pixels of a picture, or of a frame of a video, before it is decoded."
    )
    media_timeout_s: float = Field(
        10.0, gt=0, description="How long a picture or a video may take to be fetched, redirects too."
    )
    media_cache_bytes: int = Field(
        256 << 20, ge=0, description="Memory of an ingress for processed pictures and videos; 0: none is kept."
    )
    media_memory_bytes: int = Field(
        2 << 30,
        ge=1 << 20,
        description="Memory of an ingress for the pictures and videos of all requests, as files and as tensors; more "
        "get 429. One API key, and one request, may have half of it.",
    )

    @field_validator("allowed_media_domains")
    @classmethod
    def _check_domains(cls, domains: tuple[str, ...]) -> tuple[str, ...]:
        for domain in domains:
            if re.fullmatch(r"\.?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", domain) is None:
                raise ValueError(f"{domain!r} is not the name of a host, such as images.example or .example")
        return tuple(domain.lower() for domain in domains)

    @field_validator("allowed_hosts")
    @classmethod
    def _check_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if re.fullmatch(r"\*|[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]", host) is None:
                raise ValueError(f"{host!r} is not the name of a host without a port, such as llm.example")
        return tuple(host.lower() for host in hosts)

    @field_validator("allowed_local_media_path", "lora_folder", "weights_folder")
    @classmethod
    def _check_folder(cls, path: str | None) -> str | None:
        if path is not None and (not Path(path).is_absolute() or len(Path(path).parts) < 2):
            raise ValueError("must be an absolute path, and not that of the root")
        return path

    @model_validator(mode="after")
    def _check_tenants(self) -> Self:
        if self.tenant_header is None and (self.tenant_weights or any(key.names_tenants for key in self.api_keys)):
            name = "tenant_weights" if self.tenant_weights else "api_keys.names_tenants"
            raise ValueError(f"{name}: needs tenant_header, the header that names tenants")
        return self

    @property
    def has_weights(self) -> bool:
        """Whether some tenants are to have more time than others."""
        return bool(self.tenant_weights) or any(key.weight != 1 for key in self.api_keys)

    @property
    def needs_key(self) -> bool:
        """Whether clients must send an API key."""
        return bool(self.api_keys) or self.api_keys_file is not None

    @property
    def is_open_to_others(self) -> bool:
        """Whether other machines may use the API without a key."""
        return not self.is_local and not self.needs_key

    @property
    def is_local(self) -> bool:
        """Whether this machine alone reaches the API."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")
