"""Sampling parameters that requests leave open: the model's recommended ones, under the names and rules of vLLM."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from crossdock.cluster.api.body.generation_body import GenerationBody

_FILE = "generation_config.json"


class GenerationConfig(BaseModel):
    """The values of a generation_config.json that decide how tokens are chosen, and how many. None: not given."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1, description="Share of probability that is sampled from.")
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="Likeliest tokens to sample from; 0 or -1: all.")
    min_p: float | None = Field(None, ge=0, le=1, description="Least probability, as a share of the likeliest token's.")
    repetition_penalty: float | None = Field(None, gt=0, le=10, description="Above 1: repeated tokens are less likely.")
    max_new_tokens: int | None = Field(None, ge=1, description="Longest output of any request, in tokens.")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read these fields of a file, and ignore all others. Raises ValueError, which names the file and the field."""
        hint = "model.generation_config: vllm ignores this file"
        try:
            data = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON: {error}; {hint}") from None
        if not isinstance(data, dict):
            raise ValueError(f"{path} is not a JSON object; {hint}")
        try:
            return cls.model_validate({name: data[name] for name in cls.model_fields if name in data})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            reason = first["msg"].replace("Input should", "must", 1)
            raise ValueError(f"{path}: {first['loc'][0]}: {reason}, not {first['input']!r}; {hint}") from None


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The sampling parameters of requests that do not give them."""

    sampling: Mapping[str, Any] = field(default_factory=dict)  # by the name of a field of `GenerationBody`
    max_tokens: int | None = None  # longest output of a request that gives no limit and may fill the context
    limits_all: bool = False  # `max_tokens` is the longest output of every request

    @classmethod
    def read(cls, model: Path, source: str = "auto", override: GenerationConfig | None = None) -> Self:
        """Return the defaults for a model directory. `source` and `override`: settings of the model, named as in vLLM.

        As in vLLM, the operator's `max_new_tokens`, in `override` or in a directory that `source` names, limits every
        request. The one that came with the model is a default.

        Raises:
            ValueError: the file of that model or directory cannot be used; the message gives the reason.
        """
        folder = model if source == "auto" else Path(source).expanduser()
        recommended = GenerationConfig.model_validate({})
        if source not in ("auto", "vllm") and not (folder / _FILE).is_file():
            raise ValueError(
                f"model.generation_config: {source!r} must be auto (the model's own), vllm (none), or a directory with "
                f"{_FILE}"
            )
        if source != "vllm" and (folder / _FILE).is_file():
            recommended = GenerationConfig.read(folder / _FILE)
        given = {} if override is None else override.model_dump(exclude_none=True)
        values = recommended.model_dump(exclude_none=True) | given
        max_tokens = values.pop("max_new_tokens", None)
        return cls(values, max_tokens, "max_new_tokens" in given or source not in ("auto", "vllm"))

    def limit(self, num_tokens: int, body: GenerationBody) -> int:
        """Return the longest output, of at most `num_tokens`, that a request gets."""
        is_open = body.token_limit() is None and body.default_max_tokens is None
        if self.max_tokens is None or not (self.limits_all or is_open):
            return num_tokens
        return min(num_tokens, self.max_tokens)
