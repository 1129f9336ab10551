"""When a replica will have free pages: its requests end, and those that wait for pages take what that frees."""

from collections.abc import Collection
from heapq import heapify, heappop, heappush

from crossdock.router.work import InFlightLoad
from crossdock.workers.report.live_profile import MOST_ENDS, LiveProfile
from crossdock.workers.schedule.policies.chunking import LEAST_SHARE

_LEAST_GAP_S = 1e-9  # a cost may have no base, and an idle replica no stream


def free_later(
    live: LiveProfile, booked: Collection[InFlightLoad], free: float, gap: float, share: float
) -> list[tuple[float, float]]:
    """Return, for the ends of requests, the seconds from the last report until then, and the free pages at that time.

    A request that waits for pages starts at the first end after which its pages are free; one that needs fewer passes.
    No request passes one whose prompt another replica computes, which takes no seconds here.
    Beside the chunks of prompts that have started, which get `share` of the time, a token takes longer than `gap`. When
    these are computed, further ones are expected to take as much of the time as prompts took recently.

    Args:
        booked: what `live` does not include.
        free: pages at the time of the report.
        gap: seconds of a token, with no prompt beside.
    """
    waiting = [each[:3] for each in live.room.lacking]
    waiting += [(each.pages, each.seconds, each.query.expected_output) for each in booked if not each.has_first]
    waiting.sort(key=lambda each: each[1] > 0)  # prompts that other replicas compute come first
    streams = [(each.query.expected_output, each.pages) for each in booked if each.has_first and each.decodes]
    ends: list[tuple[float, int]] = [*live.room.ends, *streams]
    heapify(ends)
    free -= sum([pages for _, pages in streams])
    gap = max(gap, _LEAST_GAP_S)
    more = max(share, LEAST_SHARE) / max(1 - share, LEAST_SHARE)  # seconds of prompts beside one of tokens
    recent = min(sum(live.shares.prompts), share)
    usual = recent / max(1 - recent, LEAST_SHARE)  # the same, as it was recently
    started = live.prefills.in_flight_seconds + live.prefills.started_seconds
    for pages, own, output, _ in live.room.starting:
        started += own
        heappush(ends, (started / (gap * more) + output, pages))
    found = list[tuple[float, float]]()
    seconds = 0.0
    tokens = 0.0
    while True:
        still = list[tuple[int, float, int]]()
        for pages, own, output in waiting:
            if pages <= free:
                free = free - pages
                started = started + own
                heappush(ends, (tokens + started / (gap * more) + output, pages))
            else:
                still.append((pages, own, output))
        waiting = still
        if tokens:
            found.append((seconds, free))
        if not ends or len(found) == MOST_ENDS:
            return found
        until, pages = heappop(ends)
        alone = gap * (until - tokens)
        beside = max(min(started, alone * more), alone * usual)
        seconds = seconds + alone + beside
        tokens = until
        free = free + pages
        started = max(started - beside, 0.0)
