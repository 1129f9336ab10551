"""`LLM`: tokens, log-probabilities and vectors are transformers' own, and nothing outlives the object."""

import _thread
import asyncio
import gc
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from crossdock import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from crossdock.cluster.offline.settings import offline_configuration
from tests.cluster.offline.conftest import SIZES, reference

PROMPTS = [[5, 9, 60], [7] * 40, [3 + i % 90 for i in range(150)], "The quick brown fox", "a", {"prompt": "lazy dog"}]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@torch.inference_mode()
def greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    """Return transformers' likeliest tokens, one forward pass each."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference(folder)(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@torch.inference_mode()
def logprobs_of(folder: Path, tokens: list[int]) -> torch.Tensor:
    """Return the log-probabilities [T, V] of the token after each of `tokens`."""
    return reference(folder)(torch.tensor([tokens])).logits[0].double().log_softmax(-1)


def test_generate_of_texts_and_token_ids_gives_transformers_greedy_tokens(llm: LLM, small_model_dir: Path) -> None:
    found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for prompt, one in zip(PROMPTS, found, strict=True):
        text = prompt["prompt"] if isinstance(prompt, dict) else prompt
        ids = llm.get_tokenizer().encode(text) if isinstance(text, str) else text
        (output,) = one.outputs
        assert one.prompt_token_ids == ids
        assert one.prompt == (text if isinstance(text, str) else None)
        assert output.token_ids == greedy(small_model_dir, ids, 12)
        whole = llm.get_tokenizer().decode(output.token_ids, skip_special_tokens=True)
        assert output.text.replace("\ufffd", "") == whole.replace("\ufffd", "")  # half a character is not shown
        assert (output.finish_reason, one.finished) == ("length", True)


def test_logprobs_of_prompt_and_output_are_transformers(llm: LLM, small_model_dir: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (one,) = llm.generate([5, 9, 60, 8], params, use_tqdm=False)
    (output,) = one.outputs
    wanted = logprobs_of(small_model_dir, [*one.prompt_token_ids, *output.token_ids])
    assert one.prompt_logprobs is not None
    assert output.logprobs is not None
    assert one.prompt_logprobs[0] is None
    found = [*one.prompt_logprobs[1:], *output.logprobs]
    for position, token in enumerate([*one.prompt_token_ids[1:], *output.token_ids]):
        entry = found[position]
        assert entry is not None
        assert entry[token].logprob == pytest.approx(float(wanted[position, token]), abs=2e-3)
        best = int(wanted[position].argmax())
        assert (entry[best].rank, entry[best].decoded_token) == (1, llm.get_tokenizer().decode([best]))
    total = sum(entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True))
    assert output.cumulative_logprob == pytest.approx(total)


def test_processed_logits_of_drafted_tokens_are_transformers(small_model_dir: Path) -> None:
    """Tokens of a prompt have the logits as they are; those of the output are over the temperature, and cut."""
    drafts = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}'
    settings = {"logprobs_mode": "processed_logits", "speculative_config": drafts, "max_num_seqs": 4, **SIZES}
    with LLM(str(small_model_dir), **settings) as llm:
        params = SamplingParams(temperature=0.5, top_k=2, seed=3, max_tokens=24, logprobs=3, prompt_logprobs=1)
        (one,) = llm.generate([5, 9, 60, 8] * 5, params, use_tqdm=False)
        verification = llm.engine.scheduler.verification
        assert verification is not None
        assert verification.totals.num_drafts > 0
    (output,) = one.outputs
    tokens = [*one.prompt_token_ids, *output.token_ids]
    with torch.inference_mode():
        wanted = reference(small_model_dir)(torch.tensor([tokens])).logits[0]
    assert one.prompt_logprobs is not None
    assert output.logprobs is not None
    for position, entry in enumerate([*one.prompt_logprobs[1:], *output.logprobs]):
        assert entry is not None
        scale = 1 if position < len(one.prompt_token_ids) - 1 else 2
        assert entry[tokens[position + 1]].logprob == pytest.approx(
            float(wanted[position, tokens[position + 1]]) * scale, abs=4e-3
        )
        assert sum(each.logprob > -1e9 for each in entry.values()) <= 2, "top_k cuts the third"


def test_parameters_for_each_prompt_stop_strings_and_n_hold(llm: LLM) -> None:
    whole = llm.generate("The quick", GREEDY, use_tqdm=False)[0].outputs[0].text
    stop = whole[3:5]
    params = [
        SamplingParams(temperature=0, max_tokens=12, stop=stop, ignore_eos=True),
        SamplingParams(n=3, seed=7, max_tokens=5, ignore_eos=True),
        SamplingParams(seed=7, max_tokens=5, ignore_eos=True, min_p=0.01, logit_bias={9: 100.0}),
        SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(choice=["brown", "lazy"])),
    ]
    stopped, several, biased, chosen = llm.generate(["The quick"] * 4, params, use_tqdm=False)
    assert stopped.outputs[0].text == whole[: whole.index(stop)]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)
    assert [output.index for output in several.outputs] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in several.outputs}) == 3
    assert biased.outputs[0].token_ids == [9] * 5
    assert chosen.outputs[0].text in ("brown", "lazy")


def test_seed_decides_all_outputs_of_an_object(small_model_dir: Path) -> None:
    def drawn(seed: int) -> list[list[int]]:
        with LLM(str(small_model_dir), seed=seed, max_num_seqs=4, **SIZES) as llm:
            found = llm.generate([[5, 6]] * 3, SamplingParams(max_tokens=6, ignore_eos=True), use_tqdm=False)
            return [one.outputs[0].token_ids for one in found]

    first = drawn(1)
    assert len({tuple(tokens) for tokens in first}) == 3
    assert drawn(1) == first
    assert drawn(2) != first


def test_chat_answers_the_rendered_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Hi"}]
    text = llm.get_tokenizer().render_chat(conversation)
    (wanted,) = llm.generate(text, GREEDY, use_tqdm=False)
    one, two = llm.chat([conversation, conversation], GREEDY, use_tqdm=False)
    assert one.prompt_token_ids == wanted.prompt_token_ids
    assert one.outputs == two.outputs == wanted.outputs
    (own,) = llm.chat(conversation, GREEDY, chat_template="{{ messages[0].content }}", use_tqdm=False)
    assert own.prompt_token_ids == llm.get_tokenizer().encode("Hi")


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embed_gives_transformers_vectors(llm: LLM, small_model_dir: Path, pooling: str) -> None:
    prompts = [[5, 9, 60], [3 + i % 90 for i in range(150)]]
    for prompt, found in zip(prompts, llm.embed(prompts, pooling=pooling, use_tqdm=False), strict=True):
        with torch.inference_mode():
            hidden = reference(small_model_dir).base_model(torch.tensor([prompt])).last_hidden_state[0]
        vector = (hidden[-1] if pooling == "last" else hidden.mean(0)).double().numpy()
        np.testing.assert_allclose(found.outputs.embedding, vector / np.linalg.norm(vector), atol=2e-4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda llm: llm.generate("a", SamplingParams(temperature=3.0)), "temperature"),
        (lambda llm: llm.generate("a", SamplingParams(use_beam_search=True)), "use_beam_search.*use 'n'"),
        (lambda llm: llm.generate("a", SamplingParams(temperatur=1.0)), "Did you mean 'temperature'"),
        (lambda llm: llm.generate("a" * 5000), "context"),
        (lambda llm: llm.generate(["a", [9999]]), "prompt"),
        (lambda llm: llm.generate({"prompt": "a", "multi_modal_data": {}}), "chat takes pictures"),
        (lambda llm: llm.generate(["a", "b"], [GREEDY]), "1 for 2 prompts"),
        (lambda llm: llm.chat([{"role": "user", "content": 3}]), "messages"),
        (lambda llm: llm.embed("a", pooling="max"), "pooling"),
    ],
)
def test_wrong_request_raises_value_error_that_names_the_field(llm: LLM, make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(llm)
    assert llm.generate("a", GREEDY, use_tqdm=False)[0].finished


def test_name_of_vllms_class_that_does_not_exist_says_what_to_use(llm: LLM) -> None:
    with pytest.raises(AttributeError, match="beam_search does not exist here: use n"):
        llm.beam_search(["a"])
    assert not hasattr(llm, "other")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"port": 8000}, "port is not accepted: it is of a server's port"),
        ({"pools": "mixed=2"}, "pools is not accepted"),
        ({"hf_overrides": {"model_type": "x"}}, "model_type cannot be replaced"),
        ({"enable_lora": True}, "enable_lora is not accepted: a server has adapters"),
        ({"max_model_length": 5}, "did you mean max_model_len"),
        ({"dtype": "int3"}, "dtype"),
    ],
)
def test_settings_that_an_engine_lacks_are_refused_with_the_reason(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        offline_configuration(None, settings)


def test_argument_without_which_no_answer_changes_is_left_out_with_a_warning() -> None:
    """Its line is that of the flag of `crossdock serve`."""
    given = {"swap_space": 4, "trust_remote_code": True, "enable_paged_experts": True, "disable_log_stats": True}
    with pytest.warns(UserWarning, match="^swap_space|") as said:
        config = offline_configuration("somewhere", given)
    assert config == offline_configuration("somewhere", {})
    assert [str(each.message).partition(":")[0] for each in said] == list(given)
    with pytest.raises(ValueError, match="swap_space: not needed: a prompt starts only if"):
        offline_configuration("somewhere", {"swap_space": 4, "strict": True})


def test_settings_of_vllm_and_of_serve_reach_the_engine() -> None:
    settings = {"block_size": 32, "tensor_parallel_size": 2, "dtype": "half", "kv_cache_memory_bytes": "3GiB"}
    settings["enable_expert_parallel"] = True
    config = offline_configuration("somewhere", {**settings, "set": ["engine.chunk_policy=adaptive"]})
    spec = config.replica_spec(config.pools[0])
    assert (spec.engine.page_size, spec.num_ranks, spec.model.dtype) == (32, 2, "float16")
    assert spec.enable_expert_parallel
    del settings["enable_expert_parallel"]
    for further, is_whole in (({}, None), ({"enable_eplb": True}, True), ({"enable_expert_parallel": False}, False)):
        open_config = offline_configuration("somewhere", settings | further)
        assert open_config.replica_spec(open_config.pools[0]).enable_expert_parallel is is_whole
    assert (spec.engine.kv_cache_memory, spec.engine.chunk_policy) == (3 << 30, "adaptive")
    assert spec.engine.default_slo_class == "batch"


@pytest.fixture
def plain_interrupts() -> Iterator[None]:
    """Handle SIGINT as a program does, not as a run of tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_interrupt_ends_all_requests_and_the_next_call_is_served(llm: LLM, plain_interrupts: None) -> None:
    begun = threading.Event()

    def bar(**_options: Any) -> Any:
        return Bar(begun)

    def interrupt() -> None:
        assert begun.wait(240)
        _thread.interrupt_main()

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    endless = SamplingParams(max_tokens=400, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a"] * 200, [GREEDY, *[endless] * 199], use_tqdm=bar)
    interrupting.join(240)
    assert not llm.engine.has_work
    assert llm.engine.pages.block_pool.num_available == llm.engine.pages.num_pages
    assert llm.generate("a", GREEDY, use_tqdm=False)[0].finished


class Bar:
    """A progress bar that notes the first update."""

    def __init__(self, begun: threading.Event) -> None:
        self._begun = begun

    def update(self, _count: int) -> None:
        self._begun.set()

    def close(self) -> None: ...


async def test_generate_inside_a_running_loop_is_served(llm: LLM) -> None:
    """As in a notebook."""
    found: list[RequestOutput] = llm.generate("a", GREEDY, use_tqdm=False)
    await asyncio.sleep(0)
    assert found[0].outputs[0].finish_reason == "length"


def test_closed_model_frees_its_memory_and_leaves_no_process(small_model_dir: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    threads = set(threading.enumerate())
    llm = LLM(str(small_model_dir), max_num_seqs=4, **SIZES)
    llm.generate("a", GREEDY, use_tqdm=False)
    model = weakref.ref(llm.engine.model)
    llm.close()
    del llm
    gc.collect()
    assert model() is None
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    assert {thread for thread in threading.enumerate() if not thread.daemon} <= threads


@pytest.mark.soak
def test_two_ranks_give_the_tokens_of_one(small_model_dir: Path, llm: LLM) -> None:
    before = {child.pid for child in psutil.Process().children()}
    wanted = [one.outputs[0].token_ids for one in llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False)]
    with LLM(str(small_model_dir), tensor_parallel_size=2, max_num_seqs=4, **SIZES) as divided:
        found = [one.outputs[0].token_ids for one in divided.generate(PROMPTS[:3], GREEDY, use_tqdm=False)]
    assert found == wanted
    assert {child.pid for child in psutil.Process().children()} - before == set()


def test_import_of_the_class_loads_no_ray() -> None:
    lines = "import crossdock, sys\nassert 'torch' not in sys.modules\ncrossdock.LLM\nassert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", lines], check=True, timeout=240)
