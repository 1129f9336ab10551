"""A submission: one request as an ingress sends it to a replica, and the two ways in which a replica refuses it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from crossdock.workers.schedule.request.items import NO_ITEMS, Item
from crossdock.workers.schedule.request.slo import DEFAULT_CLASS

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]


class Overloaded(RuntimeError):
    """The request's class promises a first token sooner than the backlog allows.

    `retry_after`: predicted seconds until the same request would be admitted.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message, retry_after)  # both, because an exception crosses processes as type(*args)
        self.retry_after = retry_after

    @classmethod
    def late(cls, slo_class: str, promised: float, late: float) -> "Overloaded":
        """Return the refusal of a request whose first token would come `late` seconds after the `promised` ones."""
        return cls(
            f"the first token would come in {promised + late:.1f} s; class {slo_class!r} promises {promised:.1f} s. "
            f"Retry in {late:.1f} s, ask for a less urgent class, or name none and wait",
            retry_after=late,
        )

    def __str__(self) -> str:
        return str(self.args[0])


class InvalidField(ValueError):
    """A request that can never be served. `field`: the field at fault, such as `prompt` or `grammar`."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message, field)  # both: an exception crosses processes as type(*args)
        self.field = field

    def __str__(self) -> str:
        return str(self.args[0])


class Leg(Enum):
    """A replica's part of a request. Changes to `LOCAL` when the other replica is lost."""

    LOCAL = "local"  # prompt and all tokens
    SEND = "send"  # prompt and first token; the pages go to another replica
    RECEIVE = "receive"  # everything after the first token, on pages that another replica fills


# In a JSON schema within a grammar in Lark: true where only properties that the schema declares may be generated.
# Schemas of the kind `json_schema` are always read so.
CLOSED = "x-closed"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the output: `kind` is `json_object`, `json_schema`, `regex`, `choice` or `lark`."""

    kind: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter as an ingress names it. Replicas read its files."""

    name: str  # the name that clients ask for
    path: str  # of the folder with its files
    fingerprint: str  # a hash of these files: equal for equal weights, whatever name and path are
    num_weights: int = 0  # numbers in its matrices: a row takes as many products more


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Names and meanings as in vLLM; the ingress checks every value."""

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
    bad_words: tuple[tuple[int, ...], ...] = ()  # the output never has the tokens of one in a row
    logprobs: int | None = None  # alternatives beside the chosen token; 0 is the chosen token alone
    logprob_token_ids: tuple[int, ...] = ()  # the alternatives, instead of the likeliest; needs `logprobs`
    prompt_logprobs: int | None = None  # likewise, for the tokens of the prompt
    logprobs_mode: LogprobsMode = "raw_logprobs"  # processed: after everything that decides the drawn token
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    seed: int = 0  # always set: the ingress draws one if the client gave none
    grammar: Grammar | None = None
    pooling: str | None = None
    """The prompt's vector is wanted: of its `last` token, or the `mean` of all; of text encoders also of the first,
    `cls`, or the numbers of its `labels`."""

    @property
    def needs_whole_prompt(self) -> bool:
        """Return whether every token of the prompt has to be computed, so that cached pages are of no use."""
        return self.prompt_logprobs is not None or self.pooling == "mean"


@dataclass(frozen=True, slots=True)
class Submission:
    """One request as an ingress sends it to a replica."""

    id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str = ""  # only requests with the same salt share cached pages
    slo_class: str = DEFAULT_CLASS
    priority_in_class: int = 0  # of the client; lower goes first among the requests of one class
    is_promised: bool = True  # False: no client asked for the class, and no replica refuses the request as late
    request_id: str = ""  # the client's name for the HTTP request that this is a part of
    key_owner: str = ""  # who may ask about the request; a name that does not reveal the API key
    tenant: str = ""  # the tenant whose share of the replicas' time the request uses; empty: tenants are not told apart
    weight: float = 1.0  # of that tenant: shares are in proportion
    output_token_ids: Sequence[int] = ()  # tokens the client has already, from a replica that was lost
    leg: Leg = Leg.LOCAL
    epoch: int = 0  # number of earlier attempts at this request
    peer: bytes = b""  # address of the replica that does the other leg, as it advertises it
    may_refuse: bool = True  # False once a replica has accepted the request: no later attempt is refused as too late
    waited_s: float = 0.0  # seconds since the first attempt: the request starves no later for being placed again
    start_s: float = 0.0  # seconds that it waited at the ingress until a replica of its model was up
    items: Sequence[Item] = NO_ITEMS  # pictures and videos in the prompt, by `start`
    source: bytes = b""  # address of a replica that has more of the prompt's prefix; empty: no page is fetched
    source_tokens: int = 0  # of the prefix that it has
    alternatives: Sequence[tuple[str, float]] = ()  # ways to use a cached prefix, with the router's predicted TTFT, s
    adapter: Adapter | None = None  # the adapter that changes the weights; None: the base model's weights
    second_text: int = 0  # the prompt token at which the second of two texts begins; 0: there is one, or none cares
    weights: str = ""  # id of the update with whose weights alone a replica may take the request

    @property
    def page_salt(self) -> str:
        """Return the salt of the request's pages: only requests with equal salts and equal weights share pages.

        What computes the pages, an adapter or an update's weights, stands before a character 0. A client's salt that
        has such a character gets one more in front, so that it looks like neither.
        """
        salt = self.cache_salt
        if self.adapter is not None:
            salt = f"{self.adapter.fingerprint}\0{salt}"
        elif "\0" in salt:
            salt = f"\0{salt}"
        return f"weights {self.weights}\0{salt}" if self.weights else salt
