"""The nouns that all rooms use: a request, made from a submission, and the tokens that it gets."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import NamedTuple

from msgspec import Struct

from crossdock.workers.schedule.cost.cost import NO_ADAPTERS, AdapterWork
from crossdock.workers.schedule.request.coming_pages import ComingPages
from crossdock.workers.schedule.request.items import Item
from crossdock.workers.schedule.request.page_hashes import PageHash, hash_pages
from crossdock.workers.schedule.request.submission import Adapter, Leg, SamplingParams, Submission


class Status(Enum):
    """Where a request stands. Only workers/schedule/table.py changes it."""

    WAITING = "waiting"  # holds no pages
    RUNNING = "running"  # holds pages for all its tokens, prefilling or decoding
    HELD = "held"  # holds pages that are being transferred, in or out; nothing is computed
    FINISHED = "finished"  # holds no pages any more


class FinishReason(Enum):
    """Why a request ended: the values of OpenAI's `finish_reason`, and four that no client sees under this name."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    SHIPPED = "shipped"  # ended here only: another replica has its pages and continues
    RETURNED = "returned"  # ended here only, to make way for a more urgent request: the router places it again


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the token, with its rank (1 is likeliest), and of alternatives."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), likeliest first; or as in `logprob_token_ids`

    @property
    def is_finite(self) -> bool:
        """Return whether no number is NaN or infinity. Minus infinity is the log-probability of a masked token."""
        return self.logprob < inf and all(logprob < inf for _, logprob in self.top)


class TokenDelta(Struct, gc=False, omit_defaults=True):
    """The tokens that one engine step adds to one request's output.

    A struct, because every stream needs a new one for each token.

    The first delta has `num_cached_tokens` and, if asked for, `prompt_logprobs` (None for the first prompt token) and
    `embedding`. The last one has `finish_reason`. `stop_token_id` is the token that ended the request, if one did; it
    is also the last of `token_ids`.
    """

    request_id: str
    token_ids: list[int]
    first: int = 0  # position of `token_ids[0]` in the output: after a failover some tokens may come twice
    epoch: int = 0  # of the placement that made the tokens
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    error: str | None = None  # with FinishReason.ERROR; see `failure_of`
    error_field: str = ""  # with `error`: the field of the request that is at fault; empty: the request is not
    is_not_finite: bool = False  # with `error`: the model computed NaN or infinity
    embedding: bytes | None = None  # the pooled hidden states, [E] float32 in little-endian order
    charged_s: float = 0.0  # with `finish_reason`: what the request was charged on this replica
    weights: str = ""  # name of the weights that made the tokens, where an update has replaced those of the start


class DraftCounts(NamedTuple):
    """How many of a request's drafts steps have verified, and how many of these they accepted."""

    drafted: int = 0
    accepted: int = 0

    def plus(self, drafted: int, accepted: int) -> "DraftCounts":
        """Return the counts with those of one more step."""
        return DraftCounts(self.drafted + drafted, self.accepted + accepted)


NO_DRAFTS = DraftCounts()


@dataclass(slots=True, eq=False)
class Request:
    """A submission and how far the engine has come with it.

    There is no prefill phase: each step computes tokens until `num_computed_tokens` equals `num_tokens`. Only
    workers/schedule changes a request. What the client and the ingress ask for stands in `submission`. Fields with the
    names of its fields are copies, because steps read them often; of these, only `leg` changes.
    """

    submission: Submission
    arrival_time: float = 0.0  # seconds, on the scheduler's clock
    id: str = field(init=False)
    epoch: int = field(init=False)
    sampling: SamplingParams = field(init=False)
    tenant: str = field(init=False)
    items: Sequence[Item] = field(init=False)
    adapter: Adapter | None = field(init=False)
    leg: Leg = field(init=False)  # the submission's, until the other replica is lost
    num_prompt_tokens: int = field(init=False)
    coming: ComingPages = field(default_factory=ComingPages)  # from elsewhere; workers/schedule/prefixes changes it
    priority: int = 0  # of its class; 0 is the most urgent
    aged_rest: float = 0.0  # of the prompt; the smallest goes first, see workers/schedule/policies/order.py
    queued_at: float = 0.0  # when the request last began to wait: at arrival, or when preempted
    due: float = 0.0  # of a stream: when its next token is due
    paced_from: float | None = None  # of a stream: one `tpot_s` per token made, before its first token here was made
    ttft_deadline: float = 0.0  # seconds after arrival by which its class promises the first token
    predicted_ttft: float | None = None  # seconds, as predicted on arrival
    expected_cached_tokens: int = 0  # while waiting: tokens found at the last look into the prefix index
    status: Status = Status.WAITING
    owner: str = field(init=False)  # of its pages; differs by attempt: a failed one may own pages when the next begins
    is_offered: bool = False  # of Leg.RECEIVE: the other replica has pages for the prompt and may compute at once
    finish_reason: FinishReason | None = None
    token_ids: list[int] = field(init=False)  # prompt and output
    most_tokens: int = field(init=False)  # prompt and output, as far as `sampling` says
    stop_token_ids: frozenset[int] = field(init=False)  # of `sampling`, which may list thousands
    needs_whole_prompt: bool = field(init=False)  # of `sampling`: cached pages are of no use
    num_computed_tokens: int = 0  # tokens whose keys and values are in pages
    num_verified_tokens: int = 0  # accepted tokens after these whose recurrent state was lost with a rejected draft
    num_in_flight_tokens: int = 0  # the tokens after the computed ones, in steps that have not ended
    num_cached_tokens: int = 0  # computed tokens found in the prefix index at first admission
    num_preemptions: int = 0
    charged_s: float = 0.0  # predicted seconds that were charged to its tenant
    drafts: DraftCounts = NO_DRAFTS
    page_hashes: list[PageHash] = field(default_factory=list)  # of the full pages of token_ids, as far as computed

    def __post_init__(self) -> None:
        submission = self.submission
        self.id = submission.id
        self.epoch = submission.epoch
        self.sampling = submission.sampling
        self.tenant = submission.tenant
        self.items = submission.items
        self.adapter = submission.adapter
        self.leg = submission.leg
        self.num_prompt_tokens = len(submission.prompt_token_ids)
        self.token_ids = [*submission.prompt_token_ids, *submission.output_token_ids]
        self.most_tokens = self.num_prompt_tokens + self.sampling.max_tokens
        self.stop_token_ids = frozenset(self.sampling.stop_token_ids)
        self.needs_whole_prompt = self.sampling.needs_whole_prompt
        self.owner = self.owner_name(self.id, self.epoch)

    @property
    def slo_class(self) -> str:
        return self.submission.slo_class

    @property
    def urgency(self) -> tuple[int, int]:
        """Return the priority of the class and the request's own in that class. The lower value is more urgent."""
        return (self.priority, self.submission.priority_in_class)

    @staticmethod
    def owner_name(request_id: str, epoch: int) -> str:
        """Return the `owner` of a request by its id and epoch."""
        return f"{request_id}#{epoch}"

    def prefix_hashes(self, num_tokens: int, page_size: int) -> Sequence[PageHash]:
        """Return the hashes of the full pages among the first `num_tokens` tokens; each page is hashed once."""
        if len(self.page_hashes) < self.num_tokens // page_size:
            salt = self.submission.page_salt
            self.page_hashes = hash_pages(self.token_ids, page_size, salt, self.page_hashes, self.items)
        return self.page_hashes[: num_tokens // page_size]

    @property
    def adapter_weights(self) -> int:
        """Return the numbers in the matrices of its adapter; 0: it has none."""
        return 0 if self.adapter is None else self.adapter.num_weights

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_scheduled_tokens(self) -> int:
        """Return the number of computed tokens and tokens in flight: the next step begins after them."""
        return self.num_computed_tokens + self.num_in_flight_tokens

    @property
    def num_uncached_tokens(self) -> int:
        """Return the number of tokens left to schedule; before the start, less those expected in the prefix index.

        A step that runs ahead, or that has drafts, schedules tokens that are not known yet: then none is left.
        """
        return max(len(self.token_ids) - max(self.num_scheduled_tokens, self.expected_cached_tokens), 0)

    @property
    def is_decoding(self) -> bool:
        """Return whether all tokens but the newest are computed or verified, and the newest was sampled."""
        num_tokens = len(self.token_ids)  # not by the properties above: this runs for every request in every step
        num_left = num_tokens - self.num_computed_tokens - self.num_verified_tokens
        return num_left == 1 and num_tokens > self.num_prompt_tokens


def adapter_work(streams: Iterable[Request]) -> AdapterWork:
    """Return the numbers that adapters add to a step of one token of each stream."""
    own = [stream.adapter for stream in streams if stream.adapter]
    if not own:
        return NO_ADAPTERS
    each = {adapter.fingerprint: adapter.num_weights for adapter in own}
    return AdapterWork(sum(each.values()), sum([adapter.num_weights for adapter in own]))
