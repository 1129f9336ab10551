"""The flags of `crossdock serve` and `crossdock config`, by the configuration that they print."""

from pathlib import Path

import pytest
import yaml

from crossdock.cluster.config import ClusterConfig
from tests.cluster.watch.terminal import run


def printed_config(*args: str, **environment: str) -> ClusterConfig:
    result = run("config", *args, **environment)
    assert result.exit_code == 0, result.output
    return ClusterConfig.model_validate(yaml.load(result.stdout, yaml.CSafeLoader))  # the other takes most of the time


def test_flags_reach_their_settings() -> None:
    flags = """
        org/model --served-model-name mine --served-model-name also --dtype float32 --max-model-len 4096
        --max-num-batched-tokens 1024 --max-num-seqs 8 --long-prefill-token-threshold 256
        --chunk-policy fixed --min-chunk-tokens 64 --max-prefill-tokens 512 --no-mixed-chunks
        --max-num-partial-prefills 4 --max-long-partial-prefills 1 --prefill-order fcfs --admission queue
        --no-enable-chunked-prefill --no-enable-prefix-caching --kv-cache-memory 1GiB --block-size 32
        --kv-cache-dtype fp8 --attention-backend torch
        --gpu-memory-utilization 0.7 --enforce-eager --no-async-scheduling
        --generation-config vllm --override-generation-config {"temperature":0.5,"max_new_tokens":200}
        --host 0.0.0.0 --port 9000 --vllm-metrics --max-queued-requests 7 --pools big=2,small
        --set pools.small.num_cpus=3 --set http.request_timeout_s=1.5
    """
    config = printed_config(*flags.split())
    model, engine, http = config.model, config.engine, config.http
    assert (model.path, model.served_name, model.dtype, model.max_model_len) == ("org/model", "mine", "float32", 4096)
    assert (engine.max_num_batched_tokens, engine.max_num_seqs) == (1024, 8)
    assert engine.long_prefill_token_threshold == 256
    assert (engine.chunk_policy, engine.min_chunk_tokens, engine.max_prefill_tokens) == ("fixed", 64, 512)
    assert (engine.max_num_partial_prefills, engine.max_long_partial_prefills) == (4, 1)
    assert (engine.prefill_order, engine.admission) == ("fcfs", "queue")
    assert not engine.mixed_chunks
    assert not engine.enable_chunked_prefill
    assert not engine.enable_prefix_caching
    assert (engine.kv_cache_memory, engine.page_size, engine.kv_cache_dtype) == (1 << 30, 32, "fp8")
    assert engine.attention_backend == "torch"
    assert (engine.gpu_memory_utilization, engine.enforce_eager, engine.async_scheduling) == (0.7, True, False)
    assert (http.host, http.port, http.model_aliases, http.request_timeout_s) == ("0.0.0.0", 9000, ("also",), 1.5)
    assert http.max_queued_requests == 7
    override = model.override_generation_config.model_dump(exclude_none=True)
    assert (model.generation_config, override) == ("vllm", {"temperature": 0.5, "max_new_tokens": 200})
    assert http.vllm_metrics
    assert [(pool.name, pool.replicas, pool.num_cpus) for pool in config.pools] == [
        ("big", 2, 0),
        ("small", 1, 3),
    ]


def test_no_flags_print_the_defaults() -> None:
    assert printed_config() == ClusterConfig()


@pytest.mark.parametrize(
    ("args", "budget", "chunked"),
    [
        (["--chunked-prefill-size", "1024"], 1024, True),
        (["--chunked-prefill-size", "1024", "--max-num-batched-tokens", "1024"], 1024, True),
        (["--chunked-prefill-size", "-1"], 0, False),
        (["--chunked-prefill-size", "-1", "--max-num-batched-tokens", "8192"], 8192, False),
        (["--chunked-prefill-size=-1", "--no-enable-chunked-prefill"], 0, False),
    ],
)
def test_chunked_prefill_size_of_sglang_sets_the_budget_or_no_chunks(
    args: list[str], budget: int, chunked: bool
) -> None:
    engine = printed_config(*args).engine
    assert (engine.max_num_batched_tokens, engine.enable_chunked_prefill) == (budget, chunked)


def test_parallel_sizes_apply_to_all_pools_or_to_the_one_they_stand_at(tmp_path: Path) -> None:
    def ranks(*args: str) -> list[tuple[str, int, int, int]]:
        pools = printed_config(*args).pools
        return [(pool.name, pool.replicas, pool.tensor_parallel_size, pool.pipeline_parallel_size) for pool in pools]

    assert ranks("--tp", "2", "--pp", "3") == [("mixed", 1, 2, 3)]
    assert ranks("--pools", "prefill=2xtp1,decode=1xtp2") == [("prefill", 2, 1, 1), ("decode", 1, 2, 1)]
    assert ranks("--pools", "a=1xpp2xtp4,b") == [("a", 1, 4, 2), ("b", 1, 1, 1)]
    file = tmp_path / "cluster.yaml"
    file.write_text("pools: [{name: a, tensor_parallel_size: 4}, {name: b, pipeline_parallel_size: 2}]\n")
    assert ranks("-c", str(file)) == [("a", 1, 4, 1), ("b", 1, 1, 2)]
    assert ranks("-c", str(file), "--tensor-parallel-size", "2") == [("a", 1, 2, 1), ("b", 1, 2, 2)]


def test_flags_win_over_the_file_and_set_over_flags(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("engine: {max_num_seqs: 4, page_size: 32, enforce_eager: true}\nhttp: {port: 1}\n")
    flags = ["--port", "2", "--max-num-seqs", "5", "--no-enforce-eager", "--set", "engine.max_num_seqs=6"]
    config = printed_config("-c", str(file), *flags)
    assert (config.engine.page_size, config.http.port, config.engine.max_num_seqs) == (32, 2, 6)
    assert not config.engine.enforce_eager


def test_api_keys_from_the_environment_are_not_printed() -> None:
    printed = run("config", CROSSDOCK_API_KEY="hunter2").stdout
    assert "hunter2" not in printed
    assert yaml.safe_load(printed)["http"]["api_keys"] == ["<hidden>"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--page-size", "0"], "--page-size: must be greater than or equal to 1, not 0"),
        (["--dtype", "int3"], "--dtype: must be 'auto', 'bfloat16', 'float16' or 'float32', not 'int3'"),
        (["--override-generation-config", "hot"], "--override-generation-config: 'hot' is not JSON"),
        (
            ["--override-generation-config", '{"temperature": 3}'],
            "--override-generation-config: temperature: must be less than or equal to 2, not 3",
        ),
        (["--chunked-prefill-size", "0"], "--chunked-prefill-size 0: must be a number of tokens, or -1 for no chunks"),
        (
            ["--chunked-prefill-size", "512", "--max-num-batched-tokens", "1024"],
            "--chunked-prefill-size 512 and --max-num-batched-tokens 1024 are the same setting",
        ),
        (["--chunked-prefill-size", "512", "--no-enable-chunked-prefill"], "--no-enable-chunked-prefill switches off"),
        (["--chunked-prefill-size", "-1", "--enable-chunked-prefill"], "switches chunks off"),
        (["--set", "engine.max_num_seq=1"], "did you mean max_num_seqs?"),
        (["--set", "engine"], "--set: 'engine' is not of the form KEY=VALUE"),
        (["--set", "engine.page_size=[1"], "--set: the value of engine.page_size is not YAML"),
        (["--pools", "big=x"], "--pools: 'big=x' is not of the form big=1,small=2"),
        (["--pools", "big=1x2"], "--pools: 'big=1x2' is not of the form big=1,small=2 or prefill=2xtp1,decode=1xtp2"),
        (["--tp", "0"], "--tensor-parallel-size: must be greater than or equal to 1, not 0"),
        (["--kv-cache-memory", "2"], "--kv-cache-memory 2: that is 2 bytes; give a unit, such as 2GiB or 2MiB"),
        (["--set", "engine.page_size=0"], "error: engine.page_size: must be"),
        (["--page-size", "8", "--set", "engine.page_size=0"], "error: engine.page_size: must be"),
        (["--config", "absent.yaml"], "absent.yaml: cannot be read: No such file or directory"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "config"])
def test_mistake_ends_the_command_with_one_line(command: str, args: list[str], message: str) -> None:
    result = run(command, *args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_mistake_in_a_file_names_the_file_and_one_in_a_flag_the_flag(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("engine: {page_size: 0}\n")
    result = run("config", "--config", str(file), "--max-num-seqs", "-1")
    assert result.exit_code == 2
    assert sorted(line.partition(" must")[0] for line in result.stderr.splitlines()) == [
        "error: --max-num-seqs:",
        f"error: {file}: engine.page_size:",
    ]


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("awq_marlin", "awq"),
        ("gptq_marlin", "gptq"),
        ("modelopt_fp4", "modelopt"),
        ("w8a8_fp8", "compressed-tensors"),
        ("gpt_oss_mxfp4", "mxfp4"),
        ("moe_wna16", None),
        ("fbgemm_fp8", "fbgemm_fp8"),
        ("fp8_per_channel", "fp8"),
    ],
)
def test_quantization_of_other_servers_asks_for_the_form_of_its_checkpoints(value: str, meant: str | None) -> None:
    assert printed_config("--quantization", value).engine.quantization == meant


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("auto-round", "--quantization auto-round: such weights are not read: serve the checkpoint"),
        ("experts_int8", "--quantization experts_int8: plain weights are rounded as they are loaded by fp8"),
        ("nonsense", "--quantization: must be"),
    ],
)
def test_quantization_that_is_not_read_is_refused_with_what_to_do(value: str, message: str) -> None:
    result = run("config", "--quantization", value)
    assert result.exit_code == 2
    assert message in result.stderr
