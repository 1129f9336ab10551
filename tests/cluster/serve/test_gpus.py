"""GPUs follow the device: one for each rank where Ray finds any, a clear error where there are too few."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from crossdock.cluster.config import ClusterConfig
from crossdock.cluster.config_file import load
from crossdock.cluster.serve import app
from crossdock.cluster.serve.flag_settings import configuration
from crossdock.cluster.serve.flags import PANELS
from crossdock.cluster.serve.gpus import check_cores_suffice, check_gpus_suffice, check_memory_suffices, with_num_gpus
from crossdock.cluster.serve.preparation import prepare, require_devices
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.report.presets import HOW_FAR_OFF, preset
from crossdock.workers.schedule.request.slo import DEFAULT_CLASSES
from tests.workers.draft.mtp_reference import write_checkpoint


def with_flags(**given: Any) -> ClusterConfig:
    names = [flag.parameter for flags in PANELS.values() for flag in flags]
    return configuration(dict.fromkeys(names) | given)


def built(config: ClusterConfig, num_gpus: float, monkeypatch: pytest.MonkeyPatch) -> list[tuple[ClusterConfig, Any]]:
    """Return the resolved configuration, and each pool's deployment, as on a cluster with so many GPUs."""
    made = []

    def engine_deployment(config: ClusterConfig, pool: Any) -> Any:
        made.append((config, deployment(config, pool)))
        return made[-1][1]

    deployment = app.engine_deployment
    monkeypatch.setattr(app, "visible_gpus", lambda: num_gpus)
    monkeypatch.setattr(app, "engine_deployment", engine_deployment)
    app.application(config)
    return made


@pytest.mark.parametrize(
    ("num_gpus", "visible", "asked", "device"),
    [(None, 0, 0, "cpu"), (None, 2, 1, "cuda"), (0, 2, 0, "cpu"), (1, 0, 1, "cuda"), (0.5, 1, 0.5, "cuda")],
)
def test_replica_of_one_rank_asks_for_gpu_where_there_is_one(
    num_gpus: float | None, visible: float, asked: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(None, {"pools": [{"name": "mixed", "num_gpus": num_gpus}]})
    ((resolved, application),) = built(config, visible, monkeypatch)
    options = application._bound_deployment.ray_actor_options
    assert options["num_gpus"] == asked
    assert resolved.replica_spec(resolved.pools[0]).device == device


def test_every_rank_of_worker_group_has_gpu_in_its_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(None, {"pools": [{"name": "mixed", "tensor_parallel_size": 4}]})
    for visible, gpus in ((8, [1, 1, 1, 1]), (0, [0, 0, 0, 0])):
        with monkeypatch.context() as patch:
            ((_, application),) = built(config, visible, patch)
        bundles = application._bound_deployment._replica_config.placement_group_bundles
        assert [bundle.get("GPU", 0) for bundle in bundles] == gpus


def test_configuration_that_leaves_gpus_open_leaves_device_to_torch() -> None:
    config = load()
    assert config.pools[0].num_gpus is None
    assert config.replica_spec(config.pools[0]).device is None


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        ({"tensor_parallel_size": 2, "num_gpus": 0.5}, r"num_gpus \(0.5\) must be 1 or 0 .* several ranks, here 2"),
        ({"num_gpus": 2}, r"num_gpus \(2\) is of each rank"),
        ({"num_gpus": 1.5}, r"num_gpus \(1.5\) is of each rank"),
        ({"num_gpus": -1}, "pools.mixed.num_gpus"),
    ],
)
def test_number_that_ranks_cannot_use_is_refused(pool: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(None, {"pools": [{"name": "mixed", **pool}]})


@pytest.mark.parametrize(
    ("pools", "num_gpus", "named"),
    [
        ([{"name": "mixed", "tensor_parallel_size": 4}], 1, "pools.mixed.tensor_parallel_size 4"),
        ([{"name": "mixed", "replicas": 2}], 1, "pools.mixed.replicas 2"),
        ([{"name": "mixed", "replicas": 1, "max_replicas": 3}], 2, "pools.mixed.max_replicas 3"),
        ([{"name": "prefill"}, {"name": "decode"}], 1, "pools.decode.replicas 1"),
        ([{"name": "mixed", "num_gpus": 1}], 0, "pools.mixed.num_gpus 1"),
    ],
)
def test_machine_with_too_few_gpus_names_the_settings(pools: list[Any], num_gpus: int, named: str) -> None:
    config = with_num_gpus(load(None, {"pools": pools}), num_gpus > 0)
    with pytest.raises(ValueError, match=f"this machine has {num_gpus}") as error:
        check_gpus_suffice([config], num_gpus)
    assert named in str(error.value)


def test_devices_of_a_machine_are_compared_with_all_pools() -> None:
    require_devices(load(), 1.0)
    with pytest.raises(ValueError, match="tensor_parallel_size 4"):
        require_devices(load(None, {"pools.*.tensor_parallel_size": 4}), 1.0)


@pytest.mark.parametrize(
    ("pools", "num_gpus"),
    [
        ([{"name": "mixed", "tensor_parallel_size": 4, "replicas": 2}], 8),
        ([{"name": "mixed", "replicas": 2, "num_gpus": 0.5}], 1),
        ([{"name": "mixed", "tensor_parallel_size": 4}], 0),
        ([{"name": "prefill"}, {"name": "decode", "num_gpus": 0, "tensor_parallel_size": 2}], 1),
    ],
)
def test_machine_with_enough_gpus_is_accepted(pools: list[Any], num_gpus: int) -> None:
    check_gpus_suffice([with_num_gpus(load(None, {"pools": pools}), num_gpus > 0)], num_gpus)


@pytest.mark.parametrize(("device", "num_gpus"), [("auto", None), ("cpu", 0), ("cuda", 1)])
def test_device_flag_means_gpus_of_each_rank_in_every_pool(device: str, num_gpus: int | None) -> None:
    config = with_flags(device=device, pools="prefill=1,decode=2xtp2")
    assert [pool.num_gpus for pool in config.pools] == [num_gpus, num_gpus]


def test_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="--device: 'tpu' must be one of auto, cpu, cuda"):
        with_flags(device="tpu")


def test_emulated_pools_ask_for_no_gpu_and_their_promises_are_as_slow_as_their_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = with_flags(device="emulated:h100-8b*4", pools="prefill=1,decode=2")
    for (resolved, application), pool in zip(built(config, 8, monkeypatch), config.pools, strict=True):
        assert application._bound_deployment.ray_actor_options["num_gpus"] == 0
        spec = resolved.replica_spec(pool)
        assert spec.emulated is not None
        assert spec.emulated.profile.cost == preset("h100-8b").cost.slowed(4)
        promises = [(slo.ttft_s, slo.tpot_s) for slo in spec.engine.slo_classes]
        assert promises == [(4 * slo.ttft_s, 4 * slo.tpot_s) for slo in config.engine.slo_classes]


def test_emulated_gpu_without_a_model_computes_the_served_one(tmp_path: Path) -> None:
    """`--device emulated:h200-tp2*4`: config.json is enough, and a start says how far off estimates were."""
    sizes = {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    sizes |= {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": False, **sizes}))
    (tmp_path / "tokenizer.json").write_text("{}")
    config = with_flags(device="emulated:h200-tp2*4", model=str(tmp_path))
    emulated = config.replica_spec(config.pools[0]).emulated
    assert emulated is not None
    assert emulated.name == "h200-tp2*4"
    assert emulated.profile.cost.base == pytest.approx(4 * preset("h200-8b-tp2").cost.base, rel=1e-3)
    assert emulated.profile.bytes_per_second == pytest.approx(preset("h200-8b-tp2").bytes_per_second / 4)
    assert [slo.tpot_s for slo in config.with_slow_promises().engine.slo_classes] == [
        4 * slo.tpot_s for slo in DEFAULT_CLASSES
    ]
    _, line = prepare(config, has_gpus=False)
    assert line == f"Pool mixed: h200-tp2*4: {HOW_FAR_OFF}"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"emulated": "h900-8b"}, "is neither a file nor"),
        ({"emulated": "h100-8b*fast"}, r"must be a profile, or PROFILE\*N"),
        ({"emulated": "h100-8b", "tensor_parallel_size": 2}, "the profile says all this"),
        ({"emulated": "h100-8b", "num_gpus": 1}, "num_gpus: of an emulated device"),
        ({"emulated": "h100-8b", "enable_expert_parallel": True}, "enable_expert_parallel: of an emulated device"),
        ({"emulated": "h100-8b", "enable_eplb": True}, "enable_eplb: of an emulated device"),
        ({"emulated": "h100-8b", "engine": {"kv_cache_dtype": "fp8"}}, "engine.kv_cache_dtype: an emulated device"),
    ],
)
def test_setting_that_an_emulated_device_would_ignore_is_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        load(None, {"pools": [{"name": "mixed", **given}]})


def test_start_says_where_whole_experts_were_asked_for_in_vain(small_model_dir: Path) -> None:
    """The model is dense, and a stage of the second pool has one rank."""
    whole = {"enable_expert_parallel": True}
    given = [{"name": "prefill", "tensor_parallel_size": 2, **whole}, {"name": "decode", **whole}]
    _, *lines = prepare(load(None, {"model.path": str(small_model_dir), "pools": given}), has_gpus=False)
    assert lines == [
        "Pool prefill: enable_expert_parallel changes nothing: the model has no experts that ranks divide",
        "Pool decode: enable_expert_parallel changes nothing: one rank has all experts of a layer",
    ]


def test_start_says_where_no_expert_moves_or_is_copied(small_model_dir: Path) -> None:
    given = {"name": "mixed", "enable_eplb": True, "eplb_config": {"num_redundant_experts": 2}}
    _, line = prepare(load(None, {"model.path": str(small_model_dir), "pools": [given]}), has_gpus=False)
    assert line == "Pool mixed: enable_eplb changes nothing: one rank has all experts of a layer"
    needed = "enable_eplb, and enable_expert_parallel true or null"
    for needless in ({"enable_eplb": False}, {"enable_expert_parallel": False}):
        config = load(None, {"model.path": str(small_model_dir), "pools": [given | needless]})
        _, line = prepare(config, has_gpus=False)
        assert line == f"Pool mixed: no expert moves or gets a copy: that needs {needed}"


def test_start_says_that_a_head_of_this_model_is_not_computed(small_model_dir: Path) -> None:
    engine = {"speculative_config": {"method": "mtp"}}
    _, line = prepare(load(None, {"model.path": str(small_model_dir), "engine": engine}), has_gpus=False)
    assert line.startswith("Pool mixed: speculative_config is left out: method mtp does not compute the head of llama")


def test_head_that_the_checkpoint_lacks_is_refused_before_any_replica_starts(
    small_model_dir: Path, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, "qwen3_next")
    shutil.copy(small_model_dir / "tokenizer.json", folder)
    config = load(None, {"model.path": str(folder), "engine": {"speculative_config": {"method": "mtp"}}})
    assert len(prepare(config, has_gpus=False)) == 1
    tensors = load_file(folder / "model.safetensors")
    del tensors["mtp.layers.0.self_attn.k_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"pools: speculative_config of 'mixed': .*missing: .*self_attn\.k_proj\.weight"
    ):
        prepare(config, has_gpus=False)


def test_fleet_of_which_a_part_is_emulated_is_refused() -> None:
    with pytest.raises(ValueError, match=r"set `emulated` for all pools or for none; these lack it: decode"):
        load(None, {"pools": [{"name": "prefill", "emulated": "h100-8b"}, {"name": "decode"}]})
    slow = {"name": "decode", "emulated": "h100-8b*2"}
    with pytest.raises(ValueError, match=r"the same \*N in all"):
        load(None, {"pools": [{"name": "prefill", "emulated": "h100-8b"}, slow]})


def test_devices_that_several_models_need_are_checked_together_and_named() -> None:
    """One model may grow while the others have their least; both at their most need not fit."""
    members = [{"name": name, "pools": [{"name": "mixed", "max_replicas": 3, "num_gpus": 1}]} for name in ("a", "b")]
    models = load(None, {"models": members}).each_model
    check_gpus_suffice(models, 4)
    with pytest.raises(ValueError, match=r"4 GPUs are needed, and this machine has 3 \(pools.a-mixed.max_replicas 3"):
        check_gpus_suffice(models, 3)
    cores = load(None, {"models": members, "models.*.pools.*.num_cpus": 2}).each_model
    check_cores_suffice(cores, 8)
    with pytest.raises(ValueError, match=r"8 cores are needed, and this machine has 7 \(pools.a-mixed.num_cpus: 6 in"):
        check_cores_suffice(cores, 7)


def test_memory_that_several_models_need_on_one_host_is_checked_together_and_named() -> None:
    pools = [{"name": "mixed", "max_replicas": 2, "num_gpus": 0}]
    members = [{"name": "small", "pools": pools}, {"name": "large", "model": {"path": "x/large"}, "pools": pools}]
    models = load(None, {"models": members, "engine.kv_cache_memory": "1GiB"}).each_model
    sizes = {"x/large": 3 << 30, None: 1 << 30}

    def bytes_of(model: ModelSpec) -> int:
        return sizes[model.path]

    check_memory_suffices(models, bytes_of, 10 << 30)  # two of 4 GiB beside one of 2 GiB
    with pytest.raises(ValueError, match=r"10.0 GiB of memory.* 9.0 GiB are free \(pools.small-mixed: 2.0 GiB in all"):
        check_memory_suffices(models, bytes_of, 9 << 30)
    check_memory_suffices(models, bytes_of, 9 << 30, lambda model: model.path is None)  # large encodes texts
    on_gpus = load(None, {"models": members, "models.*.pools.*.num_gpus": 1}).each_model
    check_memory_suffices(on_gpus, bytes_of, 0)
