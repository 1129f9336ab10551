"""Spare each process of tests what it would do again and again: looks for garbage, and looks at Triton's language.

Garbage: torch, transformers and Ray are a million objects that stay. Python would look at them as they are imported, and
again with each search for garbage. Interpreted Triton: each call of a function of a kernel lists all members of Triton's
language, which takes a fifth of the kernel's time.
"""

import gc
import sys
from typing import Any

import pytest

gc.disable()  # until all tests are collected: what is imported stays


def pytest_collection_finish() -> None:
    """Take what was imported out of the search for garbage, and have Triton's interpreter remember."""
    gc.freeze()
    gc.enable()
    if interpreter := sys.modules.get("triton.runtime.interpreter"):
        _remember(interpreter)


def _remember(interpreter: Any) -> None:
    """Replace two functions of Triton 3.7's interpreter by ones that return the same, found once."""
    language, core = interpreter.tl, interpreter.tl.core
    packages = (language, core, core.tensor, language.math, core.tensor_descriptor_base)
    builtins = {
        package: [name for name in dir(package) if core.is_builtin(getattr(package, name))] for package in packages
    }
    np_dtype, np_dtypes = interpreter._get_np_dtype, dict[str, Any]()

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in builtins[package]:
            if core.is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    def get_np_dtype(of: Any) -> Any:
        name = (of.element_ty if isinstance(of, core.block_type) else of).name
        if name not in np_dtypes:
            np_dtypes[name] = np_dtype(of)
        return np_dtypes[name]

    interpreter._patch_builtin, interpreter._get_np_dtype = patch_builtin, get_np_dtype
