"""A head of EAGLE-3 drafts what plain torch drafts, at every step, and an engine with it gives the tokens without."""

import random
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ByteSize
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from crossdock.kernels.cpu.build import cpu_flags
from crossdock.kernels.cpu.linear import usable_kernels
from crossdock.workers.draft.head_drafter import MOST_KEPT, HeadDrafter
from crossdock.workers.draft.paged_eagle import PagedEagle
from crossdock.workers.model.weights.untrusted import read_json
from crossdock.workers.schedule.request.submission import SamplingParams, Submission
from tests.sweeps import rest_in_soak
from tests.workers.architectures import build
from tests.workers.draft.eagle_reference import EagleReference, write_config, write_head
from tests.workers.draft.noted_heads import drafter_of, head_config, noting
from tests.workers.ranks import Ranks, saved
from tests.workers.replica.engines import greedy, tokens_of
from tests.workers.replica.speculating import (
    MAX_MODEL_LEN,
    NUM_REQUESTS,
    VOCAB_SIZE,
    History,
    check_request,
    engine_of,
    expected,
    least_pages,
    module,
    serve,
)
from tests.workers.worker_groups import engine_of_ranks


@cache
def plain() -> PreTrainedModel:
    """Return the target once more, whose attention is its own."""
    return module.__wrapped__()


@pytest.mark.parametrize(("draft_vocab", "changed"), [(None, {}), (100, {"norm_before_residual": True})])
def test_head_in_an_engine_drafts_as_in_plain_torch_at_every_step(
    tmp_path: Path, draft_vocab: int | None, changed: dict[str, Any]
) -> None:
    """Prompts come in chunks, streams join and leave, and some drafts are accepted, others not."""
    folder = write_head(tmp_path, module(), draft_vocab=draft_vocab, **changed)
    history, reference = History.random(5, NUM_REQUESTS), expected(5)
    settings = {"enable_prefix_caching": False, "max_num_batched_tokens": 40, "max_num_seqs": 4}
    engine = engine_of(speculative_config=head_config(folder), **settings)
    noted = noting(engine, {name: tokens_of(deltas) for name, deltas in reference.items()})
    found, _ = serve(engine, History(history.works, history.arrivals, {}))
    for name, deltas in reference.items():
        check_request(found[name], deltas, was_aborted=False)
    oracle = EagleReference(folder, plain())
    assert len(noted.notes) > 30
    for text, drafts in noted.notes[::3]:
        assert drafts == oracle.drafts(text, len(drafts))
    assert noted.head.pages.block_pool.num_available == noted.head.pages.num_pages, "none is left behind"


def _rounded() -> PreTrainedModel:
    """Return a target in float32 whose layers native kernels compute: bfloat16 holds its weights."""
    target = build("llama", {"vocab_size": 288, "max_position_embeddings": MAX_MODEL_LEN, "head_dim": 32})
    for parameter in target.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return target


def test_head_beside_native_kernels_is_computed_by_them_and_drafts_as_in_plain_torch(tmp_path: Path) -> None:
    file = write_head(tmp_path, _rounded(), draft_vocab=112) / "model.safetensors"
    halves = {name: each.bfloat16() if each.is_floating_point() else each for name, each in load_file(file).items()}
    save_file(halves, file)
    greedy = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    works = [Submission(name, [3 + 7 * number] * (20 + number), greedy) for number, name in enumerate("abc")]
    history = History(works, [0, 3, 6], {})
    reference = serve(engine_of(target=_rounded()), history)[0]
    settings = {"speculative_config": head_config(tmp_path), "enable_prefix_caching": False}
    engine = engine_of(target=_rounded(), **settings)
    head = drafter_of(engine).head
    assert isinstance(head, PagedEagle)
    has_torch = any(isinstance(each, nn.Linear) for each in head.head.modules())
    assert has_torch == ("native" not in usable_kernels(torch.float32))
    noted = noting(engine, {name: tokens_of(deltas) for name, deltas in reference.items()})
    found, _ = serve(engine, history)
    for name, deltas in reference.items():
        check_request(found[name], deltas, was_aborted=False)
    save_file({name: each.float() if each.is_floating_point() else each for name, each in halves.items()}, file)
    oracle = EagleReference(tmp_path, _rounded())
    assert len(noted.notes) > 30
    for text, drafts in noted.notes[::3]:
        assert drafts == oracle.drafts(text, len(drafts))


@pytest.mark.parametrize("seed", rest_in_soak([0, 1, 2, 3], 1, 2))
def test_any_history_with_a_head_gives_the_tokens_without(tmp_path: Path, seed: int) -> None:
    """With few pages requests are preempted and computed again; with prefixes in pages, states are missing."""
    folder = write_head(tmp_path, module())
    draw, reference = random.Random(seed), expected(seed)
    config: dict[str, Any] = {
        "speculative_config": head_config(folder, draw.choice([1, 3, 6]), adaptive=draw.random() < 0.5),
        "max_num_batched_tokens": draw.choice([24, 40, 80]),
        "max_num_seqs": draw.choice([2, 4, 8]),
        "num_pages": draw.choice([0, 2, 92]) + least_pages("llama"),
    }
    engine = engine_of(**config)
    noting(engine, {name: tokens_of(deltas) for name, deltas in reference.items()})
    found, aborted = serve(engine, History.random(seed, NUM_REQUESTS))
    for name, deltas in reference.items():
        check_request(found[name], deltas, name in aborted)
    assert engine.scheduler.verification is not None
    assert sum(engine.scheduler.verification.totals.num_accepted_at) > 5


def test_head_without_states_of_a_cached_prefix_drafts_from_the_states_after_it(tmp_path: Path) -> None:
    folder = write_head(tmp_path, module())
    engine = engine_of(speculative_config=head_config(folder))
    prompt = [3 + 5 * number % 250 for number in range(50)]
    greedy = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    works = [Submission(name, prompt, greedy) for name in ("first", "second")]
    answer = tokens_of(serve(engine_of(), History(works[:1], [0], {}))[0]["first"])
    noted = noting(engine, {"first": answer, "second": answer})
    found, _ = serve(engine, History(works, [0, 100], {}))
    assert tokens_of(found["first"]) == tokens_of(found["second"]) == answer
    assert found["second"][0].num_cached_tokens == 48
    oracle = EagleReference(folder, plain())
    of_second = noted.notes[len(noted.notes) // 2 :]
    assert len(of_second) > 3
    for text, drafts in of_second:
        assert drafts == oracle.drafts(text, len(drafts), first=48)


def test_full_pool_of_a_head_takes_pages_of_the_stream_that_drafted_least_recently(tmp_path: Path) -> None:
    """A page has 16 rows: eight streams of up to 128 tokens need many more than these pages."""
    folder = write_head(tmp_path, module())
    reference = expected(5)
    memory = 6 * 16 * 2 * 2 * 16 * 4  # six pages
    engine = engine_of(speculative_config=head_config(folder, draft_kv_cache_memory=memory))
    noted = noting(engine, {name: tokens_of(deltas) for name, deltas in reference.items()})
    history = History.random(5, NUM_REQUESTS)
    found, _ = serve(engine, History(history.works, history.arrivals, {}))
    for name, deltas in reference.items():
        check_request(found[name], deltas, was_aborted=False)
    assert noted.head.pages.num_pages == 6
    assert noted.notes


def test_stream_whose_rows_lost_their_pages_drafts_from_the_states_that_are_kept(tmp_path: Path) -> None:
    """The head of two streams has pages for one: the first one drafts again once the second one has ended."""
    folder = write_head(tmp_path, module())
    memory = 6 * 16 * 2 * 2 * 16 * 4  # six pages
    engine = engine_of(speculative_config=head_config(folder, 3, draft_kv_cache_memory=memory))
    greedy = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    works = [Submission(name, [3 + number] * 60, greedy) for number, name in enumerate("ab")]
    works[1] = replace(works[1], sampling=replace(greedy, max_tokens=4))
    reference = serve(engine_of(), History(works, [0, 0], {}))[0]
    noted = noting(engine, {name: tokens_of(deltas) for name, deltas in reference.items()}, 0.0)
    found, _ = serve(engine, History(works, [0, 8], {}))
    assert [tokens_of(found[name]) for name in "ab"] == [tokens_of(reference[name]) for name in "ab"]
    texts = [text for text, _ in noted.notes]
    others = [number for number, text in enumerate(texts) if text[0] == 4]
    assert others, "the second stream took the pages"
    text, drafts = noted.notes[others[-1] + 1]
    oracle, num_states = EagleReference(folder, plain()), len(text) - 1
    assert drafts != oracle.drafts(text, 3)
    kept = [oracle.drafts(text, 3, num_states - number) for number in range(MOST_KEPT, MOST_KEPT + 6)]
    assert drafts in kept, "with the states of the steps since"
    assert drafts not in [oracle.drafts(text, 3, num_states - number) for number in range(1, 6)]


def test_memory_for_less_than_a_page_is_refused(tmp_path: Path) -> None:
    folder = write_head(tmp_path, module())
    with pytest.raises(ValueError, match=r"draft_kv_cache_memory \(100\) must be at least \d+ bytes"):
        engine_of(speculative_config=head_config(folder, draft_kv_cache_memory=ByteSize(100)))


def test_longer_drafts_and_more_streams_are_predicted_to_take_longer(tmp_path: Path) -> None:
    drafter = drafter_of(engine_of(speculative_config=head_config(write_head(tmp_path, module()))))
    assert drafter.seconds(0, 0) == 0
    assert 0 < drafter.seconds(1, 1) < drafter.seconds(1, 4) <= drafter.seconds(8, 4)
    assert drafter.target.vocab_size == VOCAB_SIZE


def test_rows_that_streams_have_due_are_counted_in_the_predicted_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a simulated device: a row takes a millisecond. Of two streams one has its prompt due, the other a few rows."""
    now = 0.0
    compute = PagedEagle.compute

    def timed(head: PagedEagle, inputs: Any, states: Any, follows: Any = None) -> Any:
        nonlocal now
        now += 1e-3 * len(states)
        return compute(head, inputs, states, follows)

    monkeypatch.setattr(PagedEagle, "compute", timed)
    engine: Any = engine_of(speculative_config=head_config(write_head(tmp_path, module())))
    own = drafter_of(engine)
    drafter = HeadDrafter(own.head, own.target, own.pages, lambda: now)
    engine.pipeline.head = engine.speculation.drafter = drafter
    engine.add(Submission("first", list(range(3, 27)), greedy(12)))
    engine.step()
    assert drafter.seconds(1, 1) == pytest.approx(24e-3, rel=0.05)
    engine.step()
    few = drafter.seconds(1, 1)
    assert 1e-3 < 1.05 * few < 1.1 * 5e-3
    assert drafter.seconds(1, 3) - few == pytest.approx(2e-3, rel=0.05)
    engine.add(Submission("second", list(range(33, 57)), greedy(12)))
    engine.step()
    assert 24e-3 < drafter.seconds(2, 1) < 30e-3


def test_head_of_fused_layers_without_an_embedding_drafts_as_in_plain_torch(tmp_path: Path) -> None:
    """The layers of this target are one module. The head is named as those of vLLM's examples are."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    sizes |= {"vocab_size": 288, "max_position_embeddings": MAX_MODEL_LEN}  # kernels take multiples of 16
    target, own = build("llama", sizes), build("llama", sizes)
    folder = as_in_examples(write_head(tmp_path, own))
    greedy = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    works = [replace(work, sampling=greedy) for work in History.random(6, 4).works]
    history = History(works, [0, 1, 2, 3], {})
    reference = serve(engine_of(target=build("llama", sizes)), history)[0]
    settings = {"enable_prefix_caching": False, "max_num_batched_tokens": 24}
    engine = engine_of(target=target, speculative_config=head_config(folder), **settings)
    assert engine.executor.cpu_kernels or not has_kernels(), "the layers are fused"
    noted = noting(engine, {name: tokens_of(deltas) for name, deltas in reference.items()})
    found, _ = serve(engine, history)
    for name, deltas in reference.items():
        check_request(found[name], deltas, was_aborted=False)
    oracle = EagleReference(folder, own)
    assert len(noted.notes) > 20
    for text, drafts in noted.notes[::3]:
        assert drafts == oracle.drafts(text, len(drafts))


def has_kernels() -> bool:
    """Return whether layers can be fused on this machine."""
    return shutil.which("g++") is not None and {"avx2", "fma"} <= cpu_flags()


def as_in_examples(folder: Path) -> Path:
    """Write a head again without its embedding, under the names of the heads in vLLM's examples."""
    tensors = {
        name.replace("layers.0.", "midlayer."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name != "embed_tokens.weight"
    }
    save_file(tensors, folder / "model.safetensors")
    found = read_json(folder / "config.json")
    flat = found.pop("transformer_layer_config") | found
    del flat["speculators_model_type"]
    write_config(folder, flat | {"architectures": ["LlamaForCausalLMEagle3"]})
    return folder


def test_tensor_ranks_with_a_head_give_the_tokens_of_one_rank_without(ranks: Ranks, tmp_path: Path) -> None:
    path, reference = saved(module(), tmp_path / "target"), expected(1)
    folder = write_head(tmp_path / "head", module())
    answers = {name: tokens_of(deltas) for name, deltas in reference.items()}
    config = {"speculative_config": head_config(folder), "admission": "queue", "enable_prefix_caching": False}
    with engine_of_ranks(ranks, path, 2, 1, **config) as engine:
        noted = noting(engine, answers)
        found, aborted = serve(engine, History.random(1, NUM_REQUESTS))
    for name, deltas in reference.items():
        check_request(found[name], deltas, name in aborted)
    assert len(noted.notes) > 20
    oracle = EagleReference(folder, plain())
    same = [drafts == oracle.drafts(text, len(drafts)) for text, drafts in noted.notes[::3]]
    assert sum(same) > 0.9 * len(same), "ranks add in another order, and a near tie may fall the other way"


def test_stages_of_a_pipeline_are_refused_with_a_head(ranks: Ranks, tmp_path: Path) -> None:
    path = saved(module(), tmp_path / "target")
    config = {"speculative_config": head_config(write_head(tmp_path / "head", module())), "admission": "queue"}
    with (
        pytest.raises(ValueError, match="pipeline_parallel_size must be 1"),
        engine_of_ranks(ranks, path, 1, 2, **config),
    ):
        pass


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}, "eagle_aux_hidden_state_layer_ids"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1]}, "eagle_aux_hidden_state_layer_ids"),
        ({"target_hidden_size": 128}, "fc.weight"),
        ({"draft_vocab_size": 10}, r"config.json asks for \[10"),
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"speculators_model_type": "eagle", "architectures": ["LlamaForCausalLM"]}, "no head of EAGLE-3"),
        ({"transformer_layer_config": {"model_type": "llama", "num_hidden_layers": 2}}, "num_hidden_layers"),
        ({"transformer_layer_config": {"model_type": "mistral"}}, "model_type"),
        ({"transformer_layer_config": []}, "transformer_layer_config"),
        ({"transformer_layer_config": {"rope_scaling": {"rope_type": "dynamic"}}}, "rope_type"),
    ],
)
def test_head_of_another_form_or_target_is_refused_by_name(tmp_path: Path, changed: dict[str, Any], named: str) -> None:
    folder = write_head(tmp_path, module(), **changed)
    with pytest.raises(ValueError, match=named):
        engine_of(speculative_config=head_config(folder))


def test_head_of_a_target_with_another_vocabulary_is_refused_with_both_sizes(tmp_path: Path) -> None:
    folder = write_head(tmp_path, build("llama", {"vocab_size": VOCAB_SIZE + 8}))
    with pytest.raises(ValueError, match=f"{VOCAB_SIZE + 8} tokens.* {VOCAB_SIZE}"):
        engine_of(speculative_config=head_config(folder))


@pytest.mark.parametrize(("lacking", "named"), [("fc.weight", "lacks fc.weight"), ("d2t", "lacks d2t")])
def test_head_without_one_of_its_tensors_is_refused_by_name(tmp_path: Path, lacking: str, named: str) -> None:
    folder = write_head(tmp_path, module(), draft_vocab=50)
    tensors = load_file(folder / "model.safetensors")
    del tensors[lacking]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=named):
        engine_of(speculative_config=head_config(folder))
    save_file(tensors | {lacking: torch.zeros(3), "more": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="more, which no such head has"):
        engine_of(speculative_config=head_config(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        engine_of(speculative_config=head_config(folder))
