"""With `batch_invariant` a request has the same tokens and log-probabilities, bit for bit, alone and in any batch."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.kernels.cpu.build import cpu_flags
from crossdock.kernels.cpu.linear import rounds_rows
from crossdock.kernels.options import Quantization
from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.schedule.request.request import TokenLogprobs
from crossdock.workers.schedule.request.submission import SamplingParams, Submission
from tests.workers.architectures import build
from tests.workers.model.layers.test_fusion import packed_and_plain
from tests.workers.replica.engines import engine_on, run, tokens_of

WIDE = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64, "vocab_size": 128, "sliding_window": 40}
FORMATS: dict[str, set[str]] = {  # and what a CPU must have
    "float32": {"avx2"},
    "bfloat16": {"avx512_bf16"},
    "int4": {"avx512_bf16"},
    "int8": set(),  # what rounds rows
}
Answer = tuple[list[int], list[TokenLogprobs], list[TokenLogprobs | None]]


def model_of(form: str) -> LoadedModel:
    if missing := FORMATS[form] - cpu_flags():
        pytest.skip(f"needs a CPU with {', '.join(sorted(missing))}")
    if form == "int8" and not rounds_rows():
        pytest.skip("needs a CPU with AVX512-VNNI, or with AVX2 alone")
    module: Any = build("mistral", WIDE).to(torch.bfloat16)
    if form == "float32" or (form == "int8" and "avx512_bf16" not in cpu_flags()):
        module = module.float()  # whose numbers bfloat16 holds
    if form == "int4":
        module, _ = packed_and_plain("int4", torch.bfloat16)
    quantization: Quantization | None = "int8" if form == "int8" else None
    return wrap_module(module, LoadOptions(cpu_kernels="native", batch_invariant=True, quantization=quantization))


def submissions(seed: int, count: int = 7) -> list[Submission]:
    """Return prompts, of which some begin alike, with greedy and drawn outputs."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randint(3, 120, (70,), generator=generator).tolist()
    found = []
    for number in range(count):
        own = torch.randint(3, 120, (int(torch.randint(1, 120, (), generator=generator)),), generator=generator)
        params = SamplingParams(
            max_tokens=12,
            temperature=0.8 * (number % 2),
            top_p=0.9,
            seed=number,
            logprobs=3,
            prompt_logprobs=1 if number % 4 == 0 else None,
            ignore_eos=True,
        )
        found.append(Submission(f"{number}", [*shared[: 35 * (number % 3)], *own.tolist()], params))
    return found


def answers(model: LoadedModel, works: list[Submission], num_pages: int = 1000, **config: Any) -> dict[str, Answer]:
    engine = engine_on(model, num_pages, page_size=16, admission="queue", **config)
    for work in works:
        engine.add(work)
    found = {}
    for request_id, deltas in run(engine).items():
        logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
        prompts = [entry for delta in deltas for entry in delta.prompt_logprobs or ()]
        found[request_id] = tokens_of(deltas), logprobs, prompts
    return found


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("form", FORMATS)
def test_request_in_any_batch_has_the_bits_that_it_has_alone(form: str) -> None:
    """Batches differ in chunks, threads, shared prefixes, preemptions and drafts."""
    model, works = model_of(form), submissions(3)
    alone: dict[str, Answer] = {}
    for work in works:
        alone |= answers(model, [work], enable_prefix_caching=False, max_num_batched_tokens=512)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}

    @given(
        tokens=st.sampled_from([32, 48, 100, 512]),
        num_pages=st.sampled_from([16, 40, 1000]),
        drafted=st.booleans(),
        cached=st.booleans(),
        num_threads=st.sampled_from([1, 2]),
        order=st.permutations(range(len(works))),
    )
    @settings(max_examples=4, deadline=None, derandomize=True)
    def same_bits(tokens: int, num_pages: int, drafted: bool, cached: bool, num_threads: int, order: list[int]) -> None:
        torch.set_num_threads(num_threads)
        given_works = [works[number] for number in order]
        if cached:  # the same prompts again: their pages are there
            given_works += [replace(work, id=f"{work.id} again") for work in given_works]
        found = answers(
            model,
            given_works,
            num_pages,
            enable_prefix_caching=cached,
            max_num_batched_tokens=tokens,
            max_num_seqs=12,
            speculative_config=drafts if drafted else None,
        )
        for request_id, answer in found.items():
            assert answer == alone[request_id.removesuffix(" again")]

    same_bits()


def test_model_whose_rows_depend_on_the_batch_is_refused_by_name() -> None:
    options = LoadOptions(cpu_kernels="native", batch_invariant=True)
    moe = {**WIDE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    for name, sizes, reason in (
        ("qwen3_moe", moe, "the mlp differs in"),
        ("gpt2", {}, "the model has no model.layers"),
        ("llama", {"hidden_size": 48, "head_dim": 24}, "head_dim 24 is not a multiple of 32"),
        ("qwen3_5_text", {}, "has recurrent layers"),
    ):
        module = build(name, sizes).to(torch.bfloat16).float()
        with pytest.raises(ValueError, match=f"batch_invariant: .*{reason}"):
            wrap_module(module, options)


@pytest.mark.parametrize(
    ("field", "value"),
    [("cpu_kernels", "onednn"), ("cpu_kernels", "torch"), ("enable_lora", True), ("attention_backend", "flashinfer")],
)
def test_settings_that_contradict_the_mode_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value!r}; with batch_invariant it must be"):
        EngineConfig.model_validate({"batch_invariant": True, field: value})
    assert EngineConfig(batch_invariant=True).model_spec(None).cpu_kernels == "native"
