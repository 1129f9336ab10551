"""Compiled grammars: vetted in a process of their own, compiled in one thread, and kept for the next request.

llguidance cannot hand a compiled grammar to another process. So the vetting process only proves that the grammar
compiles within limits. A second compile here takes the same time, memory and stack, and not the GIL.
"""

import asyncio
import hashlib
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from crossdock.workers.model.grammar.matcher import invalid, new_matcher
from crossdock.workers.model.grammar.state import GrammarState, MaskBudget
from crossdock.workers.sandbox.limited_child import Limits
from crossdock.workers.sandbox.sandbox import Sandbox, SandboxBusy
from crossdock.workers.schedule.request.submission import Grammar, InvalidField, Overloaded
from crossdock.workers.schedule.shares import Shares

logger = logging.getLogger(__name__)

_MOST_CACHED = 128  # compiled grammars and refusals
_MOST_CACHED_BYTES = 256 << 20
_MOST_WAITING = 16  # different grammars; most compile within 50 ms
_PATIENCE_S = 60.0  # a request waits so long for its grammar; its router goes on asking whether it is still here
_RETRY_S = 2.0
LIMITS = Limits(
    cpu_seconds=1.0,  # of one compile and a few steps; the largest useful grammars take 0.3 s
    wall_seconds=15.0,
    memory_bytes=512 << 20,
    stack_bytes=1 << 20,  # an eighth of a thread's stack, so that the replica's own threads never overflow theirs
)
_MODULE = "crossdock.workers.model.grammar.vetting"


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """A grammar at its beginning, or why it cannot be served."""

    matcher: LLMatcher | None
    refusal: str = ""
    num_bytes: int = 0
    budgets: dict[str, MaskBudget] = field(default_factory=dict)  # by owner: slow masks of one fail no other's


class GrammarCache:
    """The grammars used last, by a digest of their text, bounded by number and bytes. Any thread may call."""

    def __init__(self, most: int = _MOST_CACHED, most_bytes: int = _MOST_CACHED_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._entries: OrderedDict[bytes, Compiled] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    def get(self, key: bytes) -> Compiled | None:
        """Return the entry, which is now the one used last."""
        with self._lock:
            found = self._entries.get(key)
            if found is not None:
                self._entries.move_to_end(key)
            return found

    def put(self, key: bytes, entry: Compiled) -> None:
        """Keep an entry, in place of the least recently used ones."""
        with self._lock:
            self._entries[key] = entry
            self.num_bytes += entry.num_bytes
            while len(self._entries) > self._most or self.num_bytes > self._most_bytes:
                self.num_bytes -= self._entries.popitem(last=False)[1].num_bytes

    def __len__(self) -> int:
        return len(self._entries)


class GrammarCompiler:
    """Compiles grammars for one tokenizer, outside the caller's thread. Any thread may call.

    Everything runs in one thread: a grammar that takes long delays other new grammars, never a step. Owners have
    shares of the places, and take turns: the grammars of one delay those of another by one.
    """

    def __init__(
        self,
        tokenizer: Path | str | PreTrainedTokenizerBase | None,
        vocab_size: int,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        """Take a fast Hugging Face tokenizer, or the one in a directory. None: every grammar is refused.

        `vocab_size` is the width of the model's logits. `eos_token_ids` end a text; empty, they are the tokenizer's.
        """
        self._source, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, sorted(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._vetter: Sandbox | None = None
        self._cache = GrammarCache()
        self._waiting: dict[bytes, Future[Compiled]] = {}
        self._turns: OrderedDict[str, deque[tuple[bytes, Grammar, Future[Compiled]]]] = OrderedDict()  # by owner
        self._places = Shares(_MOST_WAITING)
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "grammar")

    def warm_up(self) -> None:
        """Begin to build the tokenizer's trie and to start the vetting process. The first grammar comes after that."""
        if self._source is not None:
            self._thread.submit(self._prepare).add_done_callback(_warn_of_refusal)

    def compile(self, grammar: Grammar, token_ids: Sequence[int] = ()) -> GrammarState:
        """Wait for a grammar. Returns its state after `token_ids`.

        Raises:
            InvalidField: the grammar is malformed or beyond the limits; the message gives the reason.
            Overloaded: too many other grammars come first.
        """
        return self._state(self._request(grammar).result(), token_ids, "")

    async def compiled(
        self, grammar: Grammar, token_ids: Sequence[int] = (), may_refuse: bool = True, owner: str = ""
    ) -> GrammarState:
        """Compile on an event loop, as `compile` does, while the loop goes on. Waits `_PATIENCE_S` at most; a request
        that may not be refused waits behind any number of others. `owner`: whose turn it takes."""
        request = self._request(grammar, may_refuse, owner)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                found = await asyncio.shield(asyncio.wrap_future(request))  # others may wait for the same grammar
        except TimeoutError:
            raise _overloaded() from None
        if len(token_ids) < 100:  # a microsecond or ten for each
            return self._state(found, token_ids, owner)
        return await asyncio.to_thread(self._state, found, token_ids, owner)

    @property
    def num_cached(self) -> int:
        """Return how many grammars and refusals are kept."""
        return len(self._cache)

    def close(self) -> None:
        """End the thread and the vetting process."""
        self._thread.shutdown()
        if self._vetter is not None:
            self._vetter.close()

    def _request(self, grammar: Grammar, may_refuse: bool = True, owner: str = "") -> "Future[Compiled]":
        key = hashlib.sha256(f"{grammar.kind}\0{grammar.source}".encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            if (found := self._cache.get(key)) is not None:
                done: Future[Compiled] = Future()
                done.set_result(found)
                return done
            if (waiting := self._waiting.get(key)) is not None:
                return waiting
            if may_refuse and not self._places.room(owner):
                raise _overloaded()
            request: Future[Compiled] = Future()
            self._waiting[key] = request
            self._turns.setdefault(owner, deque()).append((key, grammar, request))
            self._places.take(owner, 1)
            self._thread.submit(self._compile_next)
            return request

    def _state(self, compiled: Compiled, token_ids: Sequence[int], owner: str) -> GrammarState:
        if compiled.matcher is None:
            raise InvalidField(compiled.refusal, "grammar")
        budget = compiled.budgets.setdefault(owner, MaskBudget())
        num_words = 0 if self._tokenizer is None else -(-self._tokenizer.vocab_size // 32)
        state = GrammarState(compiled.matcher.deep_copy(), self._vocab_size, budget, num_words)
        for token_id in token_ids:
            state.accept(token_id)
        return state

    # -- the thread --------------------------------------------------------------------------------------------------

    def _compile_next(self) -> None:
        """Compile the first grammar of the owner whose turn it is, and notify all its requests."""
        with self._lock:
            owner, waiting = next(iter(self._turns.items()))
            key, grammar, request = waiting.popleft()
            self._turns.move_to_end(owner)
            if not waiting:
                del self._turns[owner]
        found: Compiled | BaseException
        try:
            found = self._compile(grammar)
            self._cache.put(key, found)
        except BaseException as error:
            found = error
        with self._lock:
            del self._waiting[key]
            self._places.release(owner, 1)
        if isinstance(found, BaseException):
            request.set_exception(found)
        else:
            request.set_result(found)

    def _compile(self, grammar: Grammar) -> Compiled:
        try:
            tokenizer, vetter = self._prepare()
            num_bytes = vet(vetter, grammar)
            return Compiled(new_matcher(tokenizer, grammar), num_bytes=num_bytes)
        except InvalidField as error:
            return Compiled(None, str(error), len(str(error)))
        except SandboxBusy as error:
            raise _overloaded() from error

    def _prepare(self) -> tuple[LLTokenizer, Sandbox]:
        """Return the tokenizer's trie and the vetting process, both ready.

        Raises:
            InvalidField: there is no tokenizer, or a slow one, whose vocabulary gives no bytes of tokens. Or a
                token that ends answers is also text, which a grammar may need.
        """
        if self._tokenizer is None or self._vetter is None:
            tokenizer = self._load()
            backend = copy(tokenizer.backend_tokenizer)
            backend.no_padding()
            backend.no_truncation()
            eos_token_ids = self._eos_token_ids or [tokenizer.eos_token_id]
            definition = backend.to_str()
            parsed = LLTokenizer(definition, eos_token=eos_token_ids)
            for token_id in eos_token_ids:
                if token_id < parsed.vocab_size and not parsed.is_special_token(token_id):
                    text = tokenizer.convert_ids_to_tokens(token_id)
                    why = (
                        f"structured output needs an end token that is no text, and {text!r} ({token_id}) ends answers"
                    )
                    raise InvalidField(why, "grammar")
            self._vetter = new_vetter(definition, eos_token_ids)
            self._vetter.start()  # first: it reads the tokenizer at the same time
            self._tokenizer = parsed
        return self._tokenizer, self._vetter

    def _load(self) -> PreTrainedTokenizerFast:
        if self._source is None:
            why = "structured output needs the model's tokenizer, which this engine was started without"
            raise InvalidField(why, "grammar")
        tokenizer = self._source
        if isinstance(tokenizer, Path | str):
            try:
                tokenizer = AutoTokenizer.from_pretrained(tokenizer)
            except (OSError, ValueError) as error:
                raise InvalidField(f"structured output needs the model's tokenizer: {error}", "grammar") from error
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise InvalidField("structured output needs a fast tokenizer, and this model's is a slow one", "grammar")
        return tokenizer


def _warn_of_refusal(prepared: "Future[Any]") -> None:
    if isinstance(error := prepared.exception(), InvalidField):
        logger.warning("%s", error)


def _overloaded() -> Overloaded:
    return Overloaded(f"too many grammars are being compiled. Retry in {_RETRY_S:g} s", retry_after=_RETRY_S)


def new_vetter(tokenizer: str, eos_token_ids: Sequence[int]) -> Sandbox:
    """Return the vetting process, which is not started yet. `tokenizer`: the JSON of a fast Hugging Face tokenizer."""
    return Sandbox(
        _MODULE,
        {"tokenizer": tokenizer, "eos_token_ids": list(eos_token_ids)},
        title="the process that compiles grammars",
        limits=LIMITS,
    )


def vet(vetter: Sandbox, grammar: Grammar) -> int:
    """Return the bytes that a grammar takes when it is compiled, about. Calls must not overlap.

    Raises:
        InvalidField: the grammar cannot be served; the message gives the reason.
        SandboxBusy: there is no verdict.
    """
    verdict = vetter.ask({"kind": grammar.kind, "source": grammar.source})
    if reason := verdict.get("reason"):
        raise invalid(grammar, reason)
    if error := verdict.get("error"):
        raise InvalidField(error, "grammar")
    return int(verdict["bytes"])
