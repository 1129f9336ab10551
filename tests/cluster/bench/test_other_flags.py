"""Command lines of `vllm bench serve`, as their users paste them."""

import shlex

import pytest
from typer.testing import CliRunner

from crossdock.cluster import cli
from crossdock.cluster.bench.other_flags import TranslatedLine, translated

OPTIONS = {each for parameter in cli._import("bench").params for each in parameter.opts if each.startswith("-")}
ARITY = dict.fromkeys(OPTIONS, True) | {"--chat": False, "--repeat-prompts": False}
URL = "http://127.0.0.1:8000"
RANDOM = "--prompt-tokens 1024 --output-tokens 128"


def line(text: str) -> TranslatedLine:
    return translated(shlex.split(text), ARITY)


@pytest.mark.parametrize(
    ("written", "ours"),
    [
        ("http://h --num-requests 4 -c 2", "http://h --num-requests 4 -c 2"),
        ("http://h --chat --model m", "http://h --chat --model m"),
        ("--num-prompts 9 --request-rate 2", f"--num-requests 9 --request-rate 2 {URL}"),
        ("--num_prompts=9 --max_concurrency=3", f"--num-requests 9 --concurrency 3 {URL}"),
        ("--num-prompts 9", f"--num-requests 9 --concurrency 9 {URL}"),
        ("--num-prompts 9 --request-rate inf", f"--num-requests 9 --concurrency 9 {URL}"),
        ("http://h --num-prompts 9 -c 4", "http://h --num-requests 9 -c 4"),
        ("serve --model m --request-rate inf", f"--model m {URL}"),
        ("--base-url http://x:1 --port 9", "http://x:1"),
        ("--host ::1 --port 9 --num-warmups 3", "--warmup 3 http://[::1]:9"),
        ("--dataset-name random", f"{RANDOM} {URL}"),
        (
            "--dataset-name random --random-input-len 7 --random-output-len 8 --random-prefix-len 5",
            f"--prompt-tokens 7 --output-tokens 8 --prefix-tokens 5 {URL}",
        ),
        ("--dataset-name random --dataset-path x --random-range-ratio 0.0", f"{RANDOM} {URL}"),
        ("--backend openai-chat --endpoint /v1/chat/completions", f"--chat {URL}"),
        ("--backend vllm --endpoint /v1/completions --model a --served-model-name b", f"--model b {URL}"),
        ("--goodput ttft:500 tpot:50 --ignore-eos", f"--goodput ttft:500 --goodput tpot:50 {URL}"),
        ("--goodput ttft:500 http://h", "--goodput ttft:500 http://h"),
        ("--header X-Team=dock --disable-tqdm", f"--header 'X-Team: dock' {URL}"),
        ("http://h --header 'X-Team: a=b'", "http://h --header 'X-Team: a=b'"),
        (
            "--save-result --result-filename f.json --percentile-metrics ttft,tpot --metric-percentiles 99 --seed 3",
            f"--json f.json --seed 3 {URL}",
        ),
        ("http://h --nobody-has-this 5", "http://h --nobody-has-this 5"),
        ("--num-prompts 9 --num-requests 8 --request-rate 1", f"--num-requests 8 --request-rate 1 {URL}"),
    ],
)
def test_line_of_vllm_is_read_as_ours(written: str, ours: str) -> None:
    found = line(written)
    assert not found.errors
    assert found.words == shlex.split(ours)
    assert bool(found.notes) >= any(flag in written for flag in ("num-prompts", "disable-tqdm", "dataset"))


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("--dataset-name sharegpt", "--dataset-name sharegpt: not supported: that data set is not read: use --dataset"),
        ("--dataset-path f.json", "--dataset-path: not supported: use --trace FILE: Mooncake's JSONL or Azure's CSV"),
        ("--sharegpt-output-len 9", "--sharegpt-output-len: not supported: that data set is not read"),
        ("--random-range-ratio 0.5", "--random-range-ratio: not supported: the prompts of a run have one length"),
        ("--temperature 1", "--temperature: not supported: requests have temperature 0"),
        ("--backend tgi", "--backend: must be one of vllm, openai, openai-chat, not 'tgi'"),
        ("--endpoint /generate", "--endpoint: must be one of /v1/completions, /v1/chat/completions, not '/generate'"),
        ("--ramp-up-strategy linear", "--ramp-up-strategy: not supported: use --burstiness, or --trace FILE"),
        ("--profile", "--profile: not supported: use crossdock tune"),
    ],
)
def test_flag_that_would_be_another_load_is_refused_with_what_there_is(written: str, said: str) -> None:
    ended = CliRunner().invoke(cli.app, ["bench", "http://h", *shlex.split(written), "--num-prompts", "3"])
    assert ended.exit_code == 2
    [error] = [each for each in ended.stderr.splitlines() if each.startswith("error: ")]
    assert error.startswith(f"error: {said}")


def test_translated_line_measures_a_server() -> None:
    """The words reach the command: no server listens there."""
    written = "serve --host 127.0.0.1 --port 1 --dataset-name random --num-prompts 2 --max-concurrency 1 --ignore-eos"
    ended = CliRunner().invoke(cli.app, ["bench", *shlex.split(written)])
    assert ended.exit_code == 1
    assert "warning: --num-prompts: read as --num-requests 2" in ended.stderr
    assert "http://127.0.0.1:1" in ended.stderr


def test_words_that_flags_become_exist_here() -> None:
    from crossdock.cluster.bench import other_flags

    assert {*other_flags._RENAMED.values(), *other_flags._LENGTHS, "--chat"} <= OPTIONS
    assert OPTIONS.isdisjoint({*other_flags._RENAMED, *other_flags._ADDRESS, *other_flags._APIS})
