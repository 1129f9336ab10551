"""Adapters in an engine's batches: tokens are those of PEFT, whatever else is in the batch."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.serving.model_start import check_adapters
from crossdock.workers.schedule.request.request import TokenDelta
from crossdock.workers.schedule.request.slo import DEFAULT_CLASS
from crossdock.workers.schedule.request.submission import Adapter, InvalidField, Submission
from tests.sweeps import rest_in_soak
from tests.waiting import eventually
from tests.workers.architectures import SERVED, build
from tests.workers.lora_oracle import greedy_of, tuned
from tests.workers.replica.engines import engine_on, greedy, run, tokens_of

PROMPTS = [[7, 3, 9, 11, 5], [20 + i for i in range(40)], [50, 4, 60], [9 + i % 3 for i in range(33)]]
SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}  # that fused layers take


def engine_of(module: Any, max_loras: int = 4, **config: Any) -> Engine:
    model = wrap_module(copy.deepcopy(module), LoadOptions(max_lora_rank=16, max_loras=max_loras))
    return engine_on(model, enable_lora=True, max_loras=max_loras, **config)


def add(
    engine: Engine,
    name: str,
    prompt: list[int],
    adapter: Adapter | None,
    num_tokens: int = 8,
    slo_class: str = DEFAULT_CLASS,
) -> None:
    engine.add(Submission(name, prompt, greedy(num_tokens), slo_class=slo_class, adapter=adapter))


def base_tokens(module: Any, prompt: list[int], num_tokens: int = 8) -> list[int]:
    @torch.inference_mode()
    def logits(token_ids: list[int]) -> Any:
        return module(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]

    return greedy_of(logits, prompt, num_tokens, module.config.eos_token_id)


@pytest.mark.parametrize("architecture", rest_in_soak(["llama", "qwen3", "gemma3_text"], "llama", "gemma3_text"))
def test_mixed_batch_with_chunks_gives_each_request_its_adapters_tokens(architecture: str, tmp_path: Path) -> None:
    module = build(architecture, SIZES)
    plain = tuned(module, tmp_path / "plain", 1)
    others = tuned(module, tmp_path / "others", 2, r=6, use_rslora=True, target_modules="all-linear")
    part = tuned(module, tmp_path / "part", 3, target_modules=r".*\.(q|down)_proj", rank_pattern={"q_proj": 2})
    engine = engine_of(module, max_num_batched_tokens=48, max_num_seqs=16)
    wanted = {}
    for number, one in enumerate([plain, None, others, part]):
        for prompt in PROMPTS:
            name = f"{number}-{len(prompt)}"
            add(engine, name, prompt, one.adapter if one else None)
            wanted[name] = one.greedy(prompt, 8) if one else base_tokens(module, prompt)
    deltas = run(engine)
    assert {name: tokens_of(found) for name, found in deltas.items()} == wanted
    assert len({tuple(tokens) for tokens in wanted.values()}) > len(PROMPTS), "the adapters change tokens"


def test_more_adapters_than_slots_take_turns(tmp_path: Path) -> None:
    module = build("llama", {})
    adapters = [tuned(module, tmp_path / f"{number}", number) for number in range(5)]
    engine = engine_of(module, max_loras=2, max_num_batched_tokens=64)
    for number, one in enumerate(adapters):
        add(engine, f"{number}", PROMPTS[1], one.adapter)
        add(engine, f"again {number}", PROMPTS[1], one.adapter)
    deltas = run(engine)
    for number, one in enumerate(adapters):
        assert tokens_of(deltas[f"{number}"]) == tokens_of(deltas[f"again {number}"]) == one.greedy(PROMPTS[1], 8)
    assert engine.model.adapters is not None
    assert len(engine.model.adapters.loaded) == 2, "the others have left"


def test_starving_request_gets_a_slot_although_requests_for_other_adapters_go_on_coming(tmp_path: Path) -> None:
    module = build("llama", {})
    busy, rare = (tuned(module, tmp_path / name, seed) for seed, name in enumerate(["busy", "rare"]))
    engine = engine_of(module, max_loras=1, max_num_seqs=4, starvation_s=5.0)
    now = [0.0]
    engine.clock = lambda: now[0]
    add(engine, "0", PROMPTS[0], busy.adapter)
    add(engine, "rare", PROMPTS[0], rare.adapter)
    output, number = list[int](), 0

    def step() -> bool:
        nonlocal number, output
        found = engine.step()
        for delta in found.deltas:
            output += delta.token_ids if delta.request_id == "rare" else []
        if found.batch:  # else nothing but a load is under way
            now[0] += 0.1
            number += 1
            if number % 3 == 0:  # before those that came earlier have ended
                add(engine, f"{number}", PROMPTS[0], busy.adapter)
        return len(output) == 8

    eventually(step)
    assert output == rare.greedy(PROMPTS[0], 8)
    assert number < 100, "requests of the other adapter made way"
    run(engine)


def test_equal_prompts_share_pages_under_one_adapter_alone(tmp_path: Path) -> None:
    module = build("llama", {})
    one, other = (tuned(module, tmp_path / name, seed) for seed, name in enumerate(["one", "other"]))
    renamed = Adapter("new name", one.adapter.path, one.adapter.fingerprint)
    engine, cached = engine_of(module, max_loras=1), []
    for number, adapter in enumerate([one.adapter, None, other.adapter, one.adapter, renamed, None]):
        add(engine, f"{number}", PROMPTS[1], adapter)
        cached.append(run(engine)[f"{number}"][0].num_cached_tokens)
    assert cached == [0, 0, 0, 32, 32, 32], "also after the adapter has left its slot and come back"


def test_preempted_stream_goes_on_with_its_adapter(tmp_path: Path) -> None:
    module = build("llama", {})
    adapters = [tuned(module, tmp_path / f"{number}", number) for number in range(3)]
    engine = engine_of(module, max_loras=3, num_pages=20, enable_prefix_caching=False)
    classes = engine.config.slo_classes
    for number, one in enumerate(adapters[:2]):
        add(engine, f"{number}", [3 + number] * 90, one.adapter, 60, classes[-1].name)
    before: dict[str, list[TokenDelta]] = {"0": [], "1": []}
    while not all(before.values()):
        for delta in engine.step().deltas:
            before[delta.request_id].append(delta)
    add(engine, "2", [5] * 90, adapters[2].adapter, 60, classes[0].name)
    deltas = run(engine)
    deltas = {name: [*before.get(name, []), *found] for name, found in deltas.items()}
    assert engine.scheduler.table.num_preemptions > 0
    for number, one in enumerate(adapters):
        assert tokens_of(deltas[f"{number}"]) == one.greedy([3 + number] * 90, 60)


def test_request_whose_adapter_cannot_be_loaded_ends_with_the_reason(tmp_path: Path) -> None:
    module = build("llama", {})
    good, bad = (tuned(module, tmp_path / name, seed) for seed, name in enumerate(["good", "bad"]))
    with (tmp_path / "bad" / "adapter_model.safetensors").open("r+b") as weights:
        weights.seek(-4, 2)
        weights.write(b"abcd")
    engine = engine_of(module)
    add(engine, "good", PROMPTS[0], good.adapter)
    add(engine, "bad", PROMPTS[0], bad.adapter)
    deltas = run(engine)
    assert tokens_of(deltas["good"]) == good.greedy(PROMPTS[0], 8)
    assert "has other bytes than when adapter 'bad' was loaded first" in str(deltas["bad"][-1].error)
    assert deltas["bad"][-1].error_field == "model"
    add(engine, "again", PROMPTS[0], good.adapter)
    assert tokens_of(run(engine)["again"]) == good.greedy(PROMPTS[0], 8)


def test_start_fails_where_one_of_its_adapters_does_not_fit_and_names_that_one(tmp_path: Path) -> None:
    module = build("llama", {})
    good = tuned(module, tmp_path / "good", 1)
    wide = tuned(build("llama", {"hidden_size": 96}), tmp_path / "wide", 2)
    engine = engine_of(module)
    check_adapters(engine, {"good": good.adapter.path, "gone": str(tmp_path / "gone")})
    with pytest.raises(ValueError, match=r"model\.lora_modules: 'big' cannot be served: .*this model's has 64 and 48"):
        check_adapters(engine, {"good": good.adapter.path, "big": wide.adapter.path})


def test_drafts_are_verified_with_the_adapter(tmp_path: Path) -> None:
    module = build("llama", {})
    one = tuned(module, tmp_path / "one", 1)
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
    engine = engine_of(module, speculative_config=speculation)
    add(engine, "one", PROMPTS[3], one.adapter, 40)
    add(engine, "base", PROMPTS[3], None, 40)
    deltas = run(engine)
    assert engine.scheduler.verification is not None
    assert tokens_of(deltas["one"]) == one.greedy(PROMPTS[3], 40)
    assert tokens_of(deltas["base"]) == base_tokens(module, PROMPTS[3], 40)


def test_engine_without_adapters_refuses_requests_for_one(tmp_path: Path) -> None:
    module = build("llama", {})
    one = tuned(module, tmp_path / "one", 1)
    with pytest.raises(InvalidField, match="takes no adapters; start it with --enable-lora"):
        add(engine_on(wrap_module(module)), "one", PROMPTS[0], one.adapter)


def test_model_with_recurrent_layers_refuses_adapters_at_the_start() -> None:
    with pytest.raises(ValueError, match="enable_lora: qwen3_next has recurrent layers"):
        wrap_module(build("qwen3_next", {}), LoadOptions(max_lora_rank=8))


@pytest.mark.parametrize(
    ("name", "linears"), [("deepseek_v32", "wq_b|wk|weights_proj"), ("minimax_m3_vl_text", "q_proj|k_proj")]
)
def test_adapter_of_an_indexer_changes_the_tokens_that_are_read(tmp_path: Path, name: str, linears: str) -> None:
    module = build(name, SERVED[name])
    one = tuned(module, tmp_path / "one", 1, target_modules=rf".*\.indexer\.({linears})")
    prompt = [(7 * at) % 90 + 3 for at in range(60)]
    expected = one.greedy(prompt, 8)
    assert expected != base_tokens(module, prompt)
    engine = engine_of(module, max_num_batched_tokens=48, max_num_seqs=16)
    add(engine, "0", prompt, one.adapter)
    assert tokens_of(run(engine)["0"]) == expected
