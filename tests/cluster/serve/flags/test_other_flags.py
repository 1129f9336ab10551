"""Every flag of vLLM and SGLang has a state here, in the code and in docs/migrating.md."""

import re
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from crossdock.cluster import cli
from crossdock.cluster.serve.other_flags import answer, table, unread_variables
from tests.cluster.serve.flags.test_flags import printed_config
from tests.cluster.watch.terminal import run

HERE = Path(__file__).parent
DOCS = HERE.parents[3] / "docs" / "migrating.md"
SERVERS = {"vLLM": "vllm_flags.txt", "SGLang": "sglang_flags.txt"}
OLD = """
    --calculate-kv-scales --disable-async-output-proc --disable-log-requests --enable-reasoning -O
    --guided-decoding-backend
    --logits-processor-pattern --max-seq-len-to-capture --multi-step-stream-outputs --num-lookahead-slots
    --num-scheduler-steps --override-pooler-config --preemption-mode --rope-scaling --rope-theta
    --scheduler-delay-factor --swap-space --task --use-v2-block-manager
    --disable-frontend-multiprocessing --disable-logprobs-during-spec-decoding --enable-prompt-adapter --engine-use-ray
    --expand-tools-even-if-tool-choice-none --full-cuda-graph --guided-decoding-disable-any-whitespace
    --guided-decoding-disable-fallback --max-context-len-to-capture --max-prompt-adapters --ngram-prompt-lookup-max
    --override-attention-dtype --override-neuron-config --tokenizer-pool-size --tokenizer-pool-type
    --typical-acceptance-sampler-posterior-alpha --worker-use-ray --dp
"""  # of vLLM before 0.32; --dp is how SGLang's users shorten --dp-size
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
    lines = (HERE / SERVERS[server]).read_text().splitlines()
    assert table()["servers"][server]["version"] in lines[0]
    return " ".join(lines[1:]).split()


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


def test_flags_of_older_vllm_have_a_line() -> None:
    assert not [flag for flag in OLD.split() if answer(flag) is None]


def test_no_flag_that_exists_here_has_a_line() -> None:
    """A flag has one state. The line of a flag that exists would never be shown, but stand in the documentation."""
    here = ours()
    assert not [flag for group in table()["groups"] for flag in group["flags"] if flag in here]


def test_no_flag_of_the_table_is_unknown_to_all() -> None:
    known = {*flags_of("vLLM"), *flags_of("SGLang"), *OLD.split()}
    for group in table()["groups"]:
        for flag in group["flags"]:
            assert any(fnmatchcase(name, flag) for name in known), flag


@pytest.mark.parametrize("command", ["serve", "config"])
@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--dp-size", "4"], "--dp-size: use --pools mixed=N: N replicas, and requests are routed between them"),
        (["--context_length=9"], "--context-length: use --max-model-len N"),
        (["--prefix-eviction", "value"], "--prefix-eviction: gone, leave it out: the least recently used page"),
        (["--enable-metrics"], "--enable-metrics: not needed: /metrics is always on"),
        (["--runner", "pooling"], "--runner: not needed: a model that generates serves /v1/embeddings"),
        (["--file-storage-path", "x"], "--file-storage-path: use --batch-folder DIR"),
        (["--trust-remote-code"], "--trust-remote-code: not supported: code that comes with a model"),
        (["--uno-lora-path", "x"], "--uno-lora-path: not supported: LoRA"),
        (["--ssl-keyfile", "a"], "--ssl-keyfile: use a gateway with TLS"),
        (["--speculative-anything-new", "a"], "--speculative-anything-new: not supported: drafts of other kinds"),
    ],
)
def test_flag_of_others_ends_the_command_with_its_line(command: str, args: list[str], line: str) -> None:
    result = run(command, "org/x", *args)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {line}")
    assert len(result.stderr.splitlines()) == 1


def test_flag_of_nobody_is_a_mistake() -> None:
    result = run("config", "--nobody-has-this")
    assert result.exit_code == 2
    assert "No such option" in result.stderr
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


def rows() -> list[str]:
    """Return the rows of the table in docs/migrating.md: what a user reads, and the flags that it answers."""
    states = {"use": "use", "needless": "not needed:", "unsupported": "not supported:"}
    return [
        f"| {states[state]} {group[state]} | {', '.join(f'`{flag}`' for flag in group['flags'])} |"
        for group in table()["groups"]
        for state in states
        if state in group
    ]


def test_docs_have_a_row_for_every_line() -> None:
    text = DOCS.read_text()
    missing = [row for row in rows() if row not in text]
    assert not missing, "docs/migrating.md lacks:\n" + "\n".join(missing)
    for server in SERVERS:
        found = table()["servers"][server]
        assert f"{server} {found['version']}" in text
        for flag in found["same"]:
            assert re.search(rf"`{re.escape(flag)}`", text), flag


def test_table_is_in_the_package() -> None:
    project: dict[str, Any] = __import__("tomllib").loads((HERE.parents[3] / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"]["crossdock.cluster.serve"] == ["other_flags.yaml"]
