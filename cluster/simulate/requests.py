"""Simulated requests: their prompts of tokens and pictures, and their transfers on the way."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b

from crossdock.cluster.bench.metrics import Sample
from crossdock.cluster.bench.workloads import FollowUp, Job
from crossdock.cluster.simulate.device import TOKEN
from crossdock.router.request_life import RequestLife
from crossdock.router.turn_queue import TurnQueue
from crossdock.workers.schedule.request.items import Item
from crossdock.workers.schedule.request.submission import Adapter, SamplingParams, Submission

_ROW_SIDE = 28  # pixels on each side that one embedding token of Qwen2-VL stands for
_PLACEHOLDER = 2**32 - 2  # a token that no text has


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """One request of a client."""

    life: RequestLife
    sample: Sample
    follow_ups: Sequence[FollowUp]
    turns: TurnQueue  # of the suspect requests of its ingress
    untaken: set[tuple[str, int]] = field(default_factory=set)  # replicas and attempts whose submission is on its way
    is_watched: bool = False  # an event comes when its life may have to act without news


def token_ids(job: Job) -> list[int]:
    """Return a prompt that has an equal beginning with another exactly where their segments are equal.

    A part that is an answer has the tokens that a simulated model samples.
    """
    ids: list[int] = []
    for segment in job.prompt:
        if segment.is_answer:
            ids += [TOKEN] * segment.tokens
            continue
        digest = blake2b(segment.key.encode(), digest_size=8).digest()
        pair = [int.from_bytes(digest[:4]), int.from_bytes(digest[4:])]
        ids += (pair * (segment.tokens // 2 + 1))[: segment.tokens]
    return ids


def prompt_of(job: Job) -> tuple[list[int], list[Item]]:
    """Return the tokens of a job and its items: pictures before the text, each of as many rows as Qwen2-VL gives it.

    Two pictures are equal exactly where their keys are.
    """
    ids = list[int]()
    items = list[Item]()
    for picture in job.pictures:
        rows = max(round(picture.side / _ROW_SIDE) ** 2, 1)
        content_hash = blake2b(f"{picture.key}/{picture.side}".encode(), digest_size=16).digest()
        items.append(Item(len(ids), rows, rows, "image", content_hash))
        ids += [_PLACEHOLDER] * rows
    return ids + token_ids(job), items


def submission_of(name: str, job: Job, slo_class: str, adapter: Adapter | None) -> Submission:
    """Return a job as an ingress submits it."""
    tokens, items = prompt_of(job)
    return Submission(
        name,
        tokens,
        sampling(job.output_tokens),
        slo_class=slo_class,
        is_promised=job.service_tier is not None,  # as at the API
        tenant=job.tenant or "",
        weight=job.weight,
        items=items,
        adapter=adapter,
    )


@cache
def sampling(max_tokens: int) -> SamplingParams:
    """Return the parameters of an output of exactly so many tokens."""
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)
