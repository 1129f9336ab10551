"""Command lines as users of vLLM and SGLang write them."""

import json
from pathlib import Path

import pytest
import yaml

from crossdock.cluster.serve.arguments import translated
from crossdock.workers.model.model_spec import FITTING
from tests.cluster.serve.flags.test_flags import printed_config
from tests.cluster.watch.terminal import run

ARITY = {
    "--size": True,
    "--max-model-len": True,
    "--on": False,
    "--mixed": False,
    "--no-mixed": False,
    "-c": True,
    "--config": True,
}
ARITY |= {"--served-model-name": True, "--api-key": True, "-tp": True, "--settings": True, "--plain": False}


def words_of(args: list[str]) -> list[str]:
    line = translated(args, ARITY)
    assert not line.errors
    return [word for _, words in line.parts for word in words]


@pytest.mark.parametrize(
    ("written", "ours"),
    [
        ("--max_model_len 5", "--max-model-len=5"),
        ("--max_model_len=a_b", "--max-model-len=a_b"),
        ("--max-model-len --on", "--max-model-len=--on"),
        ("-tp 2 -tp=2", "-tp 2 -tp 2"),
        ("--model a/b --on", "a/b --on"),
        ("--model=a/b", "a/b"),
        ("--model-path a/b", "a/b"),
        ("m --served-model-name x y --on", "m --served-model-name=x --served-model-name y --on"),
        ("--served-model-name x m", "--served-model-name=x m"),
        ("m --api-key x -- --y z", "m --api-key=x -- --y z"),
        ("--size -1 --on", "--size=-1 --on"),
        ("--size", "--size"),
        ("--size a.b", "--size=a.b"),
        ("--mixed=false --no-mixed=true --mixed=TRUE", "--no-mixed --no-mixed --mixed"),
        ("--mixed False m --mixed true --on", "--no-mixed m --mixed --on"),
        ("--mixed=maybe --on=false", "--mixed=maybe --on=false"),
    ],
)
def test_written_form_becomes_ours(written: str, ours: str) -> None:
    assert words_of(written.split()) == ours.split()


def test_names_may_be_shortened_where_one_flag_alone_begins_so() -> None:
    assert words_of(["--max-model", "5", "--plai"]) == ["--max-model-len=5", "--plain"]
    assert translated(["--max_mod=5"], ARITY).errors == []
    (line,) = translated(["m", "--max-num", "5"], ARITY).errors
    assert line.startswith("--max-num: short for several: --max-num-active-seqs, --max-num-batched-tokens")


def test_flags_of_others_get_one_line_each() -> None:
    args = "m --swap_space 4 --hf-overrides.a.b 1 --swap-space 8 --trust-remote-code --uds s"
    line = translated(args.split(), ARITY)
    assert [note.partition(":")[0] for note in line.notes] == ["--swap-space", "--trust-remote-code"]
    assert [error.partition(":")[0] for error in line.errors] == ["--hf-overrides", "--uds"]
    assert line.parts == [("", ["m"])], "their values are no MODEL"


def test_strict_line_refuses_every_flag_of_others() -> None:
    line = translated(["m", "--swap-space", "4", "--context-length", "8", "--strict"], ARITY | {"--strict": False})
    assert line.notes == []
    assert [error.partition(":")[0] for error in line.errors] == ["--swap-space", "--context-length"]


def test_limits_of_pictures_may_have_vllms_sizes_beside_the_count() -> None:
    limits = '{"image": 4, "video": {"count": 2, "num_frames": 32, "width": 512}}'
    assert printed_config("--limit-mm-per-prompt", limits).http.limit_mm_per_prompt == {"image": 4, "video": 2}
    result = run("config", "--limit-mm-per-prompt", '{"video": {"num_frames": 32}}')
    assert result.exit_code != 0
    assert "--limit-mm-per-prompt: video: must" in result.output


def test_file_of_flags_gives_what_the_command_line_leaves_out(tmp_path: Path) -> None:
    """vLLM's and SGLang's form of --config."""
    file = tmp_path / "vllm.yaml"
    file.write_text("model: org/y\nmax_model_len: 16K\nplain: true\nmixed: false\nsettings: {a: [1]}\nsize: null\n")
    words = words_of(["-c", str(file), "--on"])
    assert words == ["org/y", "--max-model-len=16K", "--plain", "--no-mixed", '--settings={"a": [1]}', "--on"]
    assert words_of(["m", "--config", str(file), "--max-model-len", "1"])[-2:] == ["m", "--max-model-len=1"]


def test_model_of_the_command_line_wins_over_that_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("model: org/y\nport: 9\nserved-model-name: [a, b]\nenable-prefix-caching: false\n")
    config = printed_config("org/x", "--config", str(file), "--max-model-len", "4k")
    assert (config.model.path, config.model.max_model_len, config.http.port) == ("org/x", 4000, 9)
    assert (config.model.served_name, config.http.model_aliases) == ("a", ("b",))
    assert not config.engine.enable_prefix_caching


def test_configuration_of_ours_is_no_file_of_flags(tmp_path: Path) -> None:
    ours = tmp_path / "ours.yaml"
    for text in ("engine: {max_num_seqs: 4}\n", "model: {path: a}\nmax-model-len: 4\n", "engin: 4\n", "[1]\n", "a: ["):
        ours.write_text(text)
        assert words_of(["-c", str(ours)]) == ["-c", str(ours)]
    assert words_of(["-c", "absent"]) == ["-c", "absent"]


def test_flags_in_a_file_that_are_missing_here_get_their_line(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("model: org/y\ntrust-remote-code: true\nuds: socket\n")
    result = run("config", "--config", str(file))
    assert result.exit_code == 2
    assert [line.split()[:2] for line in result.stderr.splitlines()] == [
        ["warning:", "--trust-remote-code:"],
        ["error:", "--uds:"],
    ]


@pytest.mark.parametrize(
    ("text", "number"),
    [("8192", 8192), ("8k", 8000), ("8K", 8192), ("25.6k", 25_600), ("1M", 1 << 20), ("2g", 2 * 10**9)],
)
def test_numbers_have_vllms_suffixes(text: str, number: int) -> None:
    assert printed_config("--max-num-batched-tokens", text).engine.max_num_batched_tokens == number
    assert printed_config(f"--max_model_len={text}").model.max_model_len == number
    if number > 10**6:
        assert printed_config("--kv-cache-memory-bytes", text).engine.kv_cache_memory == number


def test_values_that_are_no_numbers_are_named() -> None:
    for value in ("8.5K", "many"):
        result = run("config", "--max-model-len", value)
        assert (result.exit_code, result.stderr) == (
            2,
            f"error: --max-model-len: must be a whole number, not '{value}'\n",
        )


@pytest.mark.parametrize("value", ["auto", "-1"])
def test_context_that_fits_the_memory_is_asked_for_as_in_vllm(value: str) -> None:
    for args in ([f"--max-model-len={value}"], ["--max-model-len", value], ["--set", f"model.max_model_len={value}"]):
        assert printed_config(*args).model.max_model_len == FITTING


@pytest.mark.parametrize("value", ["0", "-2"])
def test_context_of_no_tokens_is_refused(value: str) -> None:
    result = run("config", f"--max-model-len={value}")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --max-model-len: ")


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["org/x", "org/y"], "'org/y': MODEL is 'org/x' already"),
        (["org/x", "--model", "org/y"], "'org/y': MODEL is 'org/x' already"),
        (["--model"], "--model: a hub name or a directory must follow"),
        (
            ["org/x", "-O3", "--strict"],
            "-O: not needed: kernels are chosen by device, and attention by --attention-backend",
        ),
        (
            ["--pooler-config.a", "1", "--pooler-config.a.b", "2"],
            "--pooler-config.a.b: a part of a value that is given as a whole, too",
        ),
    ],
)
def test_command_line_that_cannot_be_meant_ends_with_one_line(args: list[str], line: str) -> None:
    result = run("config", *args)
    assert (result.exit_code, result.stderr) == (2, f"error: {line}\n")


def test_flag_without_its_value_is_refused_by_name() -> None:
    for flag in ("--host", "--revision"):
        result = run("config", "org/x", flag)
        assert result.exit_code == 2
        assert f"Option '{flag}' requires an argument" in result.stderr


def test_parts_of_a_json_value_are_joined_with_the_whole() -> None:
    parts = ["--speculative_config.method", "ngram", "--speculative-config.num_speculative_tokens=3"]
    whole = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}']
    rest = ["--speculative-config", '{"num_speculative_tokens": 3}', *parts[:2]]
    assert printed_config(*parts) == printed_config(*whole) == printed_config(*rest) != printed_config()
    mixture = run("config", "--speculative-config", "garbage", *parts)
    assert (mixture.exit_code, "'garbage' is not a JSON object" in mixture.stderr) == (2, True)
    nested = printed_config("--media-io-kwargs.video.num_frames", "16", "--media-io-kwargs.video.fps", "2").http
    assert nested == printed_config("--media-io-kwargs", '{"video": {"num_frames": 16, "fps": 2}}').http


@pytest.mark.parametrize(
    ("flag", "theirs", "ours"),
    [
        ("--dtype", "half", "float16"),
        ("--kv-cache-dtype", "fp8_e4m3", "fp8"),
        ("--attention-backend", "TRITON_ATTN", "triton"),
        ("--attention-backend", "torch_native", "torch"),
        ("--attention-backend", "fa3", "flash_attn_3"),
    ],
)
def test_words_of_others_mean_ours(flag: str, theirs: str, ours: str) -> None:
    assert printed_config(flag, theirs) == printed_config(flag, ours) != printed_config()


def test_words_that_mean_nothing_here_are_refused_with_ours() -> None:
    refused = run("config", "--attention-backend", "FLASHING")
    assert refused.exit_code == 2
    named = "'auto', 'triton', 'flash_attn', 'flash_attn_3', 'flashinfer' or 'torch'"
    assert f"--attention-backend: must be {named}" in refused.stderr


def test_json_values_and_lists_are_read() -> None:
    config = printed_config(
        "--default-chat-template-kwargs", '{"enable_thinking": false}', "--allowed-origins", '["http://a", "http://b"]'
    )
    assert config.http.default_chat_template_kwargs == {"enable_thinking": False}
    assert config.http.allowed_origins == ("http://a", "http://b")
    assert printed_config("--allowed-origins", "*").http.allowed_origins == ("*",)
    for flag in ("--default-chat-template-kwargs", "--allowed-origins"):
        result = run("config", flag, "[1")
        assert (result.exit_code, result.stderr) == (2, f"error: {flag}: '[1' is not JSON\n")
    refused = run("config", "--default-chat-template-kwargs", json.dumps({"tools": []}))
    assert "--default-chat-template-kwargs: must not set tools" in refused.stderr


def test_revision_is_part_of_the_name_of_a_hub_model(tmp_path: Path) -> None:
    assert printed_config("org/x", "--revision", "v1").model.path == "org/x@v1"
    for args in (["--revision", "v1"], ["org/x@v2", "--revision", "v1"], [str(tmp_path), "--revision", "v1"]):
        result = run("config", *args)
        assert result.exit_code == 2
        assert "--revision v1 needs a MODEL from the hub" in result.stderr


def test_whole_value_on_the_command_line_wins_over_parts_in_a_file_of_flags(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("speculative-config.method: suffix\nmax-model-len: 100\n")
    whole = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}']
    config = printed_config("--config", str(file), *whole)
    assert config.engine.speculative_config == printed_config(*whole).engine.speculative_config
    assert config.model.max_model_len == 100


def test_printed_configuration_of_a_file_of_flags_is_a_configuration(tmp_path: Path) -> None:
    """`crossdock config --config vllm.yaml` translates the file."""
    file, ours = tmp_path / "vllm.yaml", tmp_path / "cluster.yaml"
    file.write_text("model: org/y\nmax-num-seqs: 7\n")
    printed = run("config", "--config", str(file)).stdout
    assert yaml.safe_load(printed)["engine"]["max_num_seqs"] == 7
    ours.write_text(printed)
    assert printed_config("-c", str(ours)) == printed_config("-c", str(file))
