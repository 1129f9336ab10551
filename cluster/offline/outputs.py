"""The answers of `LLM`: objects with the names of vLLM's."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from crossdock.cluster.api.text.choices import Choice, Output
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.workers.schedule.request.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a token at one position. `rank`: 1 is the likeliest."""

    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclass(slots=True)
class CompletionOutput:
    """One output of a prompt. `logprobs`: by position, of the token and its alternatives, by token id."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None  # of all tokens; None: no log-probabilities are asked for
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # stop or length
    stop_reason: int | str | None = None  # the stop string or stop token id that ended the output

    def finished(self) -> bool:
        """Return whether the output has ended, as all outputs of `LLM` have."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its `n` outputs. `prompt_logprobs`: as in outputs; None at the first token."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = True
    num_cached_tokens: int = 0


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """A prompt and its vector."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(slots=True)
class ClassificationOutput:
    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ClassificationRequestOutput:
    """A prompt and the probability of each label."""

    request_id: str
    outputs: ClassificationOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(slots=True)
class ScoringOutput:
    score: float


@dataclass(slots=True)
class ScoringRequestOutput:
    """A pair of texts and its score."""

    request_id: str
    outputs: ScoringOutput
    finished: bool = True


class OutputWriter:
    """Makes the objects of one model, whose tokenizer writes the tokens of log-probabilities."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}  # of tokens

    def request(
        self, request_id: str, prompt: str | None, choices: Sequence[Choice], outputs: Sequence[Output]
    ) -> RequestOutput:
        """Return the answer to one prompt."""
        first = outputs[0]
        before = first.prompt_logprobs
        return RequestOutput(
            request_id,
            prompt,
            choices[0].prompt.token_ids,
            None if before is None else [None if each is None else self._position(each) for each in before],
            [self._output(output) for output in outputs],
            num_cached_tokens=choices[0].num_cached_tokens,
        )

    def _output(self, output: Output) -> CompletionOutput:
        positions = [position for _, position in output.positions if position is not None]
        has_logprobs = bool(positions)
        return CompletionOutput(
            output.index,
            output.text,
            output.token_ids,
            sum(position.logprob for position in positions) if has_logprobs else None,
            [self._position(position) for position in positions] if has_logprobs else None,
            output.finish_reason,
            output.stop_reason,
        )

    def _position(self, position: TokenLogprobs) -> dict[int, Logprob]:
        """Return the log-probabilities at one position. The likeliest alternatives have the ranks 1, 2, …"""
        found = {position.token_id: Logprob(position.logprob, position.rank, self._text(position.token_id))}
        for rank, (token_id, logprob) in enumerate(position.top, 1):
            found.setdefault(token_id, Logprob(logprob, rank, self._text(token_id)))
        return found

    def _text(self, token_id: int) -> str:
        if token_id not in self._texts:
            self._texts[token_id] = self._tokenizer.decode([token_id])
        return self._texts[token_id]
