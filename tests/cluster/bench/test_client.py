"""One endpoint under test: addresses, the fields it takes, prompts of exact length, timeouts."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from crossdock.cluster.bench.client import Server
from crossdock.cluster.bench.http import BenchError
from crossdock.cluster.bench.metrics import Sample
from crossdock.cluster.bench.workloads import WORDS, Job, Segment
from tests.cluster.bench.scripted import Scripted, measure


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://h:port"])
def test_wrong_address_raises(url: str) -> None:
    with pytest.raises(BenchError):
        Server(url)


@pytest.mark.parametrize("url", ["h:81", "http://h:81/", "http://h:81/v1", "http://h:81/v1/"])
def test_address_in_any_form_is_the_same_url(url: str) -> None:
    assert Server(url).url == "http://h:81"


@pytest.mark.parametrize(
    ("setting", "check"),
    [
        ({"refused_fields": ("continuous_usage_stats",)}, lambda b: b["stream_options"] == {"include_usage": True}),
        ({"refused_fields": ("ignore_eos",)}, lambda b: "ignore_eos" not in b and isinstance(b["prompt"], list)),
        (
            {"refused_fields": ("ignore_eos", "stream_options")},
            lambda b: b.keys().isdisjoint({"ignore_eos", "stream_options"}),
        ),
        ({"tokenizes": False}, lambda b: isinstance(b["prompt"], str)),
        ({"completions": False}, lambda b: b["messages"][0]["role"] == "user"),
    ],
)
def test_field_that_the_server_refuses_is_left_out(
    scripted: tuple[Scripted, str], setting: dict[str, Any], check: Any
) -> None:
    script, url = scripted
    for name, value in setting.items():
        setattr(script, name, value)
    result = measure(url, num_requests=3, output_tokens=6, prompt_tokens=30)
    assert check(script.measured[-1])
    assert (result.summary["requests_ok"], result.summary["output_tokens"]) == (3, 18)
    assert len(result.notes) == len(setting.get("refused_fields", ())) + (not setting.get("completions", True))


def test_server_without_classes_is_still_measured_by_class(scripted: tuple[Scripted, str]) -> None:
    script, url = scripted
    script.refused_fields = ("service_tier",)
    result = measure(url, num_requests=2, output_tokens=4, service_tier="interactive")
    assert "service_tier" not in script.measured[-1]
    assert isinstance(script.measured[-1]["prompt"], list)  # nothing else was given up
    assert any("asking without service_tier" in note for note in result.notes)
    assert result.summary["slo"]["classes"]["interactive"]["requests_ok"] == 2


def test_chat_prompt_with_template_has_the_length_asked_for(scripted: tuple[Scripted, str]) -> None:
    script, url = scripted
    script.template_tokens = 11
    result = measure(url, num_requests=2, output_tokens=4, prompt_tokens=90, chat=True)
    assert result.summary["prompt_tokens"] == 180
    assert {script.prompt_tokens(body) for body in script.measured} == {90}


def test_server_without_usage_gets_one_word_per_token(scripted: tuple[Scripted, str]) -> None:
    script, url = scripted
    script.usage, script.refused_fields = False, ("continuous_usage_stats",)
    result = measure(url, num_requests=2, output_tokens=4, prompt_tokens=25, chat=True)
    assert result.summary["output_tokens"] == 8
    assert any("one token per word" in note for note in result.notes)


def test_local_tokenizer_gives_the_prompts_ids(scripted: tuple[Scripted, str], tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    script, url = scripted
    script.tokenizes = False
    tokenizer = Tokenizer(models.WordLevel({word: 5000 + i for i, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    measure(url, num_requests=1, output_tokens=3, tokenizer=tmp_path)
    assert all(token >= 5000 for token in script.measured[0]["prompt"])
    with pytest.raises(BenchError, match="there is no"):
        measure(url, tokenizer=tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("status", "advice"), [(401, "the reason; give --api-key"), (503, "the reason; give one with --model")]
)
def test_server_that_lists_no_model_is_refused_with_its_own_reason(
    scripted: tuple[Scripted, str], status: int, advice: str
) -> None:
    script, url = scripted
    script.models_refusal = status, "the reason"
    with pytest.raises(BenchError, match=f"lists no model: HTTP {status}: {advice}"):
        measure(url, num_requests=1)


def test_prompts_of_two_runs_share_nothing_unless_repeated(scripted: tuple[Scripted, str]) -> None:
    script, url = scripted
    given = {
        "workload": "shared-prefix",
        "num_requests": 2,
        "prefix_tokens": 50,
        "prompt_tokens": 20,
        "output_tokens": 3,
    }
    measure(url, **given)
    measure(url, **given)
    first, second, later, _ = sorted((b["prompt"] for b in script.measured), key=script_order(script))
    assert first[:50] == second[:50]
    assert first[50:] != second[50:]
    assert first[:50] != later[:50]
    script.bodies.clear()
    measure(url, **given, repeat_prompts=True)
    measure(url, **given, repeat_prompts=True)
    prompts = [tuple(body["prompt"]) for body in script.measured]
    assert len(prompts) == 4
    assert len(set(prompts)) == 2


def script_order(script: Scripted) -> Any:
    order = [body["prompt"] for body in script.measured]
    return lambda prompt: order.index(prompt)


def test_request_beyond_the_timeout_has_failed(scripted: tuple[Scripted, str]) -> None:
    script, url = scripted

    async def slow() -> Sample:
        server = Server(url, timeout=240)
        await server.connect()
        script.first_delay, server.timeout = 30, 0.1
        return await server.run(Job((Segment("x", 4),), 3), Sample("request", 3, 4))

    assert asyncio.run(slow()).error == "no end after 0 s"
