"""Crossdock from Python: `LLM` computes prompts in this process, `build_app` makes an application for Ray Serve."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crossdock.cluster.config import ClusterConfig
    from crossdock.cluster.offline.llm import LLM
    from crossdock.cluster.offline.outputs import (
        CompletionOutput,
        EmbeddingRequestOutput,
        RequestOutput,
        ScoringRequestOutput,
    )
    from crossdock.cluster.offline.sampling_params import PromptParams as SamplingParams
    from crossdock.cluster.offline.sampling_params import StructuredOutputsParams
    from crossdock.cluster.serve.build import build_app

__all__ = [
    "LLM",
    "ClusterConfig",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "build_app",
]

_PLACES = {  # of names that are not in outputs.py
    "ClusterConfig": ("config", "ClusterConfig"),
    "LLM": ("offline.llm", "LLM"),
    "SamplingParams": ("offline.sampling_params", "PromptParams"),
    "StructuredOutputsParams": ("offline.sampling_params", "StructuredOutputsParams"),
    "build_app": ("serve.build", "build_app"),
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: the command line and replicas need none of these."""
    if name not in __all__:
        raise AttributeError(f"module 'crossdock' has no attribute {name!r}; it has {', '.join(__all__)}")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in replicas; torch reads it when imported
    module, own_name = _PLACES.get(name, ("offline.outputs", name))
    return getattr(import_module(f"crossdock.cluster.{module}"), own_name)
