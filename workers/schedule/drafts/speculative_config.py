"""The settings of speculation, with the names of vLLM's `--speculative-config`."""

from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ByteSize, ConfigDict, Field, model_validator

Method: TypeAlias = Literal["ngram", "suffix", "draft_model", "eagle3", "mtp", "grammar"]

METHODS: tuple[Method, ...] = ("ngram", "suffix", "draft_model", "eagle3", "mtp", "grammar")
_OTHER_HEADS = ("eagle", "medusa", "mlp_speculator")
_NAMES_OF_MTP = (
    *("deepseek_mtp", "exaone_moe_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "hy_v3_mtp", "nemotron_h_mtp"),
    *("qwen3_next_mtp", "qwen3_5_mtp"),
)
"""vLLM's older names of method mtp, by the families whose heads are computed."""
_MTP_FAMILIES = (
    *("deepseek_v3", "deepseek_v32", "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hy_v3", "mellum"),
    *("nemotron_h", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
)
"""Model types of decoders whose heads are computed."""
_FIELDS_OF_OTHERS = {  # field: the methods that read it
    "model": ("draft_model", "eagle3", "mtp"),
    "draft_kv_cache_memory": ("draft_model", "eagle3", "mtp"),
    "prompt_lookup_min": ("ngram",),
    "prompt_lookup_max": ("ngram",),
}


class SpeculativeConfig(BaseModel):
    """Where drafts come from, and how many tokens a step may verify for one stream."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Method = Field(
        description="ngram: the longest of the last tokens that the text has had before, and what followed there; "
        "suffix: the same with a match of any length; draft_model: a small model with the same vocabulary; eagle3: a "
        "head that reads the hidden states of three layers; mtp: the head that the model's own checkpoint brings; "
        "grammar: only what a request's grammar dictates, which every other method drafts too."
    )
    num_speculative_tokens: int = Field(8, ge=1, le=64, description="Most drafts of one stream in a step.")
    adaptive: bool = Field(
        True,
        description="Draft as many tokens as the predicted seconds of a step pay for; off: the most. Not in vLLM.",
    )
    prompt_lookup_min: int = Field(1, ge=1, description="ngram: shortest match, in tokens.")
    prompt_lookup_max: int = Field(8, ge=1, description="ngram: tokens from which on a longer match is no better.")
    model: str | None = Field(
        None,
        min_length=1,
        json_schema_extra={"format": "model"},
        description="draft_model, eagle3: directory or hub name of the small model, or of the head; mtp: of a "
        "checkpoint of the same model that has the head, if the served one has none.",
    )
    draft_kv_cache_memory: ByteSize = Field(
        ByteSize(256 << 20),
        gt=0,
        description="draft_model, eagle3, mtp: memory for KV pages of what drafts. Not in vLLM.",
    )

    draft_tensor_parallel_size: Literal[1] = Field(
        1, description="As in vLLM: what drafts is on one rank of a replica."
    )

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """Refuse unknown values, and derive the missing fields from the given ones."""
        if not isinstance(given, dict):
            return given
        unknown = sorted(given.keys() - cls.model_fields.keys())
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: not supported; accepted are {', '.join(cls.model_fields)}")
        values = dict(given)
        if values.get("method") is None:
            if values.get("model") is None:
                raise ValueError(
                    f"method must be one of {', '.join(METHODS)}; or give model, a small model to draft with"
                )
            values["method"] = "draft_model"  # as in vLLM, where `model` may name a lookup too
        method = values["method"]
        if method in _NAMES_OF_MTP:
            values["method"] = "mtp"
        _check_method(values)
        least = values.get("prompt_lookup_min")
        most = values.get("prompt_lookup_max")
        if least is None and most is not None:  # as in vLLM: one given alone is both
            values["prompt_lookup_min"] = most
        elif most is None and least is not None:
            values["prompt_lookup_max"] = least
        return {name: value for name, value in values.items() if value is not None}

    @model_validator(mode="after")
    def _is_complete(self) -> "SpeculativeConfig":
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) must be at most prompt_lookup_max "
                f"({self.prompt_lookup_max})"
            )
        if self.model is None and self.method in ("draft_model", "eagle3"):
            what = "small model" if self.method == "draft_model" else "head"
            raise ValueError(f"model: method {self.method} needs the directory or the hub name of a {what}")
        return self

    def why_no_drafts(self, model_type: str) -> str | None:
        """Return why nothing is drafted for a model; None: something is. `model_type`: of its decoder."""
        if self.method != "mtp" or model_type in _MTP_FAMILIES:
            return None
        return (
            f"method mtp does not compute the head of {model_type}, so each step gives one token for each stream. It "
            f"computes those of {', '.join(_MTP_FAMILIES)}"
        )


def _check_method(values: dict[str, object]) -> None:
    """Refuse an unknown method, and a field that the method does not read. ValueError: names the field."""
    method = values["method"]
    if method in _OTHER_HEADS or (isinstance(method, str) and method.endswith("_mtp")):
        raise ValueError(
            f"method {method!r} is not supported: heads of this kind are not computed here; accepted are "
            f"{', '.join(METHODS)}"
        )
    if method not in METHODS:
        raise ValueError(f"method {method!r} is not supported; accepted are {', '.join(METHODS)}")
    for name, methods in _FIELDS_OF_OTHERS.items():
        default = SpeculativeConfig.model_fields[name].default  # which a printed configuration has too
        if values.get(name) not in (None, default) and method not in methods:
            raise ValueError(f"{name}: method {method} does not read it; only {', '.join(methods)} does")
