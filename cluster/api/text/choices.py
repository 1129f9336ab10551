"""The choices of an answer: each reads the deltas of one submission and turns them into outputs."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from crossdock.cluster.api.http.limits import Charge
from crossdock.cluster.api.slices import slices
from crossdock.cluster.api.text.tokenizer import TextStream
from crossdock.cluster.dispatch.dispatcher import ReplicaLost
from crossdock.workers.schedule.request.failures import failure_of
from crossdock.workers.schedule.request.items import NO_ITEMS, Item
from crossdock.workers.schedule.request.request import FinishReason, TokenDelta, TokenLogprobs
from crossdock.workers.schedule.request.submission import Submission

_Item = TypeVar("_Item")
_BEGUN_AT_ONCE = 4  # streams of one request: each is placed when it begins, 1 ms
_BEGIN_PAUSE_S = 0.004  # for other requests here, and for the engine beside the replica's event loop
_ENDED_AT_ONCE = 8  # streams that are aborted together; about 0.2 ms each


@dataclass(slots=True)
class Output:
    """The part of one choice that one delta adds; or, extended by all later parts, the whole choice."""

    index: int
    texts: list[str] = field(default_factory=list)  # what each token completes, which may be nothing
    token_ids: list[int] = field(default_factory=list)
    positions: list[tuple[int, TokenLogprobs | None]] = field(
        default_factory=list
    )  # token ids, their log-probabilities
    offsets: list[int] = field(default_factory=list)  # where each position's token begins in the text, in characters
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    embedding: bytes | None = None  # of the prompt, as in `TokenDelta`
    finish_reason: str | None = None
    num_tokens: int = 0  # of the choice, up to the end of this part
    stop_reason: int | str | None = None  # the stop string or stop token id that ended the choice (vLLM's field)
    versions: Sequence[tuple[str, int]] = ()  # at the end of the choice, see `Choice`

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def weight_versions(self) -> dict[str, Any]:
        """Return vLLM's field of which weights made which tokens; nothing for the weights of the start."""
        ends = [*(start for _, start in self.versions[1:]), self.num_tokens]
        both = zip(self.versions, ends, strict=False)
        spans = [{"version": name, "start": start, "end": end} for (name, start), end in both]
        return {"weight_versions": spans} if spans else {}

    @property
    def is_acceptance(self) -> bool:
        """Whether the output adds nothing: a replica has accepted the submission, and there is no token yet."""
        return not self.token_ids and self.finish_reason is None

    def extend(self, more: "Output") -> None:
        self.texts += more.texts
        self.token_ids += more.token_ids
        self.positions += more.positions
        self.offsets += more.offsets
        self.prompt_logprobs = self.prompt_logprobs or more.prompt_logprobs
        self.embedding = self.embedding or more.embedding
        self.finish_reason = more.finish_reason
        self.num_tokens = more.num_tokens
        self.stop_reason = more.stop_reason
        self.versions = more.versions


@dataclass(slots=True)
class Prompt:
    """One prompt of an HTTP request."""

    token_ids: list[int]
    echo: str | None = None  # the prompt as text, where the answer repeats it
    offsets: list[int] = field(default_factory=list)  # where each of its tokens begins in that text, in characters
    items: Sequence[Item] = NO_ITEMS  # its pictures, by `start`
    second_text: int = 0  # the token at which the second of two texts begins; 0: there is one
    unread: Sequence[str] = ()  # kinds of texts of its messages that the template leaves out, see `Carried`


@dataclass(slots=True)
class Choice:
    """One submission, and how far its deltas have been read."""

    index: int
    prompt: Prompt
    submission: Submission
    stream: TextStream
    shows_stop_token: bool
    is_prompt_only: bool  # max_tokens is 0: the engine must sample one token, which is not shown
    account: Charge | None = None  # charged for the tokens; None: no API keys are in use
    num_tokens: int = 0
    num_cached_tokens: int = 0
    has_begun: bool = False
    versions: list[tuple[str, int]] = field(default_factory=list)  # names of weights, each from an output token on

    def read(self, delta: TokenDelta) -> Output:
        """Return the output that `delta` adds to the choice.

        Raises:
            Exception: the engine ended the request with an error, see `failure_of`.
            ReplicaLost: the request was aborted, and its answer would lack what is known of the prompt alone.
        """
        if delta.finish_reason is FinishReason.ERROR:
            raise failure_of(delta)
        if delta.finish_reason is FinishReason.ABORT and not self.has_begun and self._needs_first:
            raise ReplicaLost("the request was aborted before its first token")
        output = Output(self.index)
        if delta.token_ids and delta.weights and (not self.versions or self.versions[-1][0] != delta.weights):
            self.versions.append((delta.weights, self.num_tokens))
        if not self.has_begun:
            self._begin(delta, output)
        if self.is_prompt_only:
            output.finish_reason = FinishReason.LENGTH.value
            self._pay(delta)
            return output
        stream = self.stream
        token_ids = delta.token_ids
        num_shown = len(token_ids) - (delta.stop_token_id is not None and not self.shows_stop_token)
        start = len(self.prompt.echo or "")
        for i, token_id in enumerate(token_ids):
            output.token_ids.append(token_id)
            if delta.logprobs is not None:
                output.positions.append((token_id, delta.logprobs[i]))
                output.offsets.append(start + stream.num_chars)
            output.texts.append(stream.add(token_id) if i < num_shown else "")
            if stream.stopped is not None:
                output.finish_reason = FinishReason.STOP.value
                output.stop_reason = stream.stopped
                break
        else:
            if delta.finish_reason is not None:
                self._finish(delta, output)
        self.num_tokens += len(output.token_ids)
        output.num_tokens = self.num_tokens
        if output.finish_reason is not None:
            output.versions = self.versions
        if self.account is not None:
            self.account.output(len(output.token_ids))
            if output.finish_reason is not None:
                self._pay(delta)
        return output

    def _pay(self, delta: TokenDelta) -> None:
        """Pay the seconds that a replica charged, which it says in its last delta of a request."""
        if self.account is not None and delta.charged_s:
            self.account.spent(delta.charged_s, len(self.prompt.token_ids) + self.num_tokens)

    @property
    def _needs_first(self) -> bool:
        """Return whether the answer shows what only the first delta tells: of the prompt, or its vector."""
        sampling = self.submission.sampling
        needs_prompt = self.is_prompt_only or self.prompt.echo is not None or sampling.prompt_logprobs is not None
        return needs_prompt or sampling.pooling is not None

    def _begin(self, delta: TokenDelta, output: Output) -> None:
        self.has_begun = True
        self.num_cached_tokens = delta.num_cached_tokens
        output.prompt_logprobs = delta.prompt_logprobs
        output.embedding = delta.embedding
        if self.prompt.echo is None:
            return
        output.texts.append(self.prompt.echo)
        if self.submission.sampling.logprobs is not None:
            output.positions += zip(self.prompt.token_ids, delta.prompt_logprobs or (), strict=True)
            output.offsets += self.prompt.offsets

    def _finish(self, delta: TokenDelta, output: Output) -> None:
        assert delta.finish_reason is not None
        output.finish_reason = delta.finish_reason.value
        if delta.stop_token_id in self.submission.sampling.stop_token_ids:
            output.stop_reason = delta.stop_token_id
        if rest := self.stream.finish():  # held back by the last tokens
            output.texts[-1:] = ["".join(output.texts[-1:]) + rest]


class EventWriter(Protocol):
    """Writes events of a streamed answer to the client at once."""

    def is_ready(self) -> bool:
        """Return whether the client reads, and the answer has begun and goes on."""

    def write_event(self, event: bytes) -> None: ...


@dataclass(slots=True)
class ChoiceReader:
    """Reads deltas of a choice, and writes their events to the client. Implements `DeltaReader`."""

    choice: Choice
    event: Callable[[Output], bytes]  # of an output; empty: there is none
    writer: EventWriter
    last: Output | None = None  # of a delta with a stop string: has no event yet

    def is_ready(self) -> bool:
        return self.writer.is_ready()

    def read(self, delta: TokenDelta) -> bool:
        output = self.choice.read(delta)
        if output.finish_reason is not None:
            self.last = output
        elif event := self.event(output):
            self.writer.write_event(event)
        return self.last is None


async def merge(streams: Sequence[AsyncGenerator[_Item, None]]) -> AsyncGenerator[_Item, None]:
    """Yield the items of all streams as they come. The first error, or closing this iterator, closes every stream."""
    queue: asyncio.Queue[_Item | Exception | None] = asyncio.Queue(maxsize=2 * len(streams))

    async def pump(stream: AsyncGenerator[_Item, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put(item)
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks: list[asyncio.Task[None]] = []

    async def begin() -> None:
        async for some in slices(streams, _BEGUN_AT_ONCE, _BEGIN_PAUSE_S):
            tasks.extend(asyncio.create_task(pump(stream)) for stream in some)

    beginning = asyncio.create_task(begin())
    try:
        running = len(streams)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        beginning.cancel()
        try:
            async for ended in slices([task for task in tasks if not task.done()], _ENDED_AT_ONCE):
                for task in ended:
                    task.cancel()
        finally:
            for task in tasks:
                if not task.cancelling():  # where this task too is cancelled meanwhile
                    task.cancel()
            await asyncio.wait([beginning, *tasks])  # unlike `gather`, this cancels none of them twice
