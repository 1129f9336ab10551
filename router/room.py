"""How much room a replica has for a new request, and when it will have more: its requests end, and those that wait for
pages take what that frees."""

from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush

from crossdock.router.loads import NO_LIMIT, RoomFigures
from crossdock.router.work import InFlightLoad, Work
from crossdock.workers.report.live_profile import MOST_ENDS, LiveProfile, WaitingRequest
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.policies.chunking import LEAST_SHARE

_NONE_LACKING = WaitingRequest(0, NO_LIMIT, 0)
_LEAST_GAP_S = 1e-9  # a cost may have no base, and an idle replica no stream


def room_of(
    profile: SchedulingProfile,
    live: LiveProfile,
    booked: Collection[InFlightLoad],
    work: Work,
    gap: float,
    share: float,
) -> tuple[RoomFigures[float, Sequence[float]], Sequence[Sequence[tuple[float, float]]]]:
    """Return the room that in-flight loads leave to each class, and the pages that ends of requests will free.

    The second has two results of `free_later`: behind the prompts that wait for pages, and before them. Both are empty
    where a prompt of any length has room and no prompt waits."""
    num_classes = len(work.streams)
    pages = padded(live.room.free_pages, profile.num_pages, num_classes)
    now = padded(live.room.pages_now or live.room.free_pages, profile.num_pages, num_classes)
    before = now[-1]
    for need in work.booked_needs:
        now = [free - need if need <= free else free for free in now]  # others pass those that wait
    slots = [free - len(work.booked_needs) for free in padded(live.room.slots, profile.max_num_seqs, num_classes)]
    most = profile.needs.longest_prompt
    longest = [most(free) if slot >= 1 else -1.0 for free, slot in zip(now, slots, strict=True)]
    has_room = min(longest) >= profile.max_model_len and not live.room.lacking
    behind = [] if has_room else free_later(live, live.room.lacking, booked, before, gap, share)
    first = free_later(live, (), booked, before, gap, share) if live.room.lacking else behind
    booked_pages = sum(work.booked_needs)
    shortest = min(live.room.lacking, key=lambda each: each.seconds, default=_NONE_LACKING)
    figures = RoomFigures(
        min([at for at, free in behind if free < now[-1]], default=NO_LIMIT),
        len(live.room.lacking),
        shortest.seconds,
        shortest.pages,
        live.room.empty_pages - (booked_pages - work.booked_idle_pages),
        live.room.eviction_seconds,
        [free - booked_pages for free in pages],
        slots,
        longest,
    )
    return figures, (behind, first)


def padded(reported: Sequence[float], default: float, num_classes: int) -> list[float]:
    """Return figures for the router's classes, with a default for classes that the replica does not have."""
    return [*reported[:num_classes], *[default] * (num_classes - len(reported))]


def free_later(
    live: LiveProfile,
    lacking: Sequence[WaitingRequest],
    booked: Collection[InFlightLoad],
    free: float,
    gap: float,
    share: float,
) -> list[tuple[float, float]]:
    """Return, for the ends of requests, the seconds from the last report until then, and the free pages at that time.

    A request that waits for pages starts at the first end after which its pages are free; one that needs fewer passes.
    The shortest prompt comes first. One that another replica computes takes no seconds here: no request passes it.
    Beside the chunks of prompts that have started, which get `share` of the time, a token takes longer than `gap`. When
    these are computed, further ones are expected to take as much of the time as prompts took recently.

    Args:
        lacking: the requests of `live` that wait for pages, and get them.
        booked: what `live` does not include.
        free: pages at the time of the report.
        gap: seconds of a token, with no prompt beside.
    """
    waiting = [each[:3] for each in lacking]
    waiting += [(each.pages, each.seconds, each.query.expected_output) for each in booked if not each.has_first]
    waiting.sort(key=lambda each: each[1])
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
