"""Logits of prompts with pictures through our pages, in any chunks, beside transformers' own single pass."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from crossdock.kernels.backend import CPP, Attention
from crossdock.workers.model.load import load_model
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.pictures.vision import why_text_alone
from crossdock.workers.model.runner import Runner
from crossdock.workers.schedule.request.batch import Batch, EncoderWork, Scheduled
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.submission import InvalidField, SamplingParams, Submission
from tests.sweeps import rest_in_soak
from tests.workers.model.paged import random_steps
from tests.workers.multimodal import (
    BOTH_WAYS,
    CONFIGS,
    IMAGE,
    PLAIN,
    PicturePrompt,
    build_multimodal,
    one_pass,
    paged_multimodal,
    picture,
)

PAGE_SIZE = 8


def requests_of(model: LoadedModel, prompts: Sequence[PicturePrompt]) -> list[Request]:
    """Return requests that want all logits, known to the model's encoder, with memory for their pages."""
    assert model.encoder is not None
    params = SamplingParams(prompt_logprobs=0)
    requests = [
        Request(Submission(str(number), prompt.token_ids, params, items=prompt.items))
        for number, prompt in enumerate(prompts)
    ]
    for request in requests:
        model.encoder.add(request.id, model.encoder.locate(request))
    return requests


def logits_of(
    model: LoadedModel, prompts: Sequence[PicturePrompt], steps: Sequence[Sequence[tuple[int, int, int]]]
) -> list[Tensor]:
    """Return every token's logits, in `steps` of (prompt, start, end) parts, each picture encoded when it is needed."""
    per_prompt = -(-max(len(prompt.token_ids) for prompt in prompts) // PAGE_SIZE)
    model.allocate_pool(per_prompt * len(prompts), PAGE_SIZE)
    requests, runner, known = requests_of(model, prompts), Runner(model, PAGE_SIZE), set[bytes]()
    logits = [torch.full((len(prompt.token_ids), model.vocab_size), float("nan")) for prompt in prompts]
    assert model.encoder is not None
    model.encoder.clear()
    for parts in steps:
        new = {
            item.content_hash: item
            for number, start, end in parts
            for item in prompts[number].items
            if item.start < end and item.end > start and item.content_hash not in known
        }
        known |= new.keys()
        scheduled = [
            Scheduled(requests[n], start, end - start, range(n * per_prompt, (n + 1) * per_prompt), False)
            for n, start, end in parts
        ]
        step = runner.begin(Batch(scheduled, 0, encoder=EncoderWork((), tuple(new.values()))))
        flat, rows = runner.finish(step)
        for (number, start, end), own in zip(parts, rows, strict=True):
            logits[number][start:end] = flat[own.start : own.stop]
    return logits


def may_cut(family: str, prompt: PicturePrompt, cut: int) -> bool:
    """Return whether a chunk may end there."""
    return family not in BOTH_WAYS or not any(item.start < cut < item.end for item in prompt.items)


def allowed_steps(
    family: str, prompts: Sequence[PicturePrompt], steps: Sequence[Sequence[tuple[int, int, int]]]
) -> list[list[tuple[int, int, int]]]:
    """Return the steps with chunks lengthened to where they may end."""
    done, found = [0] * len(prompts), []
    for parts in steps:
        lengthened = []
        for number, _, end in parts:
            while not may_cut(family, prompts[number], end):
                end += 1
            if end > done[number]:
                lengthened.append((number, done[number], end))
                done[number] = end
        found.append(lengthened)
    return [parts for parts in found if parts]


USUAL = [("llava", "wide"), ("qwen3_vl", "narrow"), (*BOTH_WAYS, "wide")]


@pytest.fixture(scope="module", params=rest_in_soak(product(CONFIGS, ("wide", "narrow")), *USUAL))
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A family, and how wide the heads of its decoder are: narrow ones are not fused."""
    found: tuple[str, str] = request.param
    return found


@pytest.fixture(scope="module")
def family(case: tuple[str, str]) -> str:
    return case[0]


@pytest.fixture(scope="module")
def models(case: tuple[str, str]) -> tuple[LoadedModel, Any]:
    family, width = case
    text = PLAIN if width == "narrow" else {}
    model = paged_multimodal(family, **text)
    # DeepStack adds between layers, and Gemma 3 has other norms.
    assert bool(model.kernels) == (width == "wide" and family not in ("qwen3_vl", "qwen3_vl_moe", "gemma3"))
    return model, build_multimodal(family, **text)


def test_two_pictures_cut_at_every_boundary_equal_one_pass(family: str, models: tuple[LoadedModel, Any]) -> None:
    model, module = models
    prompt = PicturePrompt.of(3, picture(family, 1), 2, picture(family, 2, (1, 2)), 3)
    expected = one_pass(module, prompt)
    assert not torch.allclose(
        expected, one_pass(module, PicturePrompt.of(3, picture(family, 3), 2, picture(family, 2, (1, 2)), 3))
    )
    length = len(prompt.token_ids)
    for cut in range(1, length):
        if may_cut(family, prompt, cut):
            (logits,) = logits_of(model, [prompt], [[(0, 0, cut)], [(0, cut, length)]])
            torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


def test_ragged_chunks_of_several_prompts_equal_one_pass_each(family: str, models: tuple[LoadedModel, Any]) -> None:
    """Prompts with pictures, one that begins and ends with one, and text alone, mixed in ragged steps."""
    model, module = models
    prompts = [
        PicturePrompt.of(picture(family, 1), 5, picture(family, 1), 7, seed=1),
        PicturePrompt.of(11, picture(family, 4, (3, 2)), picture(family, 5), seed=2),
        PicturePrompt.of(40, seed=3),
    ]
    lengths = [len(prompt.token_ids) for prompt in prompts]
    expected = [one_pass(module, prompt) for prompt in prompts]
    for seed in range(2):
        logits = logits_of(model, prompts, allowed_steps(family, prompts, random_steps(lengths, seed)))
        for own, theirs in zip(logits, expected, strict=True):
            torch.testing.assert_close(own, theirs, rtol=1e-3, atol=1e-3)


def test_batch_of_pictures_gives_what_each_alone_gives(family: str, models: tuple[LoadedModel, Any]) -> None:
    encoder = models[0].encoder
    assert encoder is not None
    encoder.clear()
    items = [picture(family, seed, size)[1] for seed, size in enumerate([(2, 2), (1, 2), (2, 2), (3, 1)])]
    encoder.encode(items)
    for item in items:
        torch.testing.assert_close(encoder.embeddings_of(item), encoder.features([item]), rtol=1e-4, atol=1e-5)


def test_examples_to_measure_with_are_encoded(family: str, models: tuple[LoadedModel, Any]) -> None:
    encoder = models[0].encoder
    assert encoder is not None
    small, large = encoder.example(2), encoder.example(3)
    assert 1 < small.num_embedding_tokens <= large.num_embedding_tokens
    assert encoder.features([small, small]).shape[1] == 2 * small.num_embedding_tokens
    assert encoder.measure([small, large]) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_embedding_tokens": 3}, "3 embedding tokens and 4 placeholders"),
        ({"length": 4}, "4 embedding tokens and 3 placeholders"),
        ({"start": 60}, "ends after the prompt"),
        ({"kind": "sound"}, "kind that this model does not take"),
        (
            {"tensors": {"pixel_values": np.zeros((16, 96), np.float32), "image_grid_thw": np.array([[1, 2, 4]])}},
            "grids",
        ),
    ],
)
def test_item_that_does_not_match_its_placeholders_is_an_error(change: dict[str, Any], message: str) -> None:
    model = paged_multimodal("qwen2_vl")
    prompt = PicturePrompt.of(3, picture("qwen2_vl", 1), 3)
    wrong = PicturePrompt(prompt.token_ids, [replace(prompt.items[0], **change)])
    with pytest.raises(InvalidField, match=message):
        requests_of(model, [wrong])


def test_placeholder_without_an_item_is_an_error_beside_pictures() -> None:
    model = paged_multimodal("llava")
    prompt = PicturePrompt.of(3, picture("llava", 1), [IMAGE], 3)
    with pytest.raises(InvalidField, match="token 19 is a placeholder of image that no item has"):
        requests_of(model, [prompt])


NARROW: dict[str, Any] = {"sliding_window": 8}  # less than a picture of 16 rows


@pytest.mark.parametrize("text", [{}, NARROW, PLAIN], ids=["wide window", "narrow window", "other heads"])
def test_chunk_that_begins_inside_a_picture_of_both_directions_equals_one_pass(text: dict[str, Any]) -> None:
    """As after a prefix hit: the rows before it are in pages, and were computed with the whole picture."""
    model, module = paged_multimodal("gemma3", **text), build_multimodal("gemma3", **text)
    prompt = PicturePrompt.of(3, picture("gemma3", 1), 2, picture("gemma3", 2), 9)
    expected, length = one_pass(module, prompt), len(prompt.token_ids)
    for start in range(1, length):
        (logits,) = logits_of(model, [prompt], [[(0, 0, length)], [(0, start, length)]])
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


def test_picture_of_both_directions_at_the_beginning_and_beside_decodes_equals_one_pass() -> None:
    model, module = paged_multimodal("gemma3", **NARROW), build_multimodal("gemma3", **NARROW)
    tokens, item = picture("gemma3", 1)
    soft = PicturePrompt([*tokens[1:-1], 5, 6, 7, 8], [replace(item, length=16)])  # no token before its rows
    text = PicturePrompt.of(40, seed=3)
    steps = [[(1, 0, 38)], [(1, 38, 39), (0, 0, 16)], [(1, 39, 40), (0, 16, 19)], [(0, 19, 20)]]
    for own, prompt in zip(logits_of(model, [soft, text], steps), (soft, text), strict=True):
        torch.testing.assert_close(own, one_pass(module, prompt), rtol=1e-3, atol=1e-3)


def test_pictures_of_both_directions_next_to_each_other_are_refused() -> None:
    """transformers would take them for one picture."""
    tokens, item = picture("gemma3", 1)
    rows = [*tokens[1:-1], *tokens[1:-1]]
    touching = PicturePrompt(rows, [replace(item, length=16), replace(item, start=16, length=16)])
    with pytest.raises(InvalidField, match="without a token between"):
        requests_of(paged_multimodal("gemma3"), [touching])


@pytest.mark.parametrize(
    ("family", "attention", "reason"),
    [
        ("gemma3", CPP, ""),
        ("gemma3", Attention("flash_attn", print, torch.add, takes_key_end=False), "attention_backend flash_attn"),
        ("paligemma", CPP, "whole prompt"),
        ("gemma3n", CPP, "not supported"),
    ],
)
def test_models_whose_pictures_attend_both_ways_take_them_where_attention_can(
    family: str, attention: Attention, reason: str
) -> None:
    config = AutoConfig.for_model(family)
    assert reason in why_text_alone(config, attention)
    assert bool(reason) == bool(why_text_alone(config, attention))


def test_saved_model_is_loaded_with_its_encoder(family: str, tmp_path: Path) -> None:
    module, prompt = build_multimodal(family), PicturePrompt.of(3, picture(family, 1), 5)
    module.save_pretrained(tmp_path)
    model = load_model(ModelSpec(str(tmp_path), "float32"), kv_bytes=1 << 20)
    length = len(prompt.token_ids)
    (logits,) = logits_of(model, [prompt], allowed_steps(family, [prompt], [[(0, 0, 6)], [(0, 6, length)]]))
    torch.testing.assert_close(logits, one_pass(module, prompt), rtol=1e-3, atol=1e-3)
