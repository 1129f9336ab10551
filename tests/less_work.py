"""Spare each process of tests what it would do again and again: look for garbage, and look at Triton's language.

What is imported stays: a million objects that each search for garbage would look at. In Triton's interpreter each call
of a kernel's function lists all members of the language, and each operator makes a table: a third of the kernel's time.
Another third goes to whether sums and products of integers overflow, whose result it drops unless it debugs.

CPython maps frames in pieces of 16 KiB, and unmaps a piece when its last frame has ended: a loop that calls at the edge
of a piece maps one for each call. That took a third of the CPU time of tests/benchmarks/test_gpu.py.
"""

import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from _pytest import main

_YOUNG = 10_000  # objects. After Python's 700, tests/workers/schedule/test_any_history.py looked for 6 % of its time
gc.disable()  # until all tests are collected


def _call(what: Callable[[], object]) -> object:
    """Call a function in a piece of 512 KiB, of which this frame asks for half: those of tests fit into the rest."""
    return what()


_call.__code__ = _call.__code__.replace(co_stacksize=33_000)  # values of 8 bytes


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> object:
    return _call(partial(main.pytest_runtestloop, session))


def pytest_collection_finish() -> None:
    """Take what was imported out of the search for garbage, and have Triton's interpreter remember."""
    gc.freeze()
    gc.set_threshold(_YOUNG)
    gc.enable()
    if interpreter := sys.modules.get("triton.runtime.interpreter"):
        _remember(interpreter)


def _remember(interpreter: Any) -> None:
    """Have the interpreter find out once what each call would find out again, and leave out what it drops."""
    core, language = interpreter.tl.core, interpreter.tl
    packages = (language, core, core.tensor, language.math, core.tensor_descriptor_base)
    builtins = {each: [name for name in dir(each) if core.is_builtin(getattr(each, name))] for each in packages}
    find_dtype, dtypes = interpreter._get_np_dtype, dict[str, Any]()

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in builtins[package]:
            if core.is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    def get_np_dtype(of: Any) -> Any:
        name = (of.element_ty if isinstance(of, core.block_type) else of).name
        if name not in dtypes:
            dtypes[name] = find_dtype(of)
        return dtypes[name]

    interpreter._patch_builtin, interpreter._get_np_dtype = patch_builtin, get_np_dtype
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
