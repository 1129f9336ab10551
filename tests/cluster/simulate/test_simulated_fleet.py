"""Descriptions of fleets: from files and flags, and the errors of wrong ones."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from crossdock.cluster.config import emulated_device
from crossdock.cluster.config_file import load
from crossdock.cluster.simulate.fleet import describe, load_fleet
from crossdock.workers.schedule.memory.prefix_index import AttentionChunk, Window
from tests.cluster.simulate.small_fleets import profile


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"pools": []}, "pools must have different names"),
        ({"pools": [{"name": "a", "profile": "h100-9b"}]}, "'h100-9b' is neither a file nor GPU-MODEL"),
        ({"pools": [{"name": "a", "profile": "l4-70b-tp4"}]}, "do not fit"),
        ({"pools": [{"name": "a", "profile": "none.json"}]}, "none.json: cannot be read"),
        ({"pools": [{"name": "a", "profile": "h100-8b*0"}]}, r"must be a profile, or PROFILE\*N with N of 0.01 to"),
        ({"pools": [{"name": "a"}]}, "pools.0.profile: field required"),
        ({"pools": [{"name": "a", "profile": "h100-8b", "gpus": 3}]}, "pools.0.gpus: no such setting"),
        ({"pools": [{"name": "a", "profile": "h100-8b", "replicas": -1}]}, "pools.0.replicas: must be .* not -1"),
        ({"pools": [{"name": "prefill", "profile": "h100-8b"}]}, "all have the role 'prefill'"),
        ({"pools": [{"name": "a", "profile": "h100-8b", "engine": {"page_size": 32}}]}, "page_size is the profile's"),
        ({"pools": [{"name": "a", "profile": "h100-8b"}], "failures": [{"at": 1, "kill": "b/0"}]}, "no pool 'b'"),
        ({"pools": [{"name": "a", "profile": "h100-8b"}], "failures": [{"at": 1}]}, "give kill .* or add"),
        ({"pools": [{"name": "a", "profile": "h100-8b"}], "router": {"policy": "luck"}}, "router.policy: must be"),
    ],
)
def test_invalid_fleet_raises_an_error_that_names_the_field(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        describe(data)


def test_profile_of_a_slowed_device_takes_as_many_times_as_long_as_the_emulated_one_of_that_name() -> None:
    [pool], [plain] = (load_fleet(None, f"mixed=1x{name}").pools for name in ("l4-8b*2", "l4-8b"))
    assert pool.profile.cost == plain.profile.cost.slowed(2) == emulated_device("l4-8b*2").profile.cost
    assert pool.profile.max_num_seqs == plain.profile.max_num_seqs


def test_one_of_two_models_may_have_two_ranks_on_emulated_and_on_simulated_devices() -> None:
    names = {"large": "h100-8b-tp2", "small": "h100-8b"}
    members = [{"name": name, "pools": [{"name": "mixed", "emulated": each}]} for name, each in names.items()]
    models = load(None, {"models": members}).each_model
    specs = [model.replica_spec(model.pools[0]) for model in models]
    profiles = [spec.emulated.profile for spec in specs if spec.emulated is not None]
    assert [each.tensor_parallel_size for each in profiles] == [2, 1]
    pools = [{"name": name, "model": name, "profile": each} for name, each in names.items()]
    fleet = {"models": [{"name": name, "share": {0: 1}} for name in names], "pools": pools}
    assert [pool.gpus for pool in describe({**fleet, "gpus": 3}).pools] == [2, 1]
    with pytest.raises(ValueError, match="gpus: the pools have more than 2"):
        describe({**fleet, "gpus": 2})


def test_fleet_from_a_file_has_its_settings_and_the_profiles_rest(tmp_path: Path) -> None:
    windows: tuple[Window, ...] = (None, 64, AttentionChunk(64))
    (tmp_path / "mine.json").write_text(profile(max_num_seqs=12, windows=windows).model_dump_json())
    classes = [{"name": "interactive", "ttft_s": 0.3, "tpot_s": 0.02}, {"name": "standard", "ttft_s": 3, "tpot_s": 0.1}]
    data = {
        "slo_classes": classes,
        "pools": [
            {"name": "prefill", "replicas": 2, "profile": "mine.json", "price": 3.5},
            {"name": "decode", "profile": "mine.json", "engine": {"max_num_seqs": 8, "prefill_order": "fcfs"}},
        ],
    }
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(data))
    loaded = load_fleet(path, noise=0.1)
    prefill, decode = loaded.pools
    assert [pool.role for pool in loaded.pools] == [pool.profile.role for pool in loaded.pools] == ["prefill", "decode"]
    assert (prefill.engine.max_num_seqs, decode.engine.max_num_seqs, decode.profile.max_num_seqs) == (12, 8, 8)
    assert decode.engine.prefill_order == "fcfs"
    assert decode.profile.windows == windows
    assert prefill.profile.slo_classes == loaded.classes
    assert [slo.ttft_s for slo in loaded.classes] == [0.3, 3.0]
    assert loaded.noise == 0.1
    assert load_fleet(path, "mixed=3xh100-8b").pools[0].replicas == 3


def test_pools_that_ship_pages_with_unlike_windows_are_refused() -> None:
    windows = {"prefill": (None, 64), "decode": (None,)}
    pools = [{"name": name, "replicas": 1, "profile": profile(windows=each)} for name, each in windows.items()]
    with pytest.raises(ValueError, match=r"unlike groups of layers .* --disable-hybrid-kv-cache-manager"):
        describe({"pools": pools})
    equal = [{**pool, "profile": profile(windows=(None, 64))} for pool in pools]
    assert describe({"pools": equal}).pools[0].profile.windows == (None, 64)
