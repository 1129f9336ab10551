"""The jobs of a benchmark as plain data, drawn from a seed or read from a trace. No network.

A prompt is a chain of segments. A segment's key alone decides its text, so two prompts share a prefix exactly when they
start with the same segments: that is how unique prompts, shared prefixes and a Mooncake trace's block hashes are made.
"""

import csv
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Literal

from crossdock.cluster.bench.pictures import DrawnPicture

Role = Literal["request", "stream", "short", "long"]

MOONCAKE_BLOCK_TOKENS = 512  # one entry of hash_ids, https://github.com/kvcache-ai/Mooncake (FAST'25 traces)

# Short common words: with a leading space nearly every one is a single token in nearly every vocabulary, so that a
# prompt sent as text is close to the length asked for.
_WORD_TEXT = """
able about above across add after again against age agree air all allow alone along also always among animal answer
any appear area arm army around art ask away baby back bad ball bank base be bear beat beauty bed before begin
behind believe best better between big bird black blood blue board boat body bone book born both bottom box boy
break bright bring brother brown build burn busy but buy call came can capital car card care carry case cat catch
cause center chair change chart check child choose church city claim class clean clear climb clock close clothes
cloud coast coat cold color come common company complete consider contain control cook cool copy corn corner correct
cost count country course cover cow create crop cross crowd cry current cut dad dance danger dark day dead deal dear
death decide deep degree design desert develop did different direct discuss distance divide doctor does dog dollar
door double down draw dream dress drink drive drop dry during each ear early earth ease east eat edge effect egg
eight either electric else end enemy energy engine enough enter equal even evening event ever every exact example
except expect experience experiment eye face fact fair fall family famous far farm fast fat father favor fear feed
feel feet fell few field fight figure fill final find fine finger finish fire first fish fit five flat floor flow
flower fly follow food foot force forest form forward four fraction free fresh friend from front fruit full fun game
garden gas general gentle
"""
WORDS = tuple(_WORD_TEXT.split())


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a prompt. In one run a key has one text; a shorter segment is a prefix of a longer one."""

    key: str
    tokens: int
    is_answer: bool = False  # the server's own answer to the job that has this key as its `answer`


@dataclass(frozen=True, slots=True)
class Job:
    """One request to send. `due`: seconds after the start; None: as soon as a slot is free (closed loop)."""

    prompt: tuple[Segment, ...]
    output_tokens: int
    due: float | None = None
    role: Role = "request"
    service_tier: str | None = None  # the SLO class it asks for
    tenant: str | None = None  # who sends it; None: tenants are not told apart
    weight: float = 1.0  # of that tenant
    pictures: tuple[DrawnPicture, ...] = ()  # before the prompt's text; such a request is a chat
    answer: str | None = None  # the key under which later prompts repeat its answer
    follow_ups: "tuple[FollowUp, ...]" = field(default=(), repr=False, compare=False)  # sent after its end

    @property
    def prompt_tokens(self) -> int:
        return sum(segment.tokens for segment in self.prompt)


@dataclass(frozen=True, slots=True)
class FollowUp:
    """A job that is sent `pause_s` seconds after the end of another."""

    pause_s: float
    job: Job


@dataclass(frozen=True, slots=True)
class Shape:
    """The defaults of a workload: lengths in tokens, number of requests and of slots."""

    prompt_tokens: int
    output_tokens: int
    num_requests: int
    concurrency: int
    prefix_tokens: int = 0  # shared by all prompts
    pictures: int = 0  # of a request
    picture_size: int = 512  # pixels on a side


SHAPES = {
    "chat": Shape(prompt_tokens=128, output_tokens=64, num_requests=64, concurrency=8),
    "shared-prefix": Shape(prompt_tokens=64, output_tokens=32, num_requests=16, concurrency=4, prefix_tokens=2048),
    "prefill": Shape(prompt_tokens=2048, output_tokens=1, num_requests=8, concurrency=1),
    "images": Shape(prompt_tokens=64, output_tokens=32, num_requests=16, concurrency=4, pictures=1),
    # The streams of the interference workload; its long prompts are an Interference. The output is long so that it
    # outlasts the long prompts: the client closes the streams after the last of them.
    "interference": Shape(prompt_tokens=128, output_tokens=4096, num_requests=4, concurrency=4),
    # The short requests of short-vs-long, one every `short_interval`; its long prompts are an Interference.
    "short-vs-long": Shape(prompt_tokens=64, output_tokens=8, num_requests=1, concurrency=1),
}
WORKLOADS = (*SHAPES, "mix", "agents", "trace")


@dataclass(frozen=True, slots=True)
class Interference:
    """Long prompts that arrive one after the other while streams decode or short requests arrive."""

    long_prompts: int = 4
    long_prompt_tokens: int = 4096
    long_output_tokens: int = 4
    long_pictures: int = 0  # of a long prompt, before its text
    picture_size: int = 512  # pixels on a side
    interval: float = 1.0  # seconds from the end of one long prompt to the arrival of the next
    quiet: float = 4.0  # seconds measured before the first long prompt
    established_tokens: int = 4  # a stream with this many tokens is established
    short_interval: float = 0.5  # seconds from one short request to the next
    service_tier: str | None = None  # of the long prompts

    def jobs(self) -> Iterator[Job]:
        for i in range(self.long_prompts):
            prompt = (Segment(f"long/{i}", self.long_prompt_tokens),)
            pictures = _drawn(f"long/{i}", self.long_pictures, self.picture_size)
            yield Job(prompt, self.long_output_tokens, role="long", service_tier=self.service_tier, pictures=pictures)


def shaped_jobs(shape: Shape, role: Role = "request", name: str = "unique") -> Iterator[Job]:
    """Yield jobs of one shape without end. Prompts share the shape's prefix and nothing more."""
    prefix = (Segment("prefix", shape.prefix_tokens),) if shape.prefix_tokens else ()
    for i in itertools.count():
        prompt = (*prefix, Segment(f"{name}/{i}", shape.prompt_tokens))
        pictures = _drawn(f"{name}/{i}", shape.pictures, shape.picture_size)
        yield Job(prompt, shape.output_tokens, role=role, pictures=pictures)


def _drawn(name: str, count: int, size: int) -> tuple[DrawnPicture, ...]:
    return tuple(DrawnPicture(f"{name}/{number}", size) for number in range(count))


def arrival_times(rate: float, rng: random.Random, burstiness: float = 1.0) -> Iterator[float]:
    """Yield arrival times in seconds without end, at `rate` per second on average. The first is at 0.

    `burstiness` is the shape of the gamma distribution of the times between arrivals, as in vLLM's benchmark: 1 is a
    Poisson process, less comes in bursts (the coefficient of variation is 1/sqrt(burstiness)), more is more even.

    Raises:
        ValueError: the rate or the burstiness is not above 0.
    """
    for name, value in (("request rate", rate), ("burstiness", burstiness)):
        if not value > 0:
            raise ValueError(f"{name}: must be above 0, got {value}")
    now = 0.0
    while True:
        yield now
        now += rng.gammavariate(burstiness, 1 / (rate * burstiness))


def at_rate(jobs: Iterator[Job], rate: float, seed: int, burstiness: float = 1.0) -> Iterator[Job]:
    """Yield the jobs, due at arrival times that depend on the seed alone."""
    arrivals = arrival_times(rate, random.Random(f"arrivals/{seed}"), burstiness)
    return (replace(job, due=due) for job, due in zip(jobs, arrivals, strict=False))


def read_trace(path: Path, *, speed: float = 1.0, length_scale: float = 1.0) -> list[Job]:
    """Return the jobs of a recorded trace in order of arrival, the first due at 0.

    Args:
        path: JSONL with `timestamp` (ms), `input_length`, `output_length` and optionally `hash_ids` (Mooncake), or
            the Azure LLM inference CSV with TIMESTAMP, ContextTokens, GeneratedTokens.
        speed: 2 replays the trace in half the time.
        length_scale: multiplies all lengths, so that a trace of a large model fits a small one's context.

    Raises:
        ValueError: the message names the file and line that cannot be read.
    """
    for name, value in (("trace speed", speed), ("length scale", length_scale)):
        if not value > 0:
            raise ValueError(f"{name}: must be above 0, got {value}")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise ValueError(f"trace: cannot read {path}: {error.strerror}") from None
    first = next((line for line in lines if line.strip()), "")
    parse = _mooncake_job if first.lstrip().startswith("{") else _azure_job
    header: list[str] = []
    timed: list[tuple[float, Job]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if parse is _azure_job and not header:
            header = [name.strip() for name in next(csv.reader([line]))]
            continue
        try:
            timed.append(parse(number, line, header, length_scale))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"trace: {path} line {number}: {type(error).__name__}: {error}") from None
    if not timed:
        raise ValueError(f"trace: {path} holds no requests")
    timed.sort(key=lambda entry: entry[0])
    start = timed[0][0]
    return [replace(job, due=(at - start) / speed) for at, job in timed]


def _scaled(length: object, scale: float) -> int:
    if isinstance(length, bool) or not isinstance(length, int | str):
        raise ValueError(f"a length must be a whole number, got {length!r}")
    return max(1, round(int(length) * scale))  # a request of no tokens does not exist


def _mooncake_job(number: int, line: str, header: list[str], scale: float) -> tuple[float, Job]:
    record = json.loads(line)
    tokens = _scaled(record["input_length"], scale)
    prompt: list[Segment] = []
    left = tokens
    for hash_id in record.get("hash_ids") or ():
        if left > 0:
            prompt.append(Segment(f"hash/{hash_id}", min(left, _scaled(MOONCAKE_BLOCK_TOKENS, scale))))
            left -= prompt[-1].tokens
    if left > 0:  # no hash ids, or what rounding left over
        prompt.append(Segment(f"line/{number}", left))
    return float(record["timestamp"]) / 1000, Job(tuple(prompt), _scaled(record["output_length"], scale))


def _azure_job(number: int, line: str, header: list[str], scale: float) -> tuple[float, Job]:
    record = dict(zip(header, next(csv.reader([line])), strict=True))
    prompt = (Segment(f"line/{number}", _scaled(record["ContextTokens"], scale)),)
    at = datetime.fromisoformat(record["TIMESTAMP"].strip()).timestamp()
    return at, Job(prompt, _scaled(record["GeneratedTokens"], scale))
