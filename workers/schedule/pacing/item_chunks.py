"""The chunk of a prompt with pictures: as long as the step has time for it beside the encoder. Pure."""

from typing import NamedTuple

from crossdock.workers.schedule.pacing.chunking import Candidate, ChunkBudget
from crossdock.workers.schedule.pictures.encoding import Encoding
from crossdock.workers.schedule.request import Request


class PromptChunk(NamedTuple):
    """The next chunk of a prompt."""

    num_tokens: int
    limit: str = ""  # why the chunk is not longer, if an item is the reason


def chunk_with_items(
    encoding: Encoding, request: Request, prompt: Candidate, budget: ChunkBudget, threshold: int, page_size: int
) -> PromptChunk:
    """Return the chunk of a prompt with items, with the items that must be encoded for it.

    An item is taken if its rows fit, and then a token of it. Else the chunk ends on the page boundary before the item.
    Where items are kept whole, no chunk ends inside one.
    """
    start, limit = prompt.start, ""
    num_tokens = encoding.outside_items(request, start, budget.chunk(prompt, threshold, page_size), page_size)
    for stop in encoding.stops(request, start, page_size):
        if stop.start >= start + num_tokens:
            break
        if stop.has_room:
            passing = prompt._replace(encoder_seconds=stop.seconds, has_floor=stop.has_floor)
            longer = encoding.outside_items(request, start, budget.chunk(passing, threshold, page_size), page_size)
            if start + longer > max(stop.start, start):
                num_tokens = longer
                continue
        if not stop.has_room and stop.before <= 0:
            encoding.stand_still(request)
        num_tokens, limit = min(num_tokens, max(stop.before, 0)), stop.limit
        break
    if not budget.is_chunked and start + num_tokens < request.num_tokens:
        num_tokens = 0
    return PromptChunk(num_tokens, limit)
