"""Tiny models of the tests go to the GPU, where CROSSDOCK_TESTS_ON_GPU is set: their oracles stay on the CPU.

CROSSDOCK_TESTS_ON_GPU=1 python -m pytest tests/workers/replica/engine
"""

import contextlib
import copy
import os
from typing import Any

VARIABLE = "CROSSDOCK_TESTS_ON_GPU"


def move_models() -> None:
    """Let `wrap_module` and `load_model` put models of the CPU on the GPU, before a test module imports either."""
    if not os.environ.get(VARIABLE):
        return
    from crossdock.workers.model import load

    device = "cpu" if os.environ[VARIABLE] == "cpu" else "cuda"
    wrap, read = load.wrap_module, load.load_model

    def wrap_there(module: Any, options: Any = load._DEFAULTS) -> Any:
        with contextlib.suppress(RuntimeError):  # packed weights cannot be copied: no oracle computes with those
            module = copy.deepcopy(module)
        return wrap(module if options.attention is not None else module.to(device), options)

    def read_there(spec: Any, to: str = device, *others: Any, **named: Any) -> Any:
        return read(spec, to, *others, **named)

    load.wrap_module, load.load_model = wrap_there, read_there
