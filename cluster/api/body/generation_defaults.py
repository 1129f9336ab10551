"""Sampling parameters that requests leave open: the model's recommended ones, under the names and rules of vLLM."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from crossdock.cluster.api.body.generation_body import GenerationBody

_FILE = "generation_config.json"

HARMLESS_FIELDS: Mapping[str, str] = {
    "_*": "private to the program that wrote the file",
    "transformers_version": "which program wrote the file",
    "eos_token_id": "read with the model: these tokens end an answer",
    "*_token_id": "the tokenizer adds tokens",
    "do_sample": "temperature says that",
    "max_length": "a length of prompt and answer; max_new_tokens counts",
    "num_return_sequences": "each request says how many answers it wants",
    "*cache*": "keys are kept in pages",
    "*compile*": "how it is computed",
    "prefill_chunk_size": "how it is computed",
    "continuous_batching_config": "how it is computed",
    "low_memory": "how it is computed",
    "output_*": "what transformers returns in Python",
    "return_dict_in_generate": "what transformers returns in Python",
    "renormalize_logits": "logits are always normalised",
    "remove_invalid_values": "logits are always finite",
    "*assistant*": "drafts, which change no answer",
    "target_lookbehind": "drafts, which change no answer",
    "prompt_lookup_num_tokens": "drafts, which change no answer",
    "max_matching_ngram_size": "drafts, which change no answer",
    "speculation_type": "drafts, which change no answer",
    "use_mtp": "drafts, which change no answer",
    "early_stopping": "for several beams, see num_beams",
    "length_penalty": "for several beams, see num_beams",
    "diversity_penalty": "for several beams, see num_beams",
    "chat_format": "the chat template says that",
    "max_window_size": "the chat template says that",
    "max_context_size": "the chat template says that",
}
"""Fields of the file that change no answer, by pattern. Others are refused, but with a value of `_NOTHING`."""
_NOTHING: tuple[Any, ...] = (None, False, "", [], {}, 0, 1, 0.0, 1.0)


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
        """Read these fields of a file. ValueError: it cannot be read, or another field would change answers."""
        hint = "model.generation_config: vllm ignores this file"
        try:
            data = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON: {error}; {hint}") from None
        if not isinstance(data, dict):
            raise ValueError(f"{path} is not a JSON object; {hint}")
        for name, value in data.items():
            if name not in cls.model_fields and not _is_harmless(name, value):
                raise ValueError(f"{path}: {name} is {value!r:.100}, which no request would follow; {hint}")
        try:
            return cls.model_validate({name: data[name] for name in cls.model_fields if name in data})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            reason = first["msg"].replace("Input should", "must", 1)
            raise ValueError(f"{path}: {first['loc'][0]}: {reason}, not {first['input']!r}; {hint}") from None


def _is_harmless(name: str, value: Any) -> bool:
    """Return whether a field that is not read changes no answer with this value."""
    is_off = any(value == nothing and type(value) is type(nothing) for nothing in _NOTHING)
    return is_off or any(fnmatchcase(name, pattern) for pattern in HARMLESS_FIELDS)


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
