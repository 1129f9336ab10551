"""Summarise a server's hardware and capacity: the lines that `crossdock serve` prints at its start."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ByteSize

from crossdock.workers.report.capacity import STREAM_CONTEXT, most_streams, most_tokens
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.policies.pace import promises_beyond

EMULATED = "emulated "  # begins the name of a device that does not compute


def summary(replicas: Sequence[Mapping[str, Any]], used: int | None = None, free: int | None = None) -> list[str]:
    """Return the lines for replicas as /v1/replicas lists them: one group of lines for each pool.

    Args:
        used: bytes that all processes of the server hold; None: they are on several machines.
        free: bytes that the machine has left.
    """
    pools: dict[str, list[Mapping[str, Any]]] = {}
    for replica in replicas:
        pools.setdefault(replica["pool"], []).append(replica)
    lines = []
    for name, members in pools.items():
        profile = SchedulingProfile.model_validate(members[0]["profile"])
        machine = members[0]["machine"]
        title = f"{name}: " if len(pools) > 1 else ""
        lines.append(f"Machine: {title}{_machine(machine, profile, len(members))}")
        if slower := machine.get("slower"):
            lines.append(f"Slower: {title}attention runs in plain torch, several times slower: {slower}")
        if not profile.generates:
            lines.append(f"Texts: {title}{_texts(profile)}")
            continue
        lines += [f"Experts: {title}{line}" for line in machine.get("experts", ())]
        lines.append(f"KV pages: {title}{_pages(machine, profile)}")
        lines.append(f"Speed: {title}{_speed(profile)}")
    if used is not None and free is not None and lines:
        lines.insert(1, f"Memory: {_memory(replicas, used, free)}")
    return lines


def _machine(machine: Mapping[str, Any], profile: SchedulingProfile, num_replicas: int) -> str:
    instructions = f" ({machine['instructions']})" if machine["instructions"] else ""
    ranks = _num_ranks(profile.model_dump())
    each = f"{num_replicas} replica{'s' * (num_replicas > 1)}" + (f" of {ranks} ranks" if ranks > 1 else "")
    layers = f"products in {machine['kernels']}" if machine["kernels"] else "transformers' own layers"
    parts = f"attention in {machine['attention']}, {layers}"
    if machine["device"].startswith(EMULATED):
        return f"{machine['device']}, {each}: nothing is computed, and steps take the seconds of this profile"
    return f"{machine['device']}{instructions}, {each}, {machine['threads']} threads each; {machine['dtype']}, {parts}"


def _num_ranks(profile: Mapping[str, Any]) -> int:
    num_ranks: int = profile["tensor_parallel_size"] * profile["pipeline_parallel_size"]
    return num_ranks


def _memory(replicas: Sequence[Mapping[str, Any]], used: int, free: int) -> str:
    """Return the parts of the memory in use. A replica describes one of its ranks; the others hold about as much."""
    weights, pool = (
        sum(each["machine"][name] * _num_ranks(each["profile"]) for each in replicas) for name in ("weights", "pool")
    )
    parts = f"{ByteSize(weights).human_readable()} weights, {ByteSize(pool).human_readable()} KV pages"
    others = used - weights - pool  # below 0 where no step has written most of the pages, which take no memory then
    if others > 0:
        parts += f", {ByteSize(others).human_readable()} for Python, torch and Ray"
    return f"{parts}; {ByteSize(free).human_readable()} are left"


def _pages(machine: Mapping[str, Any], profile: SchedulingProfile) -> str:
    tokens = f"{most_tokens(profile, profile.max_model_len):,} tokens"
    is_emulated = machine["device"].startswith(EMULATED)
    kind = ", counted and not stored" if is_emulated else f" in {machine['kv_dtype']}"
    windows = ", where layers with a window keep no more than their window" if any(profile.windows) else ""
    return f"{tokens}{kind}{windows}; the longest context is {profile.max_model_len:,} tokens"


def _texts(profile: SchedulingProfile) -> str:
    """Return the length of texts that a text encoder reads, and their seconds."""
    longest = profile.max_model_len
    seconds = profile.cost.prefill_seconds(0, longest, longest)
    short = min(64, longest)
    rate = short / max(profile.cost.prefill_seconds(0, short, short), 1e-9)
    return (
        f"up to {longest:,} tokens each, which take {seconds:.2f} s; alone, texts of {short} tokens are read at "
        f"{rate:,.0f} tokens a second; no KV pages"
    )


def _speed(profile: SchedulingProfile) -> str:
    context = min(STREAM_CONTEXT, profile.max_model_len)
    prompt = profile.cost.prefill_seconds(0, context, profile.max_num_batched_tokens)
    carried = ", ".join(
        f"{most_streams(profile, slo.tpot_s, context)} at {1000 * slo.tpot_s:g} ms a token ({slo.name})"
        for slo in profile.slo_classes
    )
    late = "".join(
        f"; the promise of {name} is beyond this machine, whose tokens take {1000 * least:.0f} ms or more"
        for name, least in promises_beyond(profile.cost, profile.slo_classes).items()
    )
    return (
        f"a prompt of {context:,} tokens takes {prompt:.2f} s; streams of {context:,} tokens at once: {carried}{late}"
    )
