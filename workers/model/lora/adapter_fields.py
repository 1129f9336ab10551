"""Judge each field of a PEFT adapter_config.json: it is read, it changes nothing, or it is refused by name."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

Verdict = Literal["read", "harmless", "refused"]

NEUTRAL: Sequence[Any] = (None, False, [], {})
"""Values with which a field of PEFT asks for nothing. A field that is refused, or not known, may have one of them."""

INITIALISATIONS = ("gaussian", "eva", "orthogonal", "mica")
"""Values of `init_lora_weights`, beside true and false, with which training leaves the base weights as they are."""

_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of the values with which PEFT changes the base weights before training."""

_CONVERSION = (
    "save the adapter before training too, and after training call "
    "save_pretrained(FOLDER, path_initial_model_for_weight_conversion=FOLDER_BEFORE_TRAINING)"
)


class Field(NamedTuple):
    """A field of adapter_config.json: what is done with it, and why."""

    verdict: Verdict
    why: str


def _read(why: str) -> Field:
    return Field("read", why)


def _harmless(why: str) -> Field:
    return Field("harmless", why)


def _refused(why: str) -> Field:
    return Field("refused", why)


FIELDS: Mapping[str, Field] = {
    "peft_type": _read("`LORA` alone"),
    "r": _read("the rank"),
    "lora_alpha": _read("the scale is `lora_alpha / r`"),
    "use_rslora": _read("true: the scale is `lora_alpha / sqrt(r)`"),
    "rank_pattern": _read("`r` of the modules that a pattern matches"),
    "alpha_pattern": _read("`lora_alpha` of the modules that a pattern matches"),
    "target_modules": _read("names, a pattern or `all-linear`; the file has tensors of these modules alone"),
    "exclude_modules": _read("names or a pattern; the file has no tensors of these modules"),
    "layers_to_transform": _read("numbers of layers; the file has tensors of these layers alone"),
    "layers_pattern": _read("the name before the number of a layer, for `layers_to_transform`"),
    "init_lora_weights": _read("refused where training has changed the base weights: see below"),
    "bias": _read("`none` alone: biases of the base model are not changed"),
    "task_type": _harmless("a head that was trained stands in `modules_to_save`, which is refused"),
    "auto_mapping": _harmless("the name of a Python class, which is not imported"),
    "peft_version": _harmless("fields are judged one by one"),
    "base_model_name_or_path": _harmless("shapes are compared with the served model's"),
    "revision": _harmless("of the base model's repository"),
    "inference_mode": _harmless("whether PEFT trains the adapter"),
    "lora_dropout": _harmless("of training alone"),
    "megatron_core": _harmless("the name of a package, used with `megatron_config` alone"),
    "loftq_config": _harmless("`init_lora_weights` says whether LoftQ changed the base weights"),
    "eva_config": _harmless("of the first values of A, before training"),
    "corda_config": _harmless("`init_lora_weights` says whether CorDA changed the base weights"),
    "lora_ga_config": _harmless("`init_lora_weights` says whether LoRA-GA changed the base weights"),
    "qalora_group_size": _harmless("used with `use_qalora` alone"),
    "ensure_weight_tying": _harmless("of embeddings and heads, whose tensors are refused"),
    "runtime_config": _harmless("where PEFT keeps the base weights; PEFT does not save this field"),
    "fan_in_fan_out": _refused("base weights stored as [inputs, outputs], as GPT-2 has"),
    "modules_to_save": _refused("whole modules beside the adapter"),
    "trainable_token_indices": _refused("rows of the embedding"),
    "use_dora": _refused("DoRA divides by the norm of the changed weights"),
    "lora_bias": _refused("a bias beside B"),
    "target_parameters": _refused("parameters that are no linear module, such as packed experts"),
    "layer_replication": _refused("a model of repeated layers"),
    "alora_invocation_tokens": _refused("aLoRA changes a part of the tokens alone"),
    "use_qalora": _refused("QALoRA pools the inputs"),
    "use_bdlora": _refused("block-diagonal matrices"),
    "kasa_config": _refused("KaSA removes a part of the base weights and scales A"),
    "monteclora_config": _refused("MonteCLoRA draws weights"),
    "velora_config": _refused("VeLoRA saves more tensors than A and B"),
    "arrow_config": _refused("Arrow chooses among several adapters for each token"),
    "megatron_config": _refused("layers of Megatron"),
}
"""Every field of PEFT 0.21, by name. A test fails where the installed PEFT has a field without a verdict."""


def check_fields(config: Mapping[str, Any], file: Path) -> None:
    """Check that no field of adapter_config.json asks for what is not served. ValueError: names the field.

    Fields that are read are left to their readers, but for `peft_type`, `bias` and `init_lora_weights`.
    """
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{file}: peft_type is {config.get('peft_type')!r:.100}; served is LORA")
    if config.get("bias", "none") != "none":
        raise ValueError(f"{file}: bias is {config['bias']!r:.100}; served is none")
    _check_initialisation(config.get("init_lora_weights", True), file)
    for name, value in config.items():
        field = FIELDS.get(name)
        if (field is None or field.verdict == "refused") and value not in NEUTRAL:
            why = "a field that is not known" if field is None else field.why.replace("`", "")
            raise ValueError(
                f"{file}: {name:.100} is {value!r:.100} ({why}); served are plain LoRA weights, without this field"
            )


def _check_initialisation(value: Any, file: Path) -> None:
    """Check that training began from the base weights as they are.

    Raises:
        ValueError: it began from other weights, which only PEFT's own code can make again, or a value is not known.
    """
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, str) and value.lower() in INITIALISATIONS:
        return
    if isinstance(value, str) and value.lower().startswith(_CHANGE_THE_BASE):
        is_converted = not value.lower().startswith("loftq")
        way = f"Convert it with PEFT: {_CONVERSION}; or serve" if is_converted else "Serve"
        raise ValueError(
            f"{file}: init_lora_weights is {value!r:.100}: training began from other base weights than the model's, so "
            f"the adapter alone gives wrong answers. {way} the merged model (merge_and_unload)"
        )
    expected = ", ".join(("true", "false", *INITIALISATIONS))
    raise ValueError(f"{file}: init_lora_weights is {value!r:.100}; served are {expected}")
