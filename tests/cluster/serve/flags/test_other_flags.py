"""Every flag of vLLM and SGLang has a state here, in the code and in docs/migrating.md."""

import re
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

from crossdock.cluster import cli
from crossdock.cluster.serve.arguments import _parts
from crossdock.cluster.serve.other_flags import (
    STATES,
    answer,
    known,
    table,
    takes_value,
    unread_variables,
    verdict,
)
from tests.cluster.serve.flags.test_flags import printed_config
from tests.cluster.watch.terminal import run

HERE = Path(__file__).parent
DOCS = HERE.parents[3] / "docs" / "migrating.md"
SERVERS = ("vLLM", "SGLang")
VALUES = {  # an example of a value, as vLLM or SGLang take it; others take none
    "--allowed-local-media-path": "/pictures",
    "--allowed-media-domains": "images.example",
    "--limit-mm-per-prompt": '{"image": 4, "video": 0}',
    "--mm-processor-kwargs": '{"max_pixels": 1003520}',
    "--media-io-kwargs": '{"video": {"num_frames": 16}}',
    "--allowed-origins": '["*"]',
    "--tool-call-parser": "hermes",
    "--reasoning-parser": "qwen3",
    "--api-key": "secret",
    "--attention-backend": "torch",
    "--block-size": "32",
    "--override-generation-config": '{"temperature": 0.5}',
    "--pooler-config": '{"pooling_type": "MEAN"}',
    "--hf-overrides": '{"rope_theta": 7}',
    "--page-size": "32",
    "--speculative-config": '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}',
    "--chat-template": "{{ messages }}",
    "--chat-template-content-format": "openai",
    "--chunked-prefill-size": "8192",
    "--config": "",
    "--default-chat-template-kwargs": '{"enable_thinking": false}',
    "--device": "cuda",
    "--dtype": "bfloat16",
    "--generation-config": "vllm",
    "--gpu-memory-utilization": "0.8",
    "--host": "127.0.0.1",
    "--kv-cache-dtype": "fp8",
    "--kv-events-config": '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557"}',
    "--eplb-config": '{"num_redundant_experts": 8, "log_balancedness": true}',
    "--quantization": "int8",
    "-q": "int8",
    "--kv-cache-memory-bytes": "2G",
    "--long-prefill-token-threshold": "256",
    "--load-format": "runai_streamer",
    "--lora-modules": "sql=adapters/sql",
    "--max-logprobs": "5",
    "--logprobs-mode": "processed_logprobs",
    "--max-lora-rank": "32",
    "--max-loras": "4",
    "--max-model-len": "32k",
    "--max-num-batched-tokens": "8K",
    "--max-num-queued-reqs": "100",
    "--max-num-seqs": "128",
    "--max-prefill-tokens": "1024",
    "--max-queued-requests": "100",
    "--model": "org/x",
    "--model-path": "org/x",
    "--pipeline-parallel-size": "2",
    "--pp-size": "2",
    "-pp": "2",
    "--port": "8001",
    "--revision": "main",
    "--root-path": "/llm",
    "--served-model-name": "mine",
    "--tensor-parallel-size": "2",
    "--tp-size": "2",
    "-tp": "2",
    "--tokenizer": "org/x",
}


def flags_of(server: str) -> list[str]:
    found = known()[server]
    return [*found["switches"], *found["values"], *found.get("several", ())]


def ours() -> set[str]:
    command = cli._import("serve")
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize("server", SERVERS)
def test_every_flag_has_a_state(server: str) -> None:
    same, here = set(table()["servers"][server]["same"]), ours() | {"--model", "--model-path"}
    names = flags_of(server)
    assert len(names) > 300
    assert same <= set(names), "a flag that they do not have cannot be the same"
    assert same <= here, "what is the same exists here"
    assert set(names) & here <= same, "a flag of theirs with a name of ours means the same"
    missing = [name for name in names if name not in same and answer(name) is None]
    assert not missing


@pytest.mark.parametrize("server", SERVERS)
def test_flags_that_are_the_same_take_the_same_values(server: str) -> None:
    without = cache(printed_config)
    for flag in table()["servers"][server]["same"]:
        value = VALUES.get(flag)
        if flag == "--config":
            continue  # test_arguments.py
        model = [] if flag.startswith("--model") else ["org/x"]
        forms = [[flag]] if value is None else [[flag, value], [f"{flag}={value}"]]
        if flag.startswith("--"):
            forms += [
                [form[0].replace("-", "_").replace("__", "--", 1), *form[1:]] for form in forms if "=" not in form[0]
            ]
        configs = [printed_config(*model, *form).model_dump() for form in forms]
        assert all(config == configs[0] for config in configs), flag
        assert configs[0] != without(*model).model_dump() or flag in ("--host", *DEFAULTS), flag


# On anyway, or not printed.
DEFAULTS = ("--enable-auto-tool-choice", "--enable-chunked-prefill", "--enable-prefix-caching", "--api-key")


def test_every_flag_of_tgi_is_ours_or_has_a_line_of_its_own() -> None:
    """`--quantize` begins the name of a flag of SGLang, and was taken for that one."""
    here = ours() | {"--model-id"}
    for flag in flags_of("TGI"):
        assert flag in here or answer(flag) is not None, flag
        name, words = next(iter(_parts([flag, "x"], dict.fromkeys(here, True))))
        assert name == flag or name in ("", "--model-id"), f"{flag} is read as {name}"
        assert "x" in words[-1] or not takes_value().get(flag, True)


def test_beginning_of_a_flag_of_others_is_named_beside_the_flag() -> None:
    """Its user may have meant a flag of a server that is not known here."""
    for written, name, full in (
        ("--warmup=1", "--warmup", "--warmups"),
        ("--swa_full=1", "--swa-full", "--swa-full-tokens-ratio"),
    ):
        result = run("config", "org/x", written)
        assert any(f" {name} (short for {full}): " in line for line in result.stderr.splitlines()), result.stderr


def test_flags_of_older_servers_have_a_line() -> None:
    assert not [flag for flag in flags_of("older") if answer(flag) is None]


def test_flag_stands_once_among_those_of_a_server() -> None:
    for server in known():
        names = flags_of(server)
        assert len(set(names)) == len(names)


def test_flag_has_what_follows_it_in_all_servers_alike() -> None:
    """A flag that is left out takes its value along."""
    with_values = {name for found in known().values() for name in (*found["values"], *found.get("several", ()))}
    switches = {name for found in known().values() for name in found["switches"]}
    assert not with_values & switches


def test_words_that_a_flag_becomes_exist_here() -> None:
    here = ours()
    for group in table()["groups"]:
        if "becomes" in group:
            assert group["becomes"].partition("=")[0].partition(".")[0] in here, group
            assert "use" in group, "what --strict says"
    assert {rule["flag"] for rule in table()["values"]} <= here


def test_secrets_and_other_servers_halves_are_never_left_out() -> None:
    """Without these flags a server would be open, or another one than the line means."""
    for flag in (
        *("--ssl-keyfile", "--ssl-certfile", "--admin-api-key", "--middleware", "--uds", "--headless", "--node-rank"),
        *("--disaggregation-mode", "--kv-transfer-config", "--hf-config-path", "--hf-chat-template-name"),
        *("--logits-processors", "--tool-parser-plugin", "--tokenizer-revision", "--quantization-config"),
    ):
        found = verdict(flag)
        assert found is not None
        assert found.state in ("use", "unsupported")
        assert not found.becomes


def test_no_flag_that_exists_here_has_a_line() -> None:
    """A flag has one state. The line of a flag that exists would never be shown, but stand in the documentation."""
    here = ours()
    assert not [flag for group in table()["groups"] for flag in group["flags"] if flag in here]


def test_no_flag_of_the_table_is_unknown_to_all() -> None:
    names = {name for server in known() for name in flags_of(server)}
    for group in table()["groups"]:
        for flag in group["flags"]:
            assert any(fnmatchcase(name, flag) for name in names), flag


@pytest.mark.parametrize("command", ["serve", "config"])
@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--prefix-eviction", "value"], "--prefix-eviction: gone, leave it out: the least recently used page"),
        (["--uno-lora-path", "x"], "--uno-lora-path: not supported: LoRA"),
        (["--ssl-keyfile", "a"], "--ssl-keyfile: use a gateway with TLS"),
        (["--disaggregation-mode", "prefill"], "--disaggregation-mode: use --pools prefill=N,decode=M in one command"),
        (["--node-rank", "1"], "--node-rank: use ray start --address on each further node"),
        (["--strict", "--dp-size", "4"], "--dp-size: use --pools mixed=N: N replicas"),
        (["--strict", "--context_length=9"], "--context-length: use --max-model-len N"),
        (["--strict", "--enable-metrics"], "--enable-metrics: not needed: /metrics is always on"),
        (["--strict", "--trust-remote-code"], "--trust-remote-code: not needed: no code of a model runs here"),
        (["--strict", "--ep-size", "8"], "--ep-size: use --enable-expert-parallel: whole experts on each rank"),
    ],
)
def test_flag_of_others_ends_the_command_with_its_line(command: str, args: list[str], line: str) -> None:
    result = run(command, "org/x", *args)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {line}")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("written", "ours_", "said"),
    [
        ("--dp-size 4", "--pools mixed=4", "--dp-size: read as --pools mixed=4"),
        ("--quantize marlin", "--quantization gptq", "--quantize: read as --quantization gptq"),
        (
            "--quantize fp8 --num-shard 2 --sharded true",
            "-q fp8 --tp 2",
            "--num-shard: read as --tensor-parallel-size",
        ),
        (
            "--speculate 3",
            '--speculative-config {"method":"ngram","num_speculative_tokens":3}',
            '--speculate: read as --speculative-config {"method": "ngram", "num_speculative_tokens": 3}',
        ),
        (
            "--hostname ::1 -p 81 --kv-cache-dtype fp8_e4m3fn",
            "--host ::1 --port 81 --kv-cache-dtype fp8",
            "-p: read as --port",
        ),
        ("--max-total-tokens 9 --json-output", "", "--max-total-tokens: left out: KV pages get"),
        ("-dp 1", "", "-dp 1: not needed"),
        ("--context_length=9", "--max-model-len 9", "--context-length: read as --max-model-len 9"),
        (
            "--mem-frac 0.7",
            "--gpu-memory-utilization 0.7",
            "--mem-frac (short for --mem-fraction-static): read as --gpu-memory-utilization 0.7",
        ),
        (
            "--disable-overlap",
            "--no-async-scheduling",
            "--disable-overlap (short for --disable-overlap-schedule)",
        ),
        (
            "--max_seq_len 9 --tool-parser hermes",
            "--max-model-len 9 --tool-call-parser hermes",
            "--max-seq-len: read as",
        ),
        ("--api-server-count 2", "--set http.replicas=2", "--api-server-count: read as --set http.replicas=2"),
        ("--mm-processor-cache-gb 0.5", "--set http.media_cache_bytes=536870912", "--mm-processor-cache-gb: read as"),
        (
            "--sampling-defaults openai",
            "--generation-config vllm",
            "--sampling-defaults: read as --generation-config vllm",
        ),
        ("--lora-paths a=b c=d", "--lora-modules a=b c=d", "--lora-paths: read as --lora-modules a=b"),
        (
            "--spec-method ngram",
            '--speculative-config {"method":"ngram"}',
            "",
        ),
        ("--language-model-only", '--limit-mm-per-prompt {"image":0,"video":0}', "--language-model-only: read as"),
        ("--swap-space 4 --port 9", "--port 9", "--swap-space: not needed: a prompt starts only if"),
        ("--cuda-graph-bs 1 2 4 --port 9", "--port 9", "--cuda-graph-bs: not needed: CUDA graphs"),
        ("--no-enable-paged-experts --port 9", "--port 9", "--no-enable-paged-experts: not needed: it is off here"),
        (
            "--enable-eplb --ep-num-redundant-experts 8",
            '--enable-eplb --eplb-config {"num_redundant_experts":8}',
            "--ep-num-redundant-experts: read as --set pools.*.eplb_config.num_redundant_experts=8",
        ),
        (
            '--rope-scaling {"factor":2} --json-model-override-args {"rope_theta":7}',
            '--hf-overrides {"rope_theta":7,"rope_scaling":{"factor":2}}',
            '--rope-scaling: read as --hf-overrides.rope_scaling {"factor":2}',
        ),
        ("--trust-remote-code=false", "", "--trust-remote-code: not needed"),
        ("-O3 -cc.mode 3 --port 9", "--port 9", "-O: not needed: kernels are chosen by device"),
        ("--node-rank 0", "", "--node-rank 0: not needed: this node is the first one"),
        ('--kv-transfer-config {"kv_role":"kv_both"}', "", "--kv-transfer-config"),
        (
            "--speculative-config.method medusa --speculative-config.num_speculative_tokens 1",
            "",
            "--speculative-config {",
        ),
        ('--speculative-config {"method":"ernie_mtp","num_speculative_tokens":1}', "", "--speculative-config {"),
        (
            "--async-scheduling --spec-method mtp",
            '--speculative-config {"method":"mtp"}',
            "--async-scheduling: left out: beside drafts a step begins when",
        ),
        ("--async-scheduling --spec-method medusa", "--async-scheduling", "--speculative-config {"),
        ("--load-format mistral", "", "--load-format mistral: not needed"),
        (
            '--limit-mm-per-prompt {"image":4,"audio":1}',
            '--limit-mm-per-prompt {"image":4,"audio":0}',
            "--limit-mm-per-prompt: audio is left out: sound is not supported",
        ),
        (
            "--reasoning-parser-plugin x/nano_v3_reasoning_parser.py --reasoning-parser nano_v3",
            "",
            "--reasoning-parser nano_v3: not needed: the reasoning of Nemotron 3 is found",
        ),
        ("--attention-backend ROCM_AITER_FA", "", "--attention-backend ROCM_AITER_FA: left out"),
        ("--context-length 9 --max-model-len 8", "--max-model-len 8", "--context-length: left out: --max-model-len is"),
        ("-dp 4 -ep -tp 2", "-tp 8 --enable-expert-parallel", "-dp 4: read as --tensor-parallel-size 8, one replica"),
        (
            "--tp 8 --ep-size 8",
            "--tp 8 --enable-expert-parallel",
            "--ep-size: read as --set pools.*.enable_expert_para",
        ),
        (
            "--tp 8 --ep 1",
            "--tp 8 --no-enable-expert-parallel",
            "--ep: read as --set pools.*.enable_expert_parallel=false",
        ),
        ("--tp 8 --enable-ep-moe", "--tp 8 -ep", "--enable-ep-moe: read as --enable-expert-parallel"),
        ("--dp 8 --enable-dp-attention --tp 8", "--tp 8", "--dp 8: read as the ranks of the one replica"),
    ],
)
def test_flag_of_others_is_read_as_ours_or_left_out_and_said(written: str, ours_: str, said: str) -> None:
    result = run("config", "org/x", *written.split())
    assert result.exit_code == 0, result.output
    assert result.stdout == run("config", "org/x", *ours_.split()).stdout
    assert any(line.startswith(f"warning: {said}") for line in result.stderr.splitlines()), result.stderr


def test_all_mistakes_of_a_line_come_together() -> None:
    """Flags of others, options of no server, and wrong values of flags and settings."""
    result = run(
        *("config", "org/x", "--uds", "socket", "--nobody-has-this", "5", "--max-model-len", "many"),
        *("--speculative-config", "{", "--pools", "=", "--set", "engine.max_num_seq=3", "--port", "0x", "--dp", "two"),
    )
    assert result.exit_code == 2
    named = [line.removeprefix("error: ").partition(":")[0] for line in result.stderr.splitlines()]
    flags = ["--uds", "--nobody-has-this", "--dp", "--max-model-len", "--speculative-config", "--pools", "--port"]
    assert sorted(named) == sorted([*flags, "engine.max_num_seq"])


def test_flag_of_nobody_is_a_mistake() -> None:
    result = run("config", "--nobody-has-this")
    assert result.exit_code == 2
    assert result.stderr == "error: --nobody-has-this: no such option\n"
    assert answer("--nobody-has-this") is None


def test_variables_of_others_that_are_set_are_named() -> None:
    lines = unread_variables({"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_PORT": "", "SGLANG_PORT": "1", "HOME": "/"})
    assert lines == [
        "VLLM_CPU_KVCACHE_SPACE is not read here; use --kv-cache-memory SIZE (2GiB)",
        "SGLANG_PORT is not read here; use --port",
    ]
    assert unread_variables({"VLLM_USE_V1": "1", "VLLM_LOGGING_LEVEL": "INFO", "SGLANG_X": ""}) == [
        "not read here: VLLM_LOGGING_LEVEL, VLLM_USE_V1"
    ]


def test_variables_of_others_are_named_when_a_server_starts() -> None:
    result = run("serve", "--page-size", "0", VLLM_CPU_KVCACHE_SPACE="4")
    assert result.exit_code == 2
    first, second = result.stderr.splitlines()
    assert first == "warning: VLLM_CPU_KVCACHE_SPACE is not read here; use --kv-cache-memory SIZE (2GiB)"
    assert second.startswith("error: --page-size")


@pytest.mark.parametrize("name", ["VLLM_API_KEY", "SGLANG_API_KEY"])
def test_key_in_a_variable_that_is_not_read_ends_the_start(name: str) -> None:
    """Without the flag, the server would be open."""
    result = run("serve", "/no/model", **{name: "secret"})
    assert result.exit_code == 2
    assert f"error: {name} is not read here, and the server would be open: give --api-key" in result.stderr
    assert "secret" not in result.output
    with_key = run("serve", "/no/model", "--api-key", "ours", **{name: "secret"})
    assert "would be open" not in with_key.stderr


def rows() -> list[str]:
    """Return the rows of the table in docs/migrating.md: what a user reads, and the flags that it answers."""
    found = []
    for group in table()["groups"]:
        state = next(state for state in STATES if state in group)
        prefix = "read as" if "becomes" in group else STATES[state]
        found.append(f"| {prefix} {group[state]} | {', '.join(f'`{flag}`' for flag in group['flags'])} |")
    return found


def test_docs_have_a_row_for_every_line() -> None:
    text = DOCS.read_text()
    missing = [row for row in rows() if row not in text]
    assert not missing, "docs/migrating.md lacks:\n" + "\n".join(missing)
    for server in SERVERS:
        assert f"{server} {known()[server]['version']}" in text
        for flag in table()["servers"][server]["same"]:
            assert re.search(rf"`{re.escape(flag)}`", text), flag
