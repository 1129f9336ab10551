"""Check what holds of every step of a scheduler, whatever has happened before it."""

from collections.abc import Sequence

from msgspec import structs

from crossdock.workers.schedule.pictures.whole_items import least_tokens
from crossdock.workers.schedule.request.batch import Batch, Scheduled
from crossdock.workers.schedule.request.submission import Leg
from crossdock.workers.schedule.scheduler import Scheduler
from tests.workers.schedule.model_free_replica import COST
from tests.workers.schedule.paged_device import StatePair

LONGEST = 40  # tokens of a request


def check_step(scheduler: Scheduler, batch: Batch, now: float) -> None:
    """Check a step that has just been scheduled against the settings and the places of its requests."""
    config = scheduler.config
    assert batch.num_tokens <= config.max_num_batched_tokens
    assert len(batch.scheduled) <= config.max_num_seqs
    names = [part.request.id for part in batch.scheduled]
    assert len(names) == len(set(names))
    arriving = [each for each in scheduler.table.held if each.leg is Leg.RECEIVE]
    is_alone = len(scheduler.table.running) + len(scheduler.table.waiting) + len(arriving) <= 1
    for part in batch.scheduled:
        check_part(scheduler, part)
    for part in batch.scheduled[: batch.num_decodes]:
        check_decode(scheduler, part)
    for part in batch.scheduled[batch.num_decodes :]:
        check_chunk(scheduler, part, is_alone)
    if not config.mixed_chunks:
        assert batch.num_decodes in (0, len(batch.scheduled)), "chunks and decodes take turns"
    check_no_stream_is_late_for_drafts(scheduler, batch, now)
    are_longer = [part.num_tokens > 1 for part in batch.scheduled[: batch.num_decodes]]
    assert are_longer == sorted(are_longer), "decodes of one token come first"


def check_part(scheduler: Scheduler, part: Scheduled) -> None:
    each, end, size = part.request, part.start + part.num_tokens, scheduler.pages.page_size
    assert part.start == each.num_scheduled_tokens - part.num_tokens >= each.num_computed_tokens
    known = end - len(part.drafts)
    assert part.samples == (known == each.num_tokens and each.sampling.max_tokens > 0)
    assert scheduler.pages.has_windows or len(part.pages) * size >= each.num_tokens
    assert all(len(pages) * size >= end for pages in (part.pages, *part.further_pages))
    is_local = each.leg is Leg.LOCAL and not each.items and not scheduler.pages.state_pages
    is_split = is_local and part.num_tokens < size and each.priority > 0  # a page would make a stream late
    assert is_split or known == each.num_tokens or known % size == 0 or known in [item.end for item in each.items]
    if scheduler.encoding is not None and scheduler.encoding.keeps_items_whole:
        assert not any(item.start < known < item.end for item in each.items), "a chunk ends inside an item"
    assert part.reason


def check_decode(scheduler: Scheduler, part: Scheduled) -> None:
    """A partially prefilled request is never decodable."""
    each = part.request
    assert each.num_output_tokens > 0
    assert part.num_tokens == each.num_verified_tokens + 1 + len(part.drafts)
    assert not part.drafts or not scheduler.pages.state_pages or part.state.read is not part.state.write
    assert part.samples
    assert each.num_output_tokens < each.sampling.max_tokens, "it is known to have ended"
    assert each.num_tokens < LONGEST


def check_chunk(scheduler: Scheduler, part: Scheduled, is_alone: bool) -> None:
    config, each = scheduler.config, part.request
    assert not each.num_verified_tokens
    if config.long_prefill_token_threshold and config.enable_chunked_prefill and not is_alone:
        longest = least_tokens(each.items, part.start, each.num_tokens, scheduler.pages.page_size) if each.items else 0
        assert part.num_tokens <= max(config.long_prefill_token_threshold, longest)


def check_no_stream_is_late_for_drafts(scheduler: Scheduler, batch: Batch, now: float) -> None:
    if scheduler.forecast.cost is None or not batch.num_drafts:
        return
    plain = [
        structs.replace(part, num_tokens=part.num_tokens - len(part.drafts), drafts=()) for part in batch.scheduled
    ]
    decodes = sorted(plain[: batch.num_decodes], key=lambda part: part.num_tokens)
    without = Batch([*decodes, *plain[batch.num_decodes :]], batch.num_decodes)
    for stream in scheduler.table.running:
        if stream.is_decoding and now + COST.seconds(without.work) <= stream.due:
            assert now + COST.seconds(batch.work) <= stream.due


def check_no_part_reads_what_another_writes(states: Sequence[StatePair], state_pages: int) -> None:
    written = [page for _, pages in states for page in pages]
    assert len(written) == len(set(written)) == len(states) * state_pages
    for read, own in states:
        assert len(read) in (0, state_pages)
        assert not set(read) & (set(written) - set(own))
