"""The MTP head of a checkpoint drafts what transformers' own does, and an engine with it gives the tokens without."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from crossdock.workers.draft.mtp_head import MtpHead
from crossdock.workers.draft.mtp_weights import check_mtp
from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.weights.weights import load_weights, read_config
from crossdock.workers.schedule.request.request import TokenDelta
from crossdock.workers.schedule.request.submission import SamplingParams, Submission
from tests.sweeps import rest_in_soak
from tests.workers.architectures import SERVED, build
from tests.workers.draft.mtp_reference import MtpReference, add_tensors, plain, target_of, write_checkpoint
from tests.workers.draft.noted_heads import Noted, drafter_of, head_config, noting
from tests.workers.quantised import CASES
from tests.workers.ranks import Ranks, saved
from tests.workers.replica.engines import tokens_of
from tests.workers.replica.speculating import (
    MAX_MODEL_LEN,
    NUM_REQUESTS,
    VOCAB_SIZE,
    History,
    check_request,
    engine_of,
    serve,
)
from tests.workers.worker_groups import engine_of_ranks

FAMILIES = ["deepseek_v3", "deepseek_v32", "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hy_v3"]
FAMILIES += ["mellum", "nemotron_h", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"]
HISTORIES = ["deepseek_v3", "glm_moe_dsa", "nemotron_h", "qwen3_5_text"]
FEW = 6  # requests of a history, where neither pages nor places are scarce
ERRORS = {"nemotron_h": 1e-3}  # of logprobs: Mamba-2's scan over a chunk, or over drafts, adds in another order


def mtp_config(folder: Path | None, num_tokens: int = 4, **others: Any) -> dict[str, Any]:
    """Return the settings of the head in a checkpoint that always drafts as many tokens. None: the served model's."""
    config = head_config(folder or Path(), num_tokens, method="mtp", **others)
    return config if folder else config | {"model": None}


@cache
def without(name: str, seed: int, count: int = NUM_REQUESTS) -> dict[str, list[TokenDelta]]:
    """Return the deltas of a history's requests from an engine without drafts, with pages for all and no abort."""
    history = History.random(seed, count)
    return serve(engine_of(target=target_of(name)), History(history.works, history.arrivals, {}))[0]


def check_drafts(noted: Noted, oracle: MtpReference, least: float = 1.0, first: int = 0) -> None:
    """Check that at least such a share of the noted drafts, every fifth one, is the oracle's."""
    assert len(noted.notes) > 30
    same = [drafts == oracle.drafts(text, len(drafts), first) for text, drafts in noted.notes[::5]]
    assert sum(same) >= least * len(same)


@pytest.mark.parametrize("name", rest_in_soak(FAMILIES, *HISTORIES, "exaone_moe", "glm4_moe", "hy_v3", "mellum"))
def test_head_in_an_engine_drafts_as_transformers_at_every_step(tmp_path: Path, name: str) -> None:
    """Prompts come in chunks, streams join and leave, and some drafts are accepted, others not."""
    folder, reference, history = write_checkpoint(tmp_path, name), without(name, 5, FEW), History.random(5, FEW)
    settings = {"enable_prefix_caching": False, "max_num_batched_tokens": 40, "max_num_seqs": 4}
    engine = engine_of(target=target_of(name), speculative_config=mtp_config(folder), **settings)
    noted = noting(engine, {name: tokens_of(deltas) for name, deltas in reference.items()})
    found, _ = serve(engine, History(history.works, history.arrivals, {}))
    for request, deltas in reference.items():
        check_request(found[request], deltas, was_aborted=False, error=ERRORS.get(name, 1e-4))
    check_drafts(noted, plain(name))
    assert noted.head.pages.block_pool.num_available == noted.head.pages.num_pages, "none is left behind"


@pytest.mark.parametrize("name", rest_in_soak(HISTORIES, "glm_moe_dsa", "nemotron_h"))
@pytest.mark.parametrize("seed", rest_in_soak([0, 1, 2, 3], 1))
def test_any_history_with_a_head_gives_the_tokens_without(tmp_path: Path, name: str, seed: int) -> None:
    """With few pages requests are preempted and computed again; with prefixes in pages, states are missing."""
    draw, reference = random.Random(seed), without(name, seed)
    target = wrap_module(target_of(name))
    least = MAX_MODEL_LEN // 16 + 2 * target.state_pages(16)
    config: dict[str, Any] = {
        "speculative_config": mtp_config(write_checkpoint(tmp_path, name), draw.choice([1, 3, 6])),
        "max_num_batched_tokens": draw.choice([24, 40, 80]),
        "max_num_seqs": draw.choice([2, 4, 8]),
        "num_pages": draw.choice([0, 2, 92]) + least,
    }
    engine = engine_of(target=target_of(name), **config)
    noting(engine, {name: tokens_of(deltas) for name, deltas in reference.items()})
    found, aborted = serve(engine, History.random(seed, NUM_REQUESTS))
    for request, deltas in reference.items():
        check_request(found[request], deltas, request in aborted, ERRORS.get(name, 1e-4))
    assert engine.scheduler.verification is not None
    assert sum(engine.scheduler.verification.totals.num_accepted_at) > 5


@pytest.mark.parametrize("name", rest_in_soak(["deepseek_v3", "glm_moe_dsa"], "glm_moe_dsa"))
def test_head_without_states_of_a_cached_prefix_drafts_from_the_states_after_it(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path, name)
    engine = engine_of(target=target_of(name), speculative_config=mtp_config(folder))
    prompt = [3 + 5 * number % 250 for number in range(50)]
    works = [Submission(each, prompt, SamplingParams(max_tokens=20, ignore_eos=True)) for each in ("first", "second")]
    answer = tokens_of(serve(engine_of(target=target_of(name)), History(works[:1], [0], {}))[0]["first"])
    noted = noting(engine, {"first": answer, "second": answer})
    found, _ = serve(engine, History(works[:1], [0], {}))
    noted.notes.clear()
    found |= serve(engine, History(works[1:], [0], {}))[0]
    assert tokens_of(found["first"]) == tokens_of(found["second"]) == answer
    assert found["second"][0].num_cached_tokens == 48
    assert len(noted.notes) > 3
    for text, drafts in noted.notes:
        assert drafts == plain(name).drafts(text, len(drafts), first=48)


OWN = ["glm4_moe", "glm_moe_dsa", "nemotron_h", "qwen3_5_moe_text"]


@pytest.mark.parametrize("name", rest_in_soak(OWN, *OWN[1:]))
def test_served_checkpoint_brings_its_own_head(tmp_path: Path, name: str) -> None:
    """Experts are a tensor each, or one tensor together. No draft is ever changed here."""
    folder = write_checkpoint(tmp_path, name, is_stacked=name == "qwen3_5_moe_text")
    target, _ = load_weights(read_config(folder), folder, torch.float32)
    settings = {"speculative_config": mtp_config(None), "enable_prefix_caching": False}
    engine = engine_of(target=target, **settings)
    greedy = SamplingParams(max_tokens=24, temperature=0.0)
    works = [Submission(f"{number}", [5 + 7 * number] * (9 + number), greedy) for number in range(3)]
    history = History(works, [0, 1, 2], {})
    reference = serve(engine_of(target=target_of(name)), history)[0]
    noted = noting(engine, {name: tokens_of(deltas) for name, deltas in reference.items()})
    found, _ = serve(engine, history)
    assert {each: tokens_of(found[each]) for each in found} == {each: tokens_of(reference[each]) for each in reference}
    check_drafts(noted, plain(name))


def test_head_of_a_model_in_bfloat16_is_in_bfloat16_and_its_drafts_are_accepted(tmp_path: Path) -> None:
    """Layers add so little that the next token follows from the newest one, and the head reads that one's embedding."""
    file = write_checkpoint(tmp_path, "glm4_moe") / "model.safetensors"
    tensors = load_file(file)
    for key, tensor in tensors.items():
        if key.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(0.001)
        elif "layers.4." in key and "norm" in key:
            tensor.fill_(1.0)
    tensors["model.layers.4.eh_proj.weight"] = torch.eye(48, 96)
    save_file(tensors, file, {"format": "pt"})
    plain, target = (load_weights(read_config(tmp_path), tmp_path, torch.bfloat16)[0] for _ in range(2))
    greedy = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    history = History([Submission(f"{number}", [5 + 7 * number] * 9, greedy) for number in range(3)], [0, 0, 0], {})
    reference = serve(engine_of(target=plain), history)[0]
    engine = engine_of(target=target, speculative_config=mtp_config(None), enable_prefix_caching=False)
    head = drafter_of(engine).head
    assert isinstance(head, MtpHead)
    assert {each.dtype for each in (head.projection, head.layer.module.model.norm.weight)} == {torch.bfloat16}
    assert head.page_bytes(16) == 16 * 2 * 2 * 12 * 2, "two heads of twelve numbers, keys and values"
    found = serve(engine, history)[0]
    assert {each: tokens_of(found[each]) for each in found} == {each: tokens_of(reference[each]) for each in reference}
    assert engine.scheduler.verification is not None
    totals = engine.scheduler.verification.totals
    assert sum(totals.num_accepted_at) > 0.5 * totals.num_tokens > 0


def check_own_head(target: PreTrainedModel, same: PreTrainedModel, folder: Path, oracle: MtpReference) -> None:
    """Check the drafts of the head in `folder`, and that tokens are those without drafts, of `same`, a second copy."""
    history = History.random(5, FEW)
    history = History(history.works, history.arrivals, {})
    reference = serve(engine_of(target=same), history)[0]
    engine = engine_of(target=target, speculative_config=mtp_config(folder), enable_prefix_caching=False)
    noted = noting(engine, {name: tokens_of(deltas) for name, deltas in reference.items()})
    found, _ = serve(engine, history)
    for request, deltas in reference.items():
        check_request(found[request], deltas, was_aborted=False)
    check_drafts(noted, oracle)


def test_checkpoint_with_an_encoder_of_pictures_brings_its_head(tmp_path: Path) -> None:
    """Published checkpoints of Qwen3.5 are such: the decoder is a part of the model, and the head is beside both."""
    target, oracle = _with_encoder(), MtpReference(_with_encoder())
    folder = saved(target, tmp_path)
    add_tensors(folder, oracle.tensors())
    assert "model.language_model.embed_tokens.weight" in load_file(folder / "model.safetensors")
    check_own_head(target, _with_encoder(), folder, oracle)


def _with_encoder() -> PreTrainedModel:
    """Return a tiny random Qwen3.5 as it is published, the same for each call."""
    text = target_of("qwen3_5_text").config.to_dict()
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48}
    vision |= {"patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": []}
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision)
    module: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in module.get_decoder().parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
    return module


@pytest.mark.parametrize("name", rest_in_soak(["glm4_moe", "glm_moe_dsa"], "glm_moe_dsa"))
def test_packed_matrices_of_a_head_draft_as_the_weights_that_they_mean(tmp_path: Path, name: str) -> None:
    """Products from codes add in another order, and a near tie may fall the other way.

    The configuration does not say that drafts share a choice: each chooses its own tokens.
    """
    oracle, case = MtpReference(target_of(name)), CASES["fp8 blocks"]
    folder = saved(target_of(name), tmp_path)
    tensors = oracle.tensors()
    torch.manual_seed(0)
    for matrix in [each for each in tensors if each.endswith("_proj.weight") and "weights_proj" not in each]:
        made = case.make(*tensors[matrix].shape)
        tensors |= {matrix.removesuffix(".weight") + suffix: each for suffix, each in made.items()}
        oracle.put(matrix, case.weight_of(made))
    add_tensors(folder, tensors)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": case.config}))
    reference, history = without(name, 5, FEW), History.random(5, FEW)
    settings = {"enable_prefix_caching": False, "max_num_batched_tokens": 40}
    engine = engine_of(target=target_of(name), speculative_config=mtp_config(folder), **settings)
    noted = noting(engine, {each: tokens_of(deltas) for each, deltas in reference.items()})
    serve(engine, History(history.works, history.arrivals, {}))
    check_drafts(noted, oracle, 0.9)


DIVISIONS = [("deepseek_v3", (2, 1)), ("glm4_moe", (1, 2)), ("glm_moe_dsa", (2, 1)), ("glm_moe_dsa", (1, 2))]
DIVISIONS += [("nemotron_h", (2, 1)), ("nemotron_h", (1, 2)), ("qwen3_5_text", (2, 1))]


@pytest.mark.parametrize("divided", rest_in_soak(DIVISIONS, ("glm_moe_dsa", (2, 1)), ("nemotron_h", (1, 2))))
def test_ranks_and_stages_with_a_head_give_the_tokens_of_one_rank_without(
    ranks: Ranks, tmp_path: Path, divided: tuple[str, tuple[int, int]]
) -> None:
    """The driver reads a whole embedding or output projection where it has a part of the model's, or none."""
    name, division = divided
    folder, reference = write_checkpoint(tmp_path, name), without(name, 1, FEW)
    config = {"speculative_config": mtp_config(None), "admission": "queue", "enable_prefix_caching": False}
    with engine_of_ranks(ranks, folder, *division, **config) as engine:
        noted = noting(engine, {name: tokens_of(deltas) for name, deltas in reference.items()})
        found, aborted = serve(engine, History.random(1, FEW))
    for request, deltas in reference.items():
        check_request(found[request], deltas, request in aborted, ERRORS.get(name, 1e-4))
    check_drafts(noted, plain(name), 0.9)


def test_checkpoint_with_a_tied_output_projection_brings_its_head(tmp_path: Path) -> None:
    target = build("qwen3_5_text", _tied())
    folder = saved(target, tmp_path)
    oracle = MtpReference(build("qwen3_5_text", _tied()))
    add_tensors(folder, oracle.tensors())
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    check_own_head(target, build("qwen3_5_text", _tied()), folder, oracle)


def _tied() -> dict[str, Any]:
    sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_MODEL_LEN, "tie_word_embeddings": True}
    return SERVED["qwen3_5_text"] | sizes


@pytest.mark.parametrize(
    ("name", "pattern", "named"),
    [
        ("glm4_moe", "layers.4.", "has no MTP head: its files lack mtp.fc"),
        ("glm4_moe", "layers.4.eh_proj", "has no MTP head"),
        ("glm4_moe", "layers.4.self_attn.k_proj", r"missing: model\.layers\.0\.self_attn\.k_proj\.weight"),
        ("glm_moe_dsa", "layers.4.self_attn.indexer.wk", r"missing: model\.layers\.0\.self_attn\.indexer\.wk\.weight"),
        ("nemotron_h", "final_layernorm", r"missing: model\.norm_f\.weight"),
        ("qwen3_next", "mtp.", "has no MTP head"),
        ("qwen3_next", "mtp.norm", r"missing: model\.norm\.weight"),
    ],
)
def test_head_without_its_tensors_is_refused_by_name(tmp_path: Path, name: str, pattern: str, named: str) -> None:
    file = write_checkpoint(tmp_path, name) / "model.safetensors"
    save_file({key: each for key, each in load_file(file).items() if pattern not in key}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=named):
        engine_of(target=target_of(name), speculative_config=mtp_config(tmp_path))
    with pytest.raises(ValueError, match=named):
        check_mtp(None, tmp_path)


def test_heads_of_other_kinds_models_and_sizes_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "qwen", "qwen3_next")
    wrong = {"mtp.fc.weight": torch.zeros(48, 48)}
    config = mtp_config(folder)
    with pytest.raises(ValueError, match="has model_type qwen3_next; the model that is served has glm4_moe"):
        engine_of(target=target_of("glm4_moe"), speculative_config=config)
    with pytest.raises(ValueError, match="method mtp needs the directory of a checkpoint"):
        engine_of(target=target_of("qwen3_next"), speculative_config=mtp_config(None))
    add_tensors(folder, {"mtp.layers.1.mlp.gate.weight": torch.zeros(4, 48)})
    with pytest.raises(ValueError, match=r"mtp\.layers\.1\.mlp\.gate\.weight is of a second layer"):
        engine_of(target=target_of("qwen3_next"), speculative_config=config)
    add_tensors(write_checkpoint(folder, "qwen3_next"), wrong)
    with pytest.raises(ValueError, match=r"mtp\.fc\.weight is \[48, 48\], expected \[48, 96\]"):
        engine_of(target=target_of("qwen3_next"), speculative_config=config)
    add_tensors(folder, {"mtp.fc.weight": torch.full((48, 96), torch.nan)})
    with pytest.raises(ValueError, match="projection has NaN or infinity"):
        engine_of(target=target_of("qwen3_next"), speculative_config=config)


def test_model_whose_head_is_not_computed_is_served_without_drafts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(build("llama", {"vocab_size": VOCAB_SIZE}), tmp_path)
    with caplog.at_level("WARNING", "ray.serve"):
        engine = engine_of(speculative_config=mtp_config(folder))
    assert engine.executor.speculation is None
    assert engine.executor.config.speculative_config is None
    assert "speculative_config is left out: method mtp does not compute the head of llama, so" in caplog.text


def test_head_of_a_model_whose_indexers_choose_blocks_is_refused(tmp_path: Path) -> None:
    name = "minimax_m3_vl_text"
    folder = saved(build(name, SERVED[name] | {"vocab_size": VOCAB_SIZE}), tmp_path)
    with pytest.raises(ValueError, match=r"has indexers that choose blocks of tokens, .* heads of other models"):
        check_mtp(None, folder)


@pytest.mark.parametrize(
    ("name", "fields", "named"),
    [
        ("qwen3_next", {"mtp_num_hidden_layers": 2}, "has 2 layers in its MTP head"),
        ("qwen3_next", {"mtp_use_dedicated_embeddings": True}, "has mtp_use_dedicated_embeddings"),
        ("exaone_moe", {"mtp_layer_types": None}, "has layers with windows and no mtp_layer_types"),
        (
            "exaone_moe",
            {"mtp_layer_types": ["sliding_attention"], "mtp_sliding_windows": [7]},
            r"has mtp_sliding_windows .7.; heads with the decoder's window, 4096 tokens",
        ),
        ("nemotron_h", {"mtp_layers_block_type": ["linear_attention", "moe"]}, "has mtp_layers_block_type .'linear"),
        ("nemotron_h", {"mtp_layers_block_type": ["moe"]}, "has mtp_layers_block_type .'moe'"),
    ],
)
def test_head_that_config_json_describes_as_another_is_refused(
    tmp_path: Path, name: str, fields: dict[str, Any], named: str
) -> None:
    folder = write_checkpoint(tmp_path, name)
    check_mtp(f"{folder}", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(ValueError, match=named):
        engine_of(target=target_of(name), speculative_config=mtp_config(folder))
    with pytest.raises(ValueError, match=named):
        check_mtp(None, folder)
