"""One simulated replica whose steps are kept, for the scripts of this folder: what policies do with the same load."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from crossdock.cluster.bench.metrics import Sample
from crossdock.cluster.bench.workloads import Job, Role, Segment
from crossdock.cluster.simulate.fleet import describe
from crossdock.cluster.simulate.replica import SimulatedReplica
from crossdock.cluster.simulate.simulation import Simulation
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.cost.cost import StepCost, StepWork
from crossdock.workers.schedule.request.batch import Batch
from crossdock.workers.schedule.request.request import TokenDelta

LONGEST = 65_536  # tokens of a prompt and its output

POLICIES: Mapping[str, Mapping[str, Any]] = {
    "whole": {"enable_chunked_prefill": False, "mixed_chunks": False, "chunk_policy": "fixed"},
    "alternating": {"mixed_chunks": False, "chunk_policy": "fixed"},
    "mixed": {"chunk_policy": "fixed"},
    "adaptive": {"chunk_policy": "adaptive"},
}


class Ended(NamedTuple):
    """A step: when it ended, its predicted seconds and its work."""

    at: float
    seconds: float
    work: StepWork


@dataclass
class Played:
    """The requests and the steps of one run."""

    cost: StepCost
    depth: int  # stages of the pipeline
    samples: Sequence[Sample]
    steps: list[Ended] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Return the time from the first arrival to the last token."""
        return max(sample.ended for sample in self.samples)

    @property
    def tokens_per_s(self) -> float:
        """Return prompt and output tokens per second."""
        return sum(sample.prompt_tokens + sample.output_tokens for sample in self.samples) / self.seconds

    def gaps(self, role: Role) -> np.ndarray[Any, Any]:
        """Return the seconds between two tokens of all requests of a role."""
        return np.concatenate([sample.gaps for sample in self.samples if sample.role == role])

    def ttft(self, role: Role) -> list[float]:
        """Return the seconds to the first token of each request of a role."""
        return [sample.ttft for sample in self.samples if sample.role == role]

    def gap_p99(self) -> float:
        """Return the 99th percentile of the seconds between two tokens of all requests."""
        return float(np.percentile(np.concatenate([sample.gaps for sample in self.samples]), 99))

    def idle_share(self) -> float:
        """Return the share of the stages' time without work, until the last request has its first token.

        Stages are alike. Later the pipeline empties, which no policy can prevent.
        """
        until = max(sample.times[0] for sample in self.samples)
        busy = sum(step.seconds for step in self.steps if step.at <= until)
        return 1 - busy / self.depth / until

    def decode_seconds(self) -> float:
        """Return the seconds that a decoded token adds to its step, on average: beside a chunk, less than alone."""
        seconds = tokens = 0.0
        for step in self.steps:
            chunks = StepWork(step.work.prefill_tokens, step.work.attended, chunk_context=step.work.chunk_context)
            seconds += step.seconds - (self.cost.seconds(chunks) if chunks.prefill_tokens else 0.0)
            tokens += step.work.decodes
        return seconds / max(tokens, 1)

    def product_shares(self, window_s: float) -> list[float]:
        """Return, for each window of time, the share that the matrix products of its tokens take."""
        edges = np.arange(0.0, self.seconds + window_s, window_s)
        useful = np.zeros(len(edges))
        for step in self.steps:
            products = (step.work.prefill_tokens + step.work.decodes) * self.cost.per_prefill_token
            useful[int(step.at / window_s)] += products + step.work.attended * self.cost.per_attended
        return [float(share) for share in useful[:-2] / window_s]


class _Watched(Simulation):
    """A simulation that keeps its steps."""

    kept: list[Ended]
    cost: StepCost

    def stepped(self, replica: SimulatedReplica, batch: Batch, deltas: Sequence[TokenDelta], now: float) -> None:
        super().stepped(replica, batch, deltas, now)
        work = batch.work
        self.kept.append(Ended(now, self.cost.seconds(work), work))


def play(profile: SchedulingProfile, jobs: Sequence[Job], **engine: Any) -> Played:
    """Return the run of the jobs, in order of arrival, on a replica with these settings of its scheduler."""
    if not engine.get("enable_chunked_prefill", True):
        engine["max_num_batched_tokens"] = LONGEST + 256
    profile = profile.model_copy(update={"max_model_len": LONGEST, "num_pages": 60_000})
    pool = {"name": "mixed", "profile": profile, "enable_prefix_caching": False}
    pool["engine"] = {"admission": "queue", **engine}
    simulation = _Watched(describe({"pools": [pool], "latency_s": 0.0}), at_once=False)
    simulation.kept, simulation.cost = [], profile.cost
    outcome = simulation.run(jobs)
    return Played(profile.cost, profile.pipeline_parallel_size, outcome.samples, simulation.kept)


def job(number: int, prompt: int, output: int, due: float = 0.0, role: Role = "request") -> Job:
    """Return a request with a prompt of its own."""
    return Job((Segment(f"{role}/{number}", prompt),), output, due=due, role=role)
