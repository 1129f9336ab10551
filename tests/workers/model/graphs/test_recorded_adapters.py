"""Steps with adapters as recorded steps: the same tokens as PEFT's, from fixed addresses, and no step kernel by kernel.

Adapters are computed in Triton, interpreted.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from crossdock.kernels.packages import triton_is_interpreted
from crossdock.workers.model.graphs.decode_graphs import DecodeGraphs
from crossdock.workers.model.graphs.mixed_graphs import MixedGraphs
from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.runner import Runner
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.schedule.request.batch import Batch, Scheduled
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.submission import SamplingParams, Submission
from tests.workers.architectures import build
from tests.workers.lora_oracle import tuned
from tests.workers.replica.engine.test_adapters import PROMPTS, add, base_tokens, engine_of
from tests.workers.replica.engines import run, tokens_of

pytestmark = pytest.mark.skipif(not triton_is_interpreted(), reason="needs Triton, interpreted: pip install triton")
NUM_SEQS, NUM_TOKENS = 4, 24
_NEW = 3  # tokens of each request: Triton's interpreter takes long for a step


def recorded(engine: Engine, in_triton: bool = True) -> Runner:
    """Return a runner whose steps are recorded, as on a GPU: a replay calls the same function again."""
    assert engine.model.adapters is not None
    engine.model.adapters.in_triton = in_triton
    decodes = DecodeGraphs(engine.model, 16, NUM_SEQS, lambda run: run)
    mixed = MixedGraphs(engine.model, 16, NUM_SEQS, NUM_TOKENS, lambda run: run)
    return Runner(engine.model, 16, None, [decodes, mixed])


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, bool]]:
    """Count how steps are run, and whether a sequence of theirs has an adapter."""
    found: Counter[tuple[str, bool]] = Counter()
    for kind, owner in (("decodes", DecodeGraphs), ("mixed", MixedGraphs), ("eager", StepInputs)):
        method = owner.run

        def noted(self: Any, *args: Any, kind: str = kind, method: Any = method) -> Tensor:
            inputs = self if isinstance(self, StepInputs) else args[0]
            found[kind, bool(inputs.adapters)] += 1
            return method(self, *args)  # type: ignore[no-any-return]

        monkeypatch.setattr(owner, "run", noted)
    return found


def test_recorded_steps_give_each_request_its_adapters_tokens(
    kinds: Counter[tuple[str, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come and go, and more adapters than slots take turns: a graph must not add an earlier step's adapters.

    `others` changes other linears than `plain`, so blocks of rows find no matrices in some of them.
    """
    module = build("llama", {"num_hidden_layers": 2})
    plain = tuned(module, tmp_path / "plain", 1)
    others = tuned(module, tmp_path / "others", 2, r=6, target_modules=["q_proj", "down_proj"])
    third = tuned(module, tmp_path / "third", 3, target_modules=["v_proj", "o_proj"])
    seen = set[tuple[int, ...]]()
    forward = LoadedModel.forward

    def watched(self: LoadedModel, *args: Any) -> Tensor:
        adapters = args[-1]
        if adapters is not None:
            assert not adapters.groups, "a graph reads no adapter of the step that was recorded"
            rows = adapters.in_triton
            parts = rows._tables, rows._rows, rows._owners
            seen.add((len(args[0]), len(rows._rows), *(part.data_ptr() for part in parts)))
        return forward(self, *args)

    monkeypatch.setattr(LoadedModel, "forward", watched)
    engine = engine_of(module, max_loras=2, max_num_batched_tokens=NUM_TOKENS + NUM_SEQS, max_num_seqs=NUM_SEQS)
    engine.pipeline.runner = recorded(engine)
    wanted = {}
    for number, (one, at) in enumerate([(plain, 3), (None, 2), (others, 0), (third, 2), (None, 0)]):
        add(engine, f"{number}", PROMPTS[at], one.adapter if one else None, _NEW)
        wanted[f"{number}"] = one.greedy(PROMPTS[at], _NEW) if one else base_tokens(module, PROMPTS[at], _NEW)
    deltas = run(engine)
    assert {name: tokens_of(found) for name, found in deltas.items()} == wanted
    assert wanted["0"] != base_tokens(module, PROMPTS[3], _NEW), "the adapter changes tokens"
    assert kinds["decodes", True]
    assert kinds["mixed", True]
    assert not kinds["eager", True]
    by_rows = Counter(rows for rows, *_ in seen)
    assert all(count <= 2 for count in by_rows.values()), "one of decodes, one with chunks: " + str(seen)


def test_adapters_that_torch_computes_are_not_recorded(tmp_path: Path) -> None:
    """As on a GPU without Triton's attention. Their steps are no measure for those that are recorded."""
    engine = engine_of(build("llama", {}))
    one = tuned(build("llama", {}), tmp_path / "one", 1)
    request = Request(Submission("a", [5] * 9, SamplingParams(), adapter=one.adapter))
    plain = Request(Submission("b", [5] * 9, SamplingParams()))

    def step(request: Request) -> StepInputs:
        return StepInputs.of(Batch([Scheduled(request, 8, 1, [1], True)], 1), 16)[0]

    for in_triton in (False, True):
        runner = recorded(engine, in_triton)
        assert runner._graphs_for(step(plain)) is runner.graphs[0]
        assert (runner._graphs_for(step(request)) is not None) is in_triton
        assert runner.is_usual(step(request)) is in_triton
