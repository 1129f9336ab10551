"""Limits of API keys: requests and tokens per minute, and requests at once.

They hold for all ingresses together. Each has an equal share of what a minute allows, and borrows from the others when
it lacks some: all requests of a client may come over one connection, and so to one ingress. Running requests are
counted at all ingresses when one begins.
"""

import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.http.keys import ApiKey

UNSTATED_OUTPUT = 1024  # tokens that are reserved for an output whose request states no limit of its own
READS_PER_MINUTE = 600  # GETs of one key: each asks all replicas
ASK_S = 0.2  # between two questions of an account to the other ingresses, so that refusals stay cheap
_ROUNDING = 1e-6  # what sums of parts of a limit may lack
_MINUTE = 60.0
_NEWEST_PRICE = 0.1  # weight of the newest output in the mean price of a token
_FIRST_SWEEP = 64  # accounts; the ledger looks for idle ones when their number has doubled since it last did


@dataclass(frozen=True, slots=True)
class Loan:
    """An ingress's answer to another: the amount lent for a key, and how many of the key's requests run here."""

    amount: float = 0.0
    num_running: int = 0


Unit: TypeAlias = Literal["requests", "tokens", "seconds"]  # of what a minute allows

AskPeers: TypeAlias = Callable[[str, Unit, float], Awaitable[list[Loan]]]
"""Ask all other ingresses, for an owner, each to give so many of a unit. Those that do not answer are left out."""


@dataclass(slots=True)
class Bucket:
    """A token bucket that holds what one minute allows, and fills at an even pace.

    The level may become negative: an output may be longer than what was reserved for it.
    """

    capacity: float
    filled_at: float  # on the clock that `now` is read from
    level: float = field(init=False)

    def __post_init__(self) -> None:
        self.level = self.capacity

    def fill(self, now: float) -> None:
        filled = min(self.level + (now - self.filled_at) * self.capacity / _MINUTE, self.capacity)
        self.level = max(self.level, filled)  # it may have borrowed more than it holds by itself
        self.filled_at = now

    def lend(self, most: float, now: float) -> float:
        """Give away up to `most` of the level; return how much."""
        self.fill(now)
        lent = max(min(most, self.level), 0.0)
        self.level -= lent
        return lent

    def seconds_until(self, level: float) -> float:
        return max(level - self.level, 0.0) * _MINUTE / self.capacity


@dataclass(slots=True, eq=False)
class Account:
    """One key at one ingress."""

    key: ApiKey
    share: int  # the number of ingresses, among which the key's limits are divided
    clock: Callable[[], float]
    ask_peers: AskPeers | None = None
    num_running: int = 0
    requests: Bucket | None = field(init=False)
    tokens: Bucket | None = field(init=False)
    seconds: Bucket | None = field(init=False)  # of the replicas' time, as predicted
    price: float = 0.0  # seconds per token of recent requests; 0: none has ended
    reads: Bucket = field(init=False)
    _ask_at: float = field(default=-math.inf, init=False)  # when the other ingresses may be asked again

    def __post_init__(self) -> None:
        now = self.clock()
        self.reads = Bucket(self._share_of(READS_PER_MINUTE), now)
        limits = (self.key.requests_per_minute, self.key.tokens_per_minute)
        self.requests, self.tokens = (None if each is None else Bucket(self._share_of(each), now) for each in limits)
        seconds = self.key.seconds_per_minute
        self.seconds = None if seconds is None else Bucket(seconds / self.share, now)

    async def begin(self) -> None:
        """Count one more request, until `end`. Raises ApiError 429 if the key is at one of its limits."""
        self.num_running += 1  # first: of two that begin at two ingresses, at least one sees the other
        try:
            await self._check_running()
            if self.requests is not None:
                await self._take("requests", 1, f"{self.key.requests_per_minute} requests per minute")
        except BaseException:
            self.num_running -= 1
            raise

    async def _check_running(self) -> None:
        most = self.key.max_concurrent_requests
        if most is None:
            return
        running = self.num_running
        if self.share > 1 and running <= most:
            loans = [] if self.ask_peers is None else await self.ask_peers(self.key.owner, "requests", 0.0)
            silent = self.share - 1 - len(loans)
            running = self.num_running + sum(loan.num_running for loan in loans) + silent * (most // self.share)
        if running > most:
            raise self._refusal(f"{most} requests at once", 1.0)

    def _bucket(self, unit: Unit) -> Bucket | None:
        return {"requests": self.requests, "tokens": self.tokens, "seconds": self.seconds}[unit]

    async def _take(self, unit: Unit, amount: float, limit: str) -> None:
        """Take an amount of a limited unit, if need be of what other ingresses lend. Raises ApiError 429 for a lack."""
        bucket = self._bucket(unit)
        assert bucket is not None
        bucket.fill(self.clock())
        if bucket.level < amount - _ROUNDING:
            await self._borrow(bucket, unit, amount)
        if bucket.level < amount - _ROUNDING:
            raise self._refusal(limit, bucket.seconds_until(amount))
        bucket.level -= amount

    def end(self) -> None:
        self.num_running -= 1

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs and no limit is used: a new account would be equal."""
        now = self.clock()
        for bucket in (self.requests, self.tokens, self.seconds, self.reads):
            if bucket is not None:
                bucket.fill(now)
                if bucket.level < bucket.capacity:
                    return False
        return self.num_running == 0

    def read(self) -> None:
        """Count a request that computes nothing. Raises ApiError 429 if there were too many."""
        self.reads.fill(self.clock())
        if self.reads.level < 1:
            raise self._refusal(f"{READS_PER_MINUTE} GET requests per minute", self.reads.seconds_until(1))
        self.reads.level -= 1

    async def _borrow(self, bucket: Bucket, unit: Unit, amount: float) -> None:
        """Take a bucket's missing amount from the other ingresses, and some more, so that few requests have to ask."""
        if self.ask_peers is None or self.clock() < self._ask_at:
            return
        each = amount - bucket.level + bucket.capacity / 2
        loans = await self.ask_peers(self.key.owner, unit, each)
        bucket.level += sum(loan.amount for loan in loans)
        if bucket.level < amount - _ROUNDING:
            self._ask_at = self.clock() + ASK_S

    def lend(self, unit: Unit, amount: float) -> Loan:
        """Lend another ingress its missing amount, as far as this ingress has so much."""
        bucket = self._bucket(unit)
        return Loan(0.0 if bucket is None else bucket.lend(amount, self.clock()), self.num_running)

    def check(self) -> None:
        """Raise ApiError 429 if there are no tokens, unless other ingresses may have some."""
        if self.tokens is not None and self.ask_peers is None:
            self.tokens.fill(self.clock())
            if self.tokens.level < 0:
                raise self._refusal(f"{self.key.tokens_per_minute} tokens per minute", self.tokens.seconds_until(0))

    async def reserve(self, num_prompt_tokens: int, num_output_tokens: int) -> int:
        """Take the tokens of prompts and, as far as the bucket can hold them, of their outputs. Returns how many.

        Raises ApiError 429 if fewer tokens are left.
        """
        if self.tokens is None:
            return 0
        limit = f"{self.key.tokens_per_minute} tokens per minute"
        capacity = self.tokens.capacity * (1 if self.ask_peers is None else self.share)
        if num_prompt_tokens > capacity:
            raise ApiError(
                f"This API key may use {limit}; the request has {num_prompt_tokens} in its prompt. Shorten it.",
                status=429,
                code="rate_limit_exceeded",
                headers=self.headers(),
            )
        own = math.floor(self.tokens.capacity)  # the largest reservation, except for a prompt of borrowed tokens
        num_tokens = min(num_prompt_tokens + num_output_tokens, max(num_prompt_tokens, own))
        await self._take("tokens", num_tokens, limit)
        return num_tokens

    async def reserve_seconds(self, num_tokens: int) -> float:
        """Take the seconds that so many tokens took recently, at most a minute's. Returns how many.

        Raises ApiError 429 if fewer are left. `Retry-After` is when there are as many.
        """
        if self.seconds is None:
            return 0.0
        seconds = min(self.price * num_tokens, self.seconds.capacity)
        await self._take("seconds", seconds, f"{self.key.seconds_per_minute:g} seconds per minute")
        return seconds

    def pay(self, seconds: float, num_tokens: int) -> None:
        """Learn what tokens take from an output that has ended, with its prompt."""
        price = seconds / max(num_tokens, 1)
        self.price += (price - self.price) * (_NEWEST_PRICE if self.price else 1.0)

    def charge(self, num_tokens: int) -> None:
        """Take tokens beyond what was reserved, or give back reserved ones (negative) that were not used."""
        if self.tokens is not None:
            self.tokens.level -= num_tokens

    def headers(self) -> dict[str, str]:
        """Return OpenAI's headers about the rest of each limit of the key."""
        now = self.clock()
        headers = {}
        limits = (self.key.requests_per_minute, self.key.tokens_per_minute)
        for name, limit, bucket in zip(("requests", "tokens"), limits, (self.requests, self.tokens), strict=True):
            if bucket is not None:
                bucket.fill(now)
                headers[f"x-ratelimit-limit-{name}"] = str(limit)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(int(bucket.level * self.share), 0))
                headers[f"x-ratelimit-reset-{name}"] = _duration(bucket.seconds_until(bucket.capacity))
        return headers

    def _share_of(self, limit: int) -> float:
        """Return this ingress's part of a limit; at least 1 where it cannot borrow what it lacks."""
        return math.ceil(limit / self.share) if self.ask_peers is None else limit / self.share

    def _refusal(self, limit: str, seconds: float) -> ApiError:
        retry_after = max(1, math.ceil(seconds))
        return ApiError(
            f"Rate limit reached: this API key may use {limit}. Try again in {_duration(seconds)}.",
            status=429,
            code="rate_limit_exceeded",
            headers={"Retry-After": str(retry_after), **self.headers()},
        )


@dataclass(slots=True, eq=False)
class Charge:
    """One HTTP request on the account of its key."""

    account: Account
    _num_reserved: int = 0  # tokens, not yet used
    _is_running: bool = False
    _reserved_s: float = 0.0  # taken from the key's seconds, less those that ended outputs were charged
    _unpaid: int = 0  # tokens of prompts and outputs that have not ended

    async def begin(self, is_read: bool) -> None:
        """Count the request, until `end`. `is_read`: it computes nothing. Raises ApiError 429 at a limit of the key."""
        if is_read:
            self.account.read()
        else:
            await self.account.begin()
            self._is_running = True

    def check(self) -> None:
        """Raise ApiError 429 if the key has no tokens left."""
        self.account.check()

    async def prompt(self, num_prompt_tokens: int, num_output_tokens: int = 0) -> None:
        """Charge the tokens of prompts, and reserve those of their outputs. Raises ApiError 429 if fewer are left."""
        self._num_reserved += await self.account.reserve(num_prompt_tokens, num_output_tokens)
        self._num_reserved -= num_prompt_tokens
        self._reserved_s += await self.account.reserve_seconds(num_prompt_tokens + num_output_tokens)
        self._unpaid += num_prompt_tokens

    def output(self, num_tokens: int) -> None:
        """Charge tokens that were generated."""
        reserved = max(min(num_tokens, self._num_reserved), 0)
        self._num_reserved -= reserved
        self._unpaid += num_tokens
        self.account.charge(num_tokens - reserved)

    def spent(self, seconds: float, num_tokens: int) -> None:
        """Pay the seconds that an ended output was charged, of `num_tokens` tokens with its prompt."""
        self.account.pay(seconds, num_tokens)
        self._reserved_s -= seconds
        self._unpaid = max(self._unpaid - num_tokens, 0)

    def end(self) -> None:
        """End the request: reserved tokens and seconds that it did not use are there for others. May be called twice.

        An output that ended early pays by its tokens: a client that leaves pays, too.
        """
        if self.account.seconds is not None:
            self.account.seconds.level += self._reserved_s - self.account.price * self._unpaid
        self._reserved_s = 0.0
        self._unpaid = 0
        if self._num_reserved > 0:
            self.account.charge(-self._num_reserved)
        self._num_reserved = 0
        if self._is_running:
            self._is_running = False
            self.account.end()

    def hand_over(self) -> "Charge":
        """Return a charge that takes this one's place, for work that goes on after the HTTP request."""
        taken = Charge(self.account, self._num_reserved, self._is_running, self._reserved_s, self._unpaid)
        self._num_reserved = 0
        self._is_running = False
        self._reserved_s = 0.0
        self._unpaid = 0
        return taken

    def headers(self) -> dict[str, str]:
        return self.account.headers()


class Ledger:
    """The accounts of all keys at one ingress."""

    def __init__(
        self,
        num_ingresses: int = 1,
        clock: Callable[[], float] = time.monotonic,
        ask_peers: AskPeers | None = None,
    ) -> None:
        """`ask_peers`: None where this ingress cannot ask the others, or is the only one."""
        self._num_ingresses = num_ingresses
        self._ask_peers = ask_peers if num_ingresses > 1 else None
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self._sweep_at = _FIRST_SWEEP

    def __len__(self) -> int:
        return len(self._accounts)

    def account(self, key: ApiKey) -> Account:
        """Return the key's account: a new one after a change of its limits, which does not count running requests."""
        known = self._accounts.get(key.owner)
        if known is None or known.key != key:
            if len(self._accounts) >= self._sweep_at:
                self._accounts = {name: account for name, account in self._accounts.items() if not account.is_idle}
                self._sweep_at = max(2 * len(self._accounts), _FIRST_SWEEP)
            known = self._accounts[key.owner] = Account(key, self._num_ingresses, self._clock, self._ask_peers)
        return known


def _duration(seconds: float) -> str:
    """Return a duration as OpenAI writes it: 20ms, 6s, 1m30s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
