"""The setting `log_chunks`: where Serve writes a replica's log, lines of chunks are written too, or are not."""

import logging
from collections.abc import Iterator
from io import StringIO

import pytest

from crossdock.workers.replica.engine.chunk_log import log_chunks
from crossdock.workers.replica.serving import replica
from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.request.batch import Batch, Scheduled
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.submission import SamplingParams, Submission

COST = StepCost(base=0.01, per_prefill_token=0.001, per_attended=0, per_decode=0, per_context=0)


@pytest.fixture
def log() -> Iterator[StringIO]:
    """The text of Serve's log, to which its own handler writes; all loggers are as before afterwards."""
    names = ("crossdock", "crossdock.chunks")
    before = [(each, each.level, each.propagate, list(each.handlers)) for each in map(logging.getLogger, names)]
    stream = StringIO()
    handler = logging.StreamHandler(stream)
    replica.logger.addHandler(handler)
    yield stream
    replica.logger.removeHandler(handler)
    for logger, level, propagate, handlers in before:
        logger.setLevel(level)
        logger.propagate = propagate
        logger.handlers = handlers


@pytest.mark.parametrize("is_on", [True, False])
def test_log_of_a_replica_has_a_line_for_each_chunk_where_the_setting_is_on(log: StringIO, is_on: bool) -> None:
    replica._log_where_serve_does(with_chunks=is_on)
    request = Request(Submission("long", [7] * 10_000, SamplingParams()))
    chunks = [Scheduled(request, 0, 4096, (), False), Scheduled(request, 8192, 1808, (), True)]
    for chunk in chunks:
        log_chunks(Batch([chunk], 0, "token budget"), COST, 4.2)
    whole = "long: tokens 0 to 4096 of 10000, 4106.00 ms alone, 4200.00 ms with all of the step, 0 decodes; "
    end = "long: tokens 8192 to 10000 of 10000, 1818.00 ms alone, 4200.00 ms with all of the step, 0 decodes; "
    expected = [
        whole + "first because: decode; no longer because: token budget, down to whole pages",
        end + "first because: decode; no longer because: the prompt ends",
    ]
    assert log.getvalue().splitlines() == (expected if is_on else [])
