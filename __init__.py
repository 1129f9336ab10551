"""Crossdock from Python: `LLM` computes prompts in this process, without Ray and without HTTP."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crossdock.cluster.offline.llm import LLM
    from crossdock.cluster.offline.outputs import (
        CompletionOutput,
        EmbeddingRequestOutput,
        RequestOutput,
        ScoringRequestOutput,
    )
    from crossdock.cluster.offline.sampling_params import PromptParams as SamplingParams
    from crossdock.cluster.offline.sampling_params import StructuredOutputsParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
]

_PLACES = {  # of names that are not in outputs.py
    "LLM": ("llm", "LLM"),
    "SamplingParams": ("sampling_params", "PromptParams"),
    "StructuredOutputsParams": ("sampling_params", "StructuredOutputsParams"),
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: the command line and replicas need none of these."""
    if name not in __all__:
        raise AttributeError(f"module 'crossdock' has no attribute {name!r}; it has {', '.join(__all__)}")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in replicas; torch reads it when imported
    module, own_name = _PLACES.get(name, ("outputs", name))
    return getattr(import_module(f"crossdock.cluster.offline.{module}"), own_name)
