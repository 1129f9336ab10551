"""The configuration tree: the meaning of files and overrides, and the errors about wrong ones."""

import json
import re
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from crossdock.cluster.config import ClusterConfig, ModelConfig
from crossdock.cluster.config_file import load, to_yaml
from crossdock.workers.report.presets import estimate


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        """
        model: {path: org/model, max_model_len: 4096}
        engine: {max_num_seqs: 8, kv_cache_memory: 1GiB}
        pools:
          - {name: big, replicas: 2, engine: {max_num_batched_tokens: 2048}}
          - {name: small}
        http: {port: 9000}
        """
    )
    return path


def test_empty_configuration_is_one_mixed_replica_of_the_default_model() -> None:
    config = load()
    assert config.model.path is None
    assert config.model.name == "SmolLM2-135M-Instruct"
    assert [(pool.name, pool.replicas) for pool in config.pools] == [("mixed", 1)]
    assert (config.http.host, config.http.port) == ("127.0.0.1", 8000)


def test_overrides_win_over_the_file(file: Path) -> None:
    config = load(file, {"http.port": 9001, "engine.page_size": 32, "pools.small.num_cpus": 4, "pools.0.replicas": 3})
    assert config.model.path == config.model.name == "org/model"
    assert config.engine.kv_cache_memory == 1 << 30
    assert (config.engine.max_num_seqs, config.engine.page_size) == (8, 32)
    assert config.http.port == 9001
    assert [(pool.name, pool.replicas, pool.num_cpus) for pool in config.pools] == [
        ("big", 3, 0),
        ("small", 1, 4),
    ]


def test_engine_of_a_pool_inherits_the_settings_that_it_does_not_name(file: Path) -> None:
    big, small = load(file, {"engine.max_num_seqs": 4}).pools
    assert big.engine is not None
    assert big.engine.max_num_batched_tokens == 2048
    assert big.engine.max_num_seqs == 4  # the cluster's, from an override
    assert big.engine.kv_cache_memory == 1 << 30
    assert small.engine is None


def test_default_pool_is_overridden_by_name_and_by_position() -> None:
    config = load(None, {"pools.mixed.replicas": 2, "pools.0.engine.max_num_seqs": 4})
    assert config.pools[0].replicas == 2
    assert config.pools[0].engine is not None
    assert config.pools[0].engine.max_num_seqs == 4
    assert load(None, {"pools": [{"name": "small"}], "pools.small.replicas": 2}).pools[0].replicas == 2


def test_overrides_do_not_change_the_callers_mapping() -> None:
    pools = [{"name": "small"}]
    load(None, {"pools": pools, "pools.small.replicas": 2})
    assert pools == [{"name": "small"}]


def test_tree_is_frozen() -> None:
    config = load()
    with pytest.raises(ValidationError):
        config.http.port = 1  # type: ignore[misc]
    with pytest.raises(ValidationError):
        config.model = ModelConfig()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"engine.max_num_seq": 3}, "engine.max_num_seq: no such setting; did you mean max_num_seqs?"),
        ({"max_num_seqs": 3}, "max_num_seqs: no such setting; did you mean engine.max_num_seqs?"),
        ({"engine.max-num-seqs": 3}, "engine.max-num-seqs: no such setting; did you mean max_num_seqs?"),
        ({"replicas": 3}, "replicas: no such setting; did you mean pools.NAME.replicas?"),
        (
            {"deploy.image": "crossdock:cuda"},
            "deploy: gone, leave it out: manifests/ has files for Kubernetes, ray up and Serve",
        ),
        (
            {"engine.prefix_eviction": "value"},
            "engine.prefix_eviction: gone, leave it out: the least recently used page",
        ),
        ({"zzz": 3}, "zzz: no such setting; there are model, engine, pools, models, router, scaling, transfer, http"),
        ({"pools.0.engine.page_siz": 3}, "pools.mixed.engine.page_siz: no such setting; did you mean page_size?"),
        ({"engine.max_num_seqs": -1}, "engine.max_num_seqs: must be greater than or equal to 0, not -1"),
        ({"engine.kv_cache_memory": "2 zorks"}, "engine.kv_cache_memory: could not interpret byte unit: zorks"),
        ({"model.dtype": "int3"}, "model.dtype: must be 'auto', 'bfloat16', 'float16' or 'float32', not 'int3'"),
        ({"model.path": 5}, "model.path: must be a valid string, not 5"),
        ({"engine.max_num_seqs": "many"}, "engine.max_num_seqs: must be a whole number, not 'many'"),
        ({"engine.gpu_memory_utilization": "x"}, "engine.gpu_memory_utilization: must be a number, not 'x'"),
        ({"engine.enforce_eager": 5}, "engine.enforce_eager: must be true or false, not 5"),
        ({"engine.kv_cache_memory": "lots"}, "engine.kv_cache_memory: must be a size, such as 2GiB, not 'lots'"),
        ({"engine": 5}, "engine: must be a mapping of settings, not 5"),
        ({"pools": 5}, "pools: must be a list, not 5"),
        ({"http.port": 70000}, "http.port: must be less than or equal to 65535, not 70000"),
        ({"pools.x.replicas": 1}, "pools.x.replicas: no member 'x' here; there are mixed"),
        ({"pools.1.replicas": 1}, "pools.1.replicas: no member '1' here; there are mixed"),
        ({"pools.0": {}}, "pools.0: names a whole member of a list; set its fields one by one"),
        ({"http.port": 1, "http.port.x": 1}, "http.port.x: http.port is 1, which has no parts"),
        ({"pools": []}, "pools: at least one is needed"),
        ({"pools": [{"name": "a"}, {"name": "a"}]}, "pools: two are named 'a'; give each its own name"),
        ({"pools": [{"name": "ingress"}]}, "pools.ingress: name 'ingress' is another deployment's; choose another"),
        ({"pools": [{"replicas": 3, "max_replicas": 2}]}, "pools.0: max_replicas (2) must be at least replicas (3)"),
        ({"pools": [{"name": "a b"}]}, "pools.0.name: must match pattern '^[a-z][a-z0-9-]*$', not 'a b'"),
        (
            {"http.api_keys": [{"key": "k", "classes": ["batch", "gold"]}]},
            "http.api_keys.0.classes: 'gold' is none of engine.slo_classes, which are interactive, standard, batch",
        ),
        ({"http.api_keys": ["a", {"key": "k", "default": "gold"}]}, "http.api_keys.1.default: 'gold' is none of"),
        ({"http.api_keys": [5]}, "http.api_keys.0: must be a string, or an object with key, classes, default"),
        ({"http.api_keys": [{"key": "k", "class": ["batch"]}]}, "http.api_keys.0.class: no such setting"),
        (
            {
                "pools.mixed.engine.slo_classes": [{"name": "one", "ttft_s": 1, "tpot_s": 1}],
                "pools.mixed.engine.default_slo_class": "one",
            },
            "pools: 'mixed' must have the classes of all, engine.slo_classes and engine.default_slo_class",
        ),
        ({"pools.mixed.engine.default_slo_class": "batch"}, "pools: 'mixed' must have the classes of all"),
        ({"engine.max_num_batched_tokens": 10}, "engine: max_num_batched_tokens (10) must be at least max_num_seqs (1"),
        (
            {"engine.max_num_batched_tokens": 10, "engine.max_num_seqs": 8},
            "engine: max_num_batched_tokens (10) must be at least max_num_seqs (8) + page_size (16)",
        ),
    ],
)
def test_wrong_override_raises_one_line_with_field_value_and_alternatives(
    overrides: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") as error:
        load(None, overrides)
    assert "\n" not in str(error.value)  # one problem, one line


def test_file_with_two_problems_raises_one_line_for_each(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("engine: {page_size: 0}\nhttp: {prot: 80}\n")
    with pytest.raises(ValueError, match=r"bad\.yaml: engine") as error:
        load(path)
    first, second = str(error.value).splitlines()
    assert first == f"{path}: engine.page_size: must be greater than or equal to 1, not 0"
    assert second == f"{path}: http.prot: no such setting; did you mean port?"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1, 2", "not YAML: line 1: "),
        ("model:\n  path: a\x00b", r"not YAML: line 2: '\\x00' is not allowed in YAML"),
        ("engine: {}\nhttp: {}\nengine: {max_num_seqs: 3}", "not YAML: 'engine' stands twice, in lines 1 and 3"),
        ("http:\n  port: 1\n  host: x\n  port: 2", "not YAML: 'port' stands twice, in lines 2 and 4"),
        ("- a\n- b\n", "a mapping is expected"),
    ],
)
def test_file_that_is_no_configuration_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load(path)


def test_absent_file_is_refused_and_empty_file_is_the_defaults(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.yaml: cannot be read: No such file"):
        load(tmp_path / "absent.yaml")
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    assert load(tmp_path / "empty.yaml") == load()


def test_printed_configuration_loads_as_itself(file: Path, tmp_path: Path) -> None:
    for config in (load(), load(file)):
        (tmp_path / "printed.yaml").write_text(to_yaml(config))
        assert load(tmp_path / "printed.yaml") == config
        # Ray Serve validates the arguments in a RayService manifest like this.
        assert ClusterConfig.model_validate(yaml.safe_load(to_yaml(config))) == config


def test_printed_configuration_has_descriptions_and_hides_secrets() -> None:
    text = to_yaml(load(None, {"http.api_keys": ["hunter2"]}))
    assert "hunter2" not in text
    assert "<hidden>" in text
    assert "max_num_seqs: 0  # Requests" in text
    bound: dict[str, object] = {"http.api_keys": ["hunter2", {"key": "hunter3", "classes": ["batch"]}]}
    assert "hunter" not in to_yaml(load(None, bound))
    assert "hunter" not in repr(load(None, bound))


def test_api_keys_are_bound_to_classes(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        """
        engine: {slo_classes: [{name: gold, ttft_s: 1, tpot_s: 0.1}, {name: rest, ttft_s: 9, tpot_s: 1}],
                 default_slo_class: rest}
        http: {api_keys: [plain, {key: bound, classes: [rest], default: rest}, {key: all, sees_all_requests: true}]}
        """
    )
    plain, bound, operator = load(path).http.api_keys
    assert (plain.key, plain.classes, plain.sees_all_requests) == ("plain", None, False)
    assert (bound.key, bound.classes, bound.default) == ("bound", ("rest",), "rest")
    assert operator.sees_all_requests


@pytest.mark.parametrize(
    "data", [{"http": {"api_keys": [["hunter2"]]}}, {"http": {"api_keys": ["hunter2"], "port": -1}}]
)
def test_validation_error_of_the_tree_hides_secrets(data: dict[str, object]) -> None:
    """Ray Serve validates the arguments of an application itself, and shows this error."""
    with pytest.raises(ValidationError) as error:
        ClusterConfig.model_validate(data)
    assert "hunter2" not in str(error.value)


def test_error_about_an_api_key_does_not_repeat_the_key() -> None:
    with pytest.raises(ValueError, match=r"^http\.api_keys") as error:
        load(None, {"http.api_keys": [12345678]})
    assert "12345678" not in str(error.value)


def test_pool_has_its_given_role_or_else_that_of_its_name() -> None:
    pools = load(None, {"pools": [{"name": "prefill"}, {"name": "decode"}, {"name": "big", "role": "prefill"}]}).pools
    assert [pool.role for pool in pools] == ["prefill", "decode", "prefill"]
    assert load().pools[0].role == "mixed"


@pytest.mark.parametrize(("name", "role"), [("prefil", "prefill"), ("decoder", "decode"), ("prefill-h100", "prefill")])
def test_pool_whose_name_looks_like_a_role_needs_one(name: str, role: str) -> None:
    reason = f"pools.{name}: name '{name}' gives no role: write '{role}', or set the role of this pool"
    with pytest.raises(ValueError, match=reason):
        load(None, {"pools": [{"name": name}]})
    assert load(None, {"pools": [{"name": name, "role": "mixed"}]}).pools[0].role == "mixed"


def test_pool_with_a_short_name_of_its_own_is_mixed() -> None:
    assert [load(None, {"pools": [{"name": name}]}).pools[0].role for name in ("code", "big", "node")] == ["mixed"] * 3


def test_mixed_pool_of_one_replica_has_no_transfers_and_others_have() -> None:
    for pools, has_transfer in (([], False), ([{"name": "mixed", "replicas": 2}], True)):
        config = load(None, {"pools": pools} if pools else {})
        assert (config.replica_spec(config.pools[0]).transfer == config.transfer) == has_transfer


@pytest.mark.parametrize("pool", [{"name": "encode"}, {"name": "vision", "role": "encode"}])
def test_encode_pool_is_refused_with_what_to_use(pool: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"there are no encode pools: .* use a role of mixed, prefill or decode"):
        load(None, {"pools": [pool, {"name": "mixed"}]})


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ([{"name": "prefill"}], "all have the role 'prefill'"),
        ([{"name": "a", "role": "decode"}, {"name": "decode"}], "all have the role 'decode'"),
        ([{"name": "prefill"}, {"name": "decode", "engine": {"page_size": 32}}], "page_size must be the same"),
    ],
)
def test_pools_that_cannot_work_together_are_refused(pools: list[dict[str, object]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(None, {"pools": pools, "engine": {"max_num_seqs": 32}})


INT8 = {"quantization": "int8"}


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ([{"name": "prefill"}, {"name": "decode", "engine": INT8}], "'prefill' has other weights than all pools that"),
        ([{"name": "prefill"}, {"name": "decode", "checkpoint": "/fp8"}], "set router.unlike_weights: mixed"),
        ([{"name": "a"}, {"name": "prefill"}, {"name": "decode", "engine": INT8}], "'decode' has other weights"),
    ],
)
def test_pools_that_exchange_nothing_for_their_weights_are_refused(
    pools: list[dict[str, object]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(None, {"model.path": "/bf16", "pools": pools, "engine": {"max_num_seqs": 32}})


@pytest.mark.parametrize("endpoint", ["tcp://router:5557", "ipc:///run/kv"])
def test_kv_events_of_several_replicas_need_a_port_for_each(endpoint: str) -> None:
    events = {"enable_kv_cache_events": True, "endpoint": endpoint}
    engine = {"kv_events_config": events}
    assert ClusterConfig.model_validate({"engine": engine}).engine.kv_events is not None
    with pytest.raises(ValidationError, match=r"are of one replica, and there may be several; give addresses such as"):
        ClusterConfig.model_validate({"engine": engine, "pools": [{"replicas": 2}]})


def test_kv_events_without_prefix_caching_are_refused() -> None:
    engine = {"kv_events_config": {"enable_kv_cache_events": True}, "enable_prefix_caching": False}
    with pytest.raises(ValidationError, match="kv_events_config must be null without enable_prefix_caching"):
        ClusterConfig.model_validate({"engine": engine})


def test_pools_of_unlike_weights_exchange_pages_where_the_router_mixes_them() -> None:
    pools = [{"name": "prefill"}, {"name": "decode", "checkpoint": "/fp8"}, {"name": "a", "checkpoint": "/bf16"}]
    with pytest.raises(ValueError, match="'decode' has other weights"):
        load(None, {"model.path": "/bf16", "pools": pools})
    config = load(None, {"model.path": "/bf16", "pools": pools, "router.unlike_weights": "mixed"})
    prefill, decode, _ = (config.replica_spec(pool) for pool in config.pools)
    assert (prefill.model.path, prefill.tokenizer, prefill.mixes_weights) == ("/bf16", None, True)
    assert (decode.model.path, decode.tokenizer, decode.mixes_weights) == ("/fp8", "/bf16", True)
    apart = load(None, {"model.path": "/bf16", "pools": [{"name": "a"}, {"name": "b", "checkpoint": "/fp8"}]})
    assert not any(apart.replica_spec(pool).mixes_weights for pool in apart.pools)


def test_rounded_weights_have_another_name_than_those_of_their_checkpoint() -> None:
    config = load(None, {"pools": [{"name": "a"}, {"name": "b", "engine": INT8}]})
    assert [config.replica_spec(pool).weights_of("x") for pool in config.pools] == ["x", "x int8"]
    rounded = load(None, {"engine.quantization": "fp8"})
    assert rounded.replica_spec(rounded.pools[0]).weights_of("x") == "x fp8"
    mixed = load(None, {"router.unlike_weights": "mixed"})
    kept = [each.replica_spec(pool).name_of_kept_pages("x") for each in (config, mixed) for pool in each.pools]
    assert kept == ["x", "x int8", "x and others"], "no pages of other weights are read from files"


def test_emulated_gpu_prices_weights_that_fp8_rounds(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 128}
    sizes |= {"intermediate_size": 96, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    pool = {"name": "a", "emulated": "h200"}
    settings = {"model.path": str(tmp_path), "engine.quantization": "fp8"}
    config = load(None, settings | {"pools": [pool]})
    device = config.replica_spec(config.pools[0]).emulated
    assert device is not None
    assert device.profile.cost == estimate("h200", tmp_path, "fp8").cost != estimate("h200", tmp_path).cost
    for quantization, emulated in (("fp8", "h200-8b"), ("int8", "h200")):
        wrong = settings | {"engine.quantization": quantization, "pools": [pool | {"emulated": emulated}]}
        with pytest.raises(ValueError, match=r"engine\.quantization: an emulated device has no use for it"):
            load(None, wrong)


def test_model_name_is_served_name_or_path_without_revision() -> None:
    assert ModelConfig.model_validate({"path": "org/model@v1"}).name == "org/model"
    assert ModelConfig.model_validate({"path": "org/model", "served_name": "mine"}).name == "mine"


MODELS = """
engine: {max_num_seqs: 8, page_size: 32}
http: {tool_call_parser: none, max_logprobs: 5}
models:
  - name: small
    pools: [{name: mixed, max_replicas: 2, engine: {max_num_seqs: 4}}]
  - name: large
    model: {served_name: Org/Large, max_model_len: 100}
    engine: {page_size: 64}
    http: {model_aliases: [big], reasoning_parser: none}
    pools: [{name: prefill}, {name: decode}]
"""


def test_each_of_several_models_is_a_configuration_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text(MODELS)
    config = load(tmp_path / "models.yaml", {"pools.*.num_cpus": 1})
    small, large = config.each_model
    assert [each.names for each in (small, large)] == [("small",), ("Org/Large", "big")]
    assert [pool.name for pool in small.pools + large.pools] == ["small-mixed", "large-prefill", "large-decode"]
    assert {pool.num_cpus for pool in small.pools + large.pools} == {1}
    assert (small.is_elastic, large.is_elastic, config.is_elastic) == (True, False, True)
    engines = small.engine, small.pools[0].engine or small.engine, large.engine
    assert [(each.max_num_seqs, each.page_size) for each in engines] == [(8, 32), (4, 32), (8, 64)]
    parsers = [(each.http.tool_call_parser, each.http.reasoning_parser) for each in (small, large)]
    assert parsers == [("none", "auto"), ("none", "none")]
    assert small.http.max_logprobs == large.http.max_logprobs == 5
    assert large.replica_spec(large.pools[0]).model.max_model_len == 100
    (tmp_path / "printed.yaml").write_text(to_yaml(config))
    assert load(tmp_path / "printed.yaml") == config


def test_configuration_of_one_model_is_that_model() -> None:
    config = load(None, {"model.served_name": "one"})
    assert config.each_model == (config,)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model.dtype": "float32"}, r"model: there are several models; set models.NAME.model"),
        ({"http.model_aliases": ["x"]}, r"http.model_aliases: there are several models"),
        ({"models.small.model": {"served_name": "big"}}, "models: 'big' names two of them"),
        ({"models.large.name": "small"}, "models: 'small' names two of them"),
        ({"models.large.pools.decode.role": "prefill"}, "models: 'large': pools: all have the role 'prefill'"),
        ({"models.small.nmae": 1}, r"models.small.nmae: no such setting; did you mean name"),
        (
            {
                "models.small.engine": {
                    "slo_classes": [{"name": "x", "ttft_s": 1, "tpot_s": 1}],
                    "default_slo_class": "x",
                }
            },
            "models: engine.slo_classes must have the same names in all",
        ),
    ],
)
def test_models_that_do_not_go_together_are_refused(tmp_path: Path, overrides: dict[str, object], message: str) -> None:
    (tmp_path / "models.yaml").write_text(MODELS)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "models.yaml", overrides)
