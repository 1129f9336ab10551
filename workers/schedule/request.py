"""The nouns everyone speaks: what a client asks for, what the engine knows of it, what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from crossdock.workers.schedule.pages import PageHash
from crossdock.workers.schedule.slo import DEFAULT_CLASS


class Overloaded(RuntimeError):
    """The request's class promises a first token sooner than the backlog allows. `retry_after`: seconds until the same
    request would be taken, by prediction."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message, retry_after)  # both: an exception crosses processes as type(*args)
        self.retry_after = retry_after

    def __str__(self) -> str:
        return str(self.args[0])


class InvalidField(ValueError):
    """A request that can never be served. `field`: the field at fault, in the words of `Submission`."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message, field)  # both: an exception crosses processes as type(*args)
        self.field = field

    def __str__(self) -> str:
        return str(self.args[0])


class Status(Enum):
    """Where a request stands. Only the scheduler changes it."""

    WAITING = "waiting"  # holds no pages
    RUNNING = "running"  # holds pages for every token it has, prefilling or decoding
    HELD = "held"  # holds pages, and computes nothing: their content is on its way in or out
    FINISHED = "finished"  # holds no pages and never will


class FinishReason(Enum):
    """Why a request ended; values are OpenAI's `finish_reason`, plus three that no client is told as such."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    SHIPPED = "shipped"  # here: another replica has its pages and goes on


class Leg(Enum):
    """Which part of a request a replica does. It changes to `LOCAL` when the other side is lost."""

    LOCAL = "local"  # all of it
    SEND = "send"  # its prompt and first token; the pages go to another replica
    RECEIVE = "receive"  # everything after the first token, on pages that another replica fills


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the output: `kind` is `json_object`, `json_schema`, `regex`, `choice` or `lark`."""

    kind: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Names and meanings as in vLLM; every value is checked at the ingress."""

    max_tokens: int = 16
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # empty allows all
    logprobs: int | None = None  # how many alternatives beside the chosen token; 0 is the chosen one alone
    prompt_logprobs: int | None = None  # likewise for the prompt's own tokens
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    seed: int = 0  # always set: the ingress draws one when the client gave none
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Submission:
    """One request as it crosses from an ingress to a replica."""

    id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str = ""  # requests share cached pages only under the same salt
    slo_class: str = DEFAULT_CLASS
    request_id: str = ""  # what the client calls the HTTP request that this is a part of
    tenant: str = ""  # who may ask what became of it; says nothing about the key it stands for
    output_token_ids: Sequence[int] = ()  # what its client has already: another replica began, and was lost
    leg: Leg = Leg.LOCAL
    epoch: int = 0  # of its placement: how often it has been placed before
    peer: bytes = b""  # of the replica that does the other leg, as that one advertises it


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token's own, its rank (1 is likeliest), and the likeliest alternatives."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), likeliest first


@dataclass(slots=True)
class TokenDelta:
    """What one engine step adds to one request's output.

    The first delta carries `num_cached_tokens` and, where asked for, `prompt_logprobs` (the first prompt token has
    None); the last carries `finish_reason`. `stop_token_id` is the token that ended the request, when one did: it is
    also the last of `token_ids`.
    """

    request_id: str
    token_ids: list[int]
    first: int = 0  # which of the output's tokens `token_ids[0]` is: after a failover some may come twice
    epoch: int = 0  # of the placement it comes from
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    error: str | None = None  # with FinishReason.ERROR


@dataclass(slots=True, eq=False)
class Request:
    """A submission and how far the engine has come with it.

    There is no prefill phase: each step hands out tokens until `num_computed_tokens` meets `num_tokens`. All but the
    scheduler read only.
    """

    id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    cache_salt: str = ""
    slo_class: str = DEFAULT_CLASS
    output_token_ids: Sequence[int] = ()  # made elsewhere, before it came here
    leg: Leg = Leg.LOCAL
    epoch: int = 0
    arrival_time: float = 0.0  # seconds, on the scheduler's clock
    priority: int = 0  # of its class, 0 the most urgent
    arrival_work: int = 0  # prompt tokens the scheduler had handed out when it came
    queued_at: float = 0.0  # when it last began to wait: at arrival, or when preempted
    due: float = 0.0  # of a stream: when its next token is promised
    patience: float = 0.0  # seconds within which its class promises its first token
    predicted_ttft: float | None = None  # seconds, as predicted when it came
    expected_cached_tokens: int = 0  # while it waits: what the prefix index held when last asked
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    token_ids: list[int] = field(init=False)  # prompt and output
    num_computed_tokens: int = 0  # tokens whose keys and values lie in pages
    num_in_flight_tokens: int = 0  # the ones after these, handed out to steps that have not ended
    num_cached_tokens: int = 0  # of these, how many the prefix index gave at first admission
    num_preemptions: int = 0
    page_hashes: list[PageHash] = field(default_factory=list)  # of the full pages of token_ids, as far as hashed

    def __post_init__(self) -> None:
        self.token_ids = [*self.prompt_token_ids, *self.output_token_ids]

    @classmethod
    def from_submission(cls, submission: Submission, now: float) -> "Request":
        return cls(
            id=submission.id,
            prompt_token_ids=list(submission.prompt_token_ids),
            sampling=submission.sampling,
            cache_salt=submission.cache_salt,
            slo_class=submission.slo_class,
            output_token_ids=submission.output_token_ids,
            leg=submission.leg,
            epoch=submission.epoch,
            arrival_time=now,
        )

    @property
    def owner(self) -> str:
        """Under what name it owns pages: a placement that failed may still hold some when the next one begins."""
        return f"{self.id}#{self.epoch}" if self.epoch else self.id

    @staticmethod
    def owner_name(request_id: str, epoch: int) -> str:
        return f"{request_id}#{epoch}" if epoch else request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens that have been handed out to steps: the next step begins after them."""
        return self.num_computed_tokens + self.num_in_flight_tokens

    @property
    def num_uncached_tokens(self) -> int:
        """Tokens that are left to hand out, or will be once it starts."""
        return len(self.token_ids) - max(self.num_scheduled_tokens, self.expected_cached_tokens)

    @property
    def is_decoding(self) -> bool:
        """All but the newest token computed, and that one was sampled: one more token continues the stream."""
        num_tokens = len(self.token_ids)  # not by the properties above: asked of every request in every step
        return num_tokens - self.num_computed_tokens == 1 and num_tokens > len(self.prompt_token_ids)
