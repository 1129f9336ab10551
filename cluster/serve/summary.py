"""Summarise a server's hardware and capacity: the lines that `crossdock serve` prints at its start."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ByteSize

from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.pacing.pace import promises_beyond

EMULATED = "emulated "  # begins the name of a device that does not compute
_CONTEXT = 1000  # tokens of each stream, and of the prompt, for which speed is quoted


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
        profile, machine = SchedulingProfile.model_validate(members[0]["profile"]), members[0]["machine"]
        title = f"{name}: " if len(pools) > 1 else ""
        lines.append(f"Machine: {title}{_machine(machine, profile, len(members))}")
        lines.append(f"KV pages: {title}{_pages(machine, profile)}")
        lines.append(f"Speed: {title}{_speed(profile)}")
    if used is not None and free is not None and lines:
        lines.insert(1, f"Memory: {_memory(replicas, used, free)}")
    return lines


def most_streams(profile: SchedulingProfile, tpot_s: float, context: int) -> int:
    """Return how many streams of `context` tokens one replica carries at a token every `tpot_s` seconds, no prompts
    beside them."""
    depth = profile.pipeline_parallel_size
    longest = tpot_s / (profile.overrun * max(depth * profile.interval_share, 1.0))
    most = min(profile.max_num_seqs, _most_tokens(profile, context) // context)
    num = 0
    while num < most:
        each_step = (num + 1) / depth
        if profile.cost.decode_step_seconds(each_step, each_step * context) > longest:
            break
        num += 1
    return num


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
    sizes = (ByteSize(size).human_readable() for size in (weights, pool, max(used - weights - pool, 0), free))
    return "{} weights, {} KV pages, {} for Python, torch and Ray; {} are left".format(*sizes)


def _pages(machine: Mapping[str, Any], profile: SchedulingProfile) -> str:
    num_tokens = _most_tokens(profile, profile.max_model_len)
    return f"{num_tokens:,} tokens in {machine['kv_dtype']}; the longest context is {profile.max_model_len:,} tokens"


def _most_tokens(profile: SchedulingProfile, context: int) -> int:
    """Return how many tokens the pages hold, in streams of `context` tokens where windows or states count."""
    if profile.windows == (None,) and not profile.state_pages:
        return profile.num_pages * profile.page_size
    return profile.num_pages * context // profile.needs.held(context)


def _speed(profile: SchedulingProfile) -> str:
    context = min(_CONTEXT, profile.max_model_len)
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
