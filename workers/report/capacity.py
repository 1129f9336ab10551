"""Compute what a replica carries, by its profile: `serve` says it at its start, and `tune` in its advice."""

from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.first_token import overrun_when_full

STREAM_CONTEXT = 1000  # tokens of each stream, and of the prompt, for which speed is quoted


def most_streams(profile: SchedulingProfile, tpot_s: float, context: int) -> int:
    """Return how many streams of `context` tokens one replica carries at a token every `tpot_s` seconds, no prompts
    beside them."""
    depth = profile.pipeline_parallel_size
    longest = tpot_s / overrun_when_full(profile.overrun, depth, profile.interval_share)
    most = min(profile.max_num_seqs, most_tokens(profile, context) // context)
    num = 0
    while num < most:
        each_step = (num + 1) / depth
        if profile.cost.decode_step_seconds(each_step, each_step * context) > longest:
            break
        num += 1
    return num


def most_tokens(profile: SchedulingProfile, context: int) -> int:
    """Return how many tokens the pages hold, in streams of `context` tokens where windows or states count."""
    if profile.windows == (None,) and not profile.state_pages:
        return profile.num_pages * profile.page_size
    return profile.num_pages * context // profile.needs.held(context)
