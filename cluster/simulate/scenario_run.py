"""A run of the real scheduler in a scenario of the simulator's page, with all its steps.

Run as `python -m` by the API: it reads scenarios from stdin and answers each from a child that has limits.
"""

from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np

from crossdock.cluster.bench.workloads import Job, Role, Segment
from crossdock.cluster.simulate.fleet import SimulatedFleet, describe
from crossdock.cluster.simulate.replica import SimulatedReplica
from crossdock.cluster.simulate.scenario import Scenario
from crossdock.cluster.simulate.simulation import Simulation
from crossdock.workers.report.presets import preset
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.sandbox.limited_child import Limits, answer_all, sandbox_main
from crossdock.workers.sandbox.messages import read_message, write_message
from crossdock.workers.schedule.request.batch import Batch
from crossdock.workers.schedule.request.request import TokenDelta

_CONTEXT = 512  # tokens of a decode request's prompt
_MOST_STEPS = 1000  # from the arrival of the prompts on
_AROUND = 8  # steps before the arrival and after the last first token
_OUTPUT = 2 * _MOST_STEPS  # tokens: no request ends within a run
_TTFT_S = 10.0  # target of the class `standard`
_TOO_LARGE = "This scenario takes more time or memory than the simulator has."
_POLICIES: dict[str, dict[str, Any]] = {  # settings of the engine
    "adaptive": {},
    "fixed": {"chunk_policy": "fixed"},
    "alternating": {"chunk_policy": "fixed", "mixed_chunks": False},
    "whole": {"chunk_policy": "fixed", "enable_chunked_prefill": False},
}


def play(scenario: Scenario, profile: SchedulingProfile | None = None) -> dict[str, Any]:
    """Return the steps around the arrival of the prompts, and the latencies that follow from the steps, as JSON.

    Times are seconds from the first step shown. `is_cut`: the run ended before each prompt had its first token.
    """
    run = _Run(scenario, profile or preset(scenario.profile))
    jobs = [_job("stream", number, _CONTEXT) for number in range(scenario.num_streams)]
    run.run(jobs or run.prompts)
    return run.found()


def _job(role: Role, number: int, num_tokens: int) -> Job:
    return Job((Segment(f"{role}/{number}", num_tokens),), _OUTPUT, due=0.0, role=role)


def _fleet(scenario: Scenario, profile: SchedulingProfile) -> SimulatedFleet:
    """Return one replica with as much memory as the scenario needs."""
    longest = max(scenario.prompt_tokens, _CONTEXT) + _OUTPUT
    num_requests = scenario.num_streams + scenario.num_prompts
    most = longest + num_requests
    engine = {
        "max_num_batched_tokens": most if scenario.policy == "whole" else scenario.max_num_batched_tokens,
        "max_num_seqs": num_requests,
        "slo_classes": [{"name": "standard", "ttft_s": _TTFT_S, "tpot_s": scenario.tpot_s}],
        "admission": "queue",
        **_POLICIES[scenario.policy],
    }
    roomy = profile.model_copy(update={"role": "mixed", "max_model_len": longest, "max_num_batched_tokens": most})
    roomy = roomy.model_copy(update={"num_pages": roomy.needs.at_most(longest) * (num_requests + 1)})
    pool = {"name": "mixed", "profile": roomy, "engine": engine, "enable_prefix_caching": False}
    return describe({"pools": [pool], "latency_s": 0.0})


class _Run(Simulation):
    """A simulation that keeps each step, sends the prompts once all streams decode, and ends soon after them."""

    def __init__(self, scenario: Scenario, profile: SchedulingProfile) -> None:
        super().__init__(_fleet(scenario, profile), at_once=False)
        self.prompts = [_job("long", number, scenario.prompt_tokens) for number in range(scenario.num_prompts)]
        self._scenario = scenario
        self._steps = list[dict[str, Any]]()
        self._arrived: float | None = None if scenario.num_streams else 0.0
        self._since = 0  # steps since the arrival of the prompts
        self._left = _AROUND  # steps until the prompts arrive, and then until the end

    @property
    def _is_cut(self) -> bool:
        return not all(sample.times for sample in self._outcome.samples)

    def stepped(self, replica: SimulatedReplica, batch: Batch, deltas: Sequence[TokenDelta], now: float) -> None:
        """Keep a step that has ended. Send the prompts, or end the run, if this is the moment."""
        super().stepped(replica, batch, deltas, now)
        self._steps.append(self._shown(batch, now - replica.step_s, replica.step_s))
        self._since += self._arrived is not None
        self._left -= not self._is_cut or self._since >= _MOST_STEPS
        if self._left > 0:
            return
        if self._arrived is None:
            self._arrived, self._left = now, _AROUND
            for prompt in self.prompts:
                self._send(prompt, now)
        else:  # as an event: the replica that calls this begins its next step afterwards
            self.clock.at(now, lambda _: self.clock.stop())

    def _shown(self, batch: Batch, started: float, seconds: float) -> dict[str, Any]:
        chunks = [
            {
                "prompt": int(part.request.id) - self._scenario.num_streams + 1,
                "start": part.start,
                "num_tokens": part.num_tokens,
                "num_prompt_tokens": part.request.num_prompt_tokens,
                "reason": part.reason,
            }
            for part in batch.scheduled[batch.num_decodes :]
        ]
        counts = {"num_decodes": batch.num_decodes, "limit": batch.limit, "chunks": chunks}
        return {"started": started, "seconds": seconds, **counts}

    def found(self) -> dict[str, Any]:
        """Return the result."""
        arrived = self._arrived or 0.0
        steps = self._steps[-(self._since + _AROUND - 1) :]
        begin = steps[0]["started"]
        for number, step in enumerate(steps, 1):
            step |= {"number": number, "started": _micro(step["started"] - begin), "seconds": _micro(step["seconds"])}
        samples = self._outcome.samples
        prompts = samples[self._scenario.num_streams :]
        last = max((sample.times[0] for sample in prompts if sample.times), default=self.clock.now)
        streams = [np.asarray(sample.times) for sample in samples[: self._scenario.num_streams]]
        gaps = [np.diff(times)[(times[1:] > arrived) & (times[1:] <= last)] for times in streams]
        beside = np.concatenate(gaps) if gaps else np.empty(0)
        tpot = {f"p{q}": _micro(float(np.percentile(beside, q))) if beside.size else None for q in (50, 99, 100)}
        ttft = [_micro(sample.times[0] - arrived) if sample.times else None for sample in prompts]
        shown = {"arrived": _micro(arrived - begin), "steps": steps}
        return {**shown, "ttft_s": ttft, "tpot_s": tpot, "is_cut": self._is_cut}


def _micro(seconds: float) -> float:
    return round(seconds, 6)


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    profile = SchedulingProfile.model_validate(asked["profile"]) if asked["profile"] is not None else None
    return {"run": play(Scenario.model_validate(asked["scenario"]), profile)}


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer scenarios until `requests` ends."""
    if (settings := read_message(requests)) is not None:
        play(Scenario.model_validate({}))  # imports all that a child needs, which may open no file
        write_message(answers, {})
        answer_all(_answer, lambda failed: {"error": _TOO_LARGE}, requests, answers, Limits(**settings["limits"]))


if __name__ == "__main__":
    sandbox_main(serve)
