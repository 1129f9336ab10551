"""Each field of an adapter_config.json has a verdict: read, harmless, or refused by name. The oracle is PEFT."""

import dataclasses
import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.model.lora.adapter_fields import FIELDS, INITIALISATIONS
from crossdock.workers.model.lora.adapter_files import read_adapter
from tests.workers.architectures import build
from tests.workers.lora_oracle import Tuned, adapted, peft, tuned
from tests.workers.model.paged import through_pages

DOCS = Path(__file__).parents[4] / "docs" / "adapters.md"
PROMPT = [3 + i % 100 for i in range(20)]
DEFAULTS = {
    each.name: each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
    for each in dataclasses.fields(peft.LoraConfig)
}
OTHER_VALUES: dict[str, Any] = {  # of harmless fields, beside those that PEFT has saved
    "task_type": "CAUSAL_LM",
    "auto_mapping": {"base_model_class": "LlamaForCausalLM", "parent_library": "transformers"},
    "peft_version": "0.1.0",
    "base_model_name_or_path": "someone/some-model",
    "revision": "main",
    "inference_mode": True,
    "lora_dropout": 0.5,
    "megatron_core": "megatron.elsewhere",
    "loftq_config": {"loftq_bits": 4, "loftq_iter": 1},
    "eva_config": {"rho": 3.0},
    "corda_config": {"corda_method": "kpm"},
    "lora_ga_config": {"direction": "ArBr"},
    "qalora_group_size": 32,
    "ensure_weight_tying": True,
    "runtime_config": {"ephemeral_gpu_offload": False},
}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    return tuned(build("llama", {}), tmp_path_factory.mktemp("adapter") / "one", 1)


@pytest.fixture
def folder(one: Tuned, tmp_path: Path) -> Path:
    return Path(shutil.copytree(one.adapter.path, tmp_path / "copy"))


def change(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))


def of_verdict(verdict: str) -> list[str]:
    return [name for name, field in FIELDS.items() if field.verdict == verdict]


def test_every_field_of_peft_has_a_verdict() -> None:
    assert DEFAULTS.keys() == FIELDS.keys(), "a field of the installed PEFT needs a verdict, or one is gone"


def test_every_variant_of_lora_in_peft_is_refused() -> None:
    """PEFT marks the fields that change what an adapter computes."""
    fields = dataclasses.fields(peft.LoraConfig)
    variants = {each.name for each in fields if each.metadata.get("is_lora_variant")}
    assert variants
    assert variants <= {*of_verdict("refused")}


@pytest.mark.parametrize("field", of_verdict("refused"))
def test_refused_field_is_named_unless_it_has_its_neutral_value(field: str, folder: Path) -> None:
    change(folder, **{field: DEFAULTS[field]})
    read_adapter(folder, 64)
    for value in (True, 1, "x", ["x"], {"a": 1}):
        change(folder, **{field: value})
        with pytest.raises(ValueError, match=rf"{field} is .*\({re.escape(FIELDS[field].why.replace('`', '')[:20])}"):
            read_adapter(folder, 64)


def test_field_that_is_not_known_is_refused_by_name_unless_it_asks_for_nothing(folder: Path) -> None:
    for value in (None, False, [], {}):
        change(folder, use_next_years_idea=value)
        read_adapter(folder, 64)
    for value in (True, 0.5, "x", [0], {"a": None}):
        change(folder, use_next_years_idea=value)
        with pytest.raises(ValueError, match="use_next_years_idea is "):
            read_adapter(folder, 64)


@torch.inference_mode()
@pytest.mark.parametrize("field", of_verdict("harmless"))
def test_harmless_field_changes_no_logit_of_peft(field: str, one: Tuned, folder: Path) -> None:
    assert OTHER_VALUES.keys() == {*of_verdict("harmless")}
    change(folder, **{field: OTHER_VALUES[field]})
    if field != "runtime_config":  # PEFT saves none, and reads none that is no object of its own
        with warnings.catch_warnings(action="ignore"):  # of PEFT: it says that it ignores the field
            model = peft.PeftModel.from_pretrained(build("llama", {}), str(folder)).eval()
        assert torch.equal(model(input_ids=torch.tensor([PROMPT])).logits[0], one.logits(PROMPT))
    read_adapter(folder, 64)


@pytest.mark.parametrize("value", ["pissa", "pissa_niter_4", "PiSSA", "olora", "corda", "loftq", "lora_ga"])
def test_adapter_that_was_trained_on_other_base_weights_is_refused_by_name(value: str, folder: Path) -> None:
    change(folder, init_lora_weights=value)
    with pytest.raises(ValueError, match=f"init_lora_weights is '{value}'") as error:
        read_adapter(folder, 64)
    assert ("path_initial_model_for_weight_conversion" in str(error.value)) is (value != "loftq")
    assert "merge_and_unload" in str(error.value)


@pytest.mark.parametrize("value", ["unheard_of", 1, [], {"a": 1}, "true"])
def test_unknown_initialisation_is_refused_by_name(value: Any, folder: Path) -> None:
    change(folder, init_lora_weights=value)
    with pytest.raises(ValueError, match=r"init_lora_weights is .*served are true, false, gaussian"):
        read_adapter(folder, 64)


@pytest.mark.parametrize("value", [True, False, *INITIALISATIONS, "Gaussian"])
def test_initialisation_is_taken_where_peft_leaves_the_base_weights_as_they_are(
    value: Any, one: Tuned, folder: Path
) -> None:
    change(folder, init_lora_weights=value)
    read_adapter(folder, 64)
    base = build("llama", {})
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    # The first values of eva need data, and PEFT takes them later.
    more = {"eva_config": peft.EvaConfig()} if value == "eva" else {}
    adapted(base, r=4, target_modules=["q_proj"], init_lora_weights=value, **more)
    after = {
        name.replace(".base_layer", ""): tensor for name, tensor in base.state_dict().items() if "lora_" not in name
    }
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("value", ["pissa", "pissa_niter_4", "olora"])
def test_adapter_converted_by_peft_gives_the_logits_of_its_training(value: str, tmp_path: Path) -> None:
    """Its base was changed; converted as the refusal says, the adapter is plain and fits the base model."""
    base = build("llama", {})
    model = adapted(
        build("llama", {}), r=4, lora_alpha=4, target_modules=["q_proj", "up_proj"], init_lora_weights=value
    )
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "before")
    model.peft_config["default"].init_lora_weights = value
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data += torch.randn(parameter.shape, generator=generator) * 0.2
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="init_lora_weights"):
        read_adapter(tmp_path / "plain", 64)
    with warnings.catch_warnings(action="ignore"):  # of PEFT: it loads the adapter from before training beside this one
        model.save_pretrained(tmp_path / "one", path_initial_model_for_weight_conversion=str(tmp_path / "before"))
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0]
    served = wrap_module(base, LoadOptions(max_lora_rank=64))
    adapter = read_adapter(tmp_path / "one", 64).adapter("one")
    assert served.adapters is not None
    served.adapters.load(adapter)
    (found,) = through_pages(served, [torch.tensor(PROMPT)], [[(0, 0, len(PROMPT))]], [adapter.fingerprint])
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(
    "fields",
    [
        {"layers_to_transform": [0]},
        {"layers_to_transform": 1},
        {"layers_to_transform": [1], "layers_pattern": "layers"},
        {"layers_to_transform": [0], "layers_pattern": ["h", "layers"]},
        {"exclude_modules": ["q_proj", "layers.1.mlp.up_proj"]},
        {"exclude_modules": r".*\.1\..*"},
        {"target_modules": ["v_proj", "model.layers.1.self_attn.q_proj"], "layers_to_transform": [0]},
    ],
)
def test_modules_are_targets_where_peft_adapts_them(fields: dict[str, Any], tmp_path: Path) -> None:
    """A file has what PEFT saved. With the same tensors, a configuration that leaves some of them out is refused."""
    some = tuned(build("llama", {}), tmp_path / "some", 1, **fields)
    everything = tuned(build("llama", {}), tmp_path / "all", 1, target_modules="all-linear")
    ours = read_adapter(tmp_path / "some", 64)
    adapted = {name for name, layer in some.model.named_modules() if isinstance(layer, peft.tuners.lora.LoraLayer)}
    assert {f"base_model.model.{name}" for name in ours.factors} == adapted
    shutil.copy(tmp_path / "all" / "adapter_model.safetensors", tmp_path / "some")
    with pytest.raises(ValueError, match=r"which is (in none of layers_to_transform|one of exclude_modules|none of)"):
        read_adapter(tmp_path / "some", 64)
    assert everything.adapter.num_weights > some.adapter.num_weights


def test_docs_have_the_verdict_of_every_field() -> None:
    rows = [f"| `{name}` | {field.verdict} | {field.why} |" for name, field in FIELDS.items()]
    assert "\n".join(rows) in DOCS.read_text(), "docs/adapters.md: put these rows there\n" + "\n".join(rows)


def test_docs_name_the_initialisations_that_are_taken() -> None:
    assert ", ".join(f"`{each}`" for each in INITIALISATIONS) in DOCS.read_text()
