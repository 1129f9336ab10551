"""The flags and the environment variables of vLLM and SGLang: for each that is missing here, a line that says why.

Flags that earlier versions of this server had are answered likewise.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from itertools import chain, product
from typing import Any

import yaml

from crossdock.cluster.config_file import gone_setting

_STATES = {"use": "use", "needless": "not needed:", "unsupported": "not supported:"}
_PREFIXES = ("VLLM_", "SGLANG_")  # of their variables


@cache
def table() -> dict[str, Any]:
    """Return the table of other servers' flags as `other_flags.yaml` has it."""
    text = files("crossdock.cluster.serve").joinpath("other_flags.yaml").read_text()
    return dict(yaml.safe_load(text))


def answer(flag: str) -> str | None:
    """Return advice for a flag that is missing here; None: no other server has the flag, and no earlier version had."""
    if gone := gone_setting(flag):
        return f"{flag}: {gone}"
    names, groups = {flag, flag.replace("--no-", "--", 1)}, table()["groups"]
    listed = (group for group in groups if not names.isdisjoint(group["flags"]))
    alike = (group for group in groups if any(fnmatchcase(*each) for each in product(names, group["flags"])))
    group = next(chain(listed, alike), None)
    if group is None:
        return None
    state = next(state for state in _STATES if state in group)
    return f"{flag}: {_STATES[state]} {group[state]}"


def unread_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a line for each variable of vLLM or SGLang that is set and that a setting here replaces, and one line for
    all others of theirs."""
    replaced = table()["environment"]
    lines = [f"{name} is not read here; use {instead}" for name, instead in replaced.items() if environment.get(name)]
    others = sorted(
        name for name in environment if name.startswith(_PREFIXES) and environment[name] and name not in replaced
    )
    return [*lines, f"not read here: {', '.join(others)}"] if others else lines
