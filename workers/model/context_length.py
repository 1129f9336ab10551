"""The longest request that a model can have, by its positions and its rotary scaling. No torch."""

import json
import math
from typing import TYPE_CHECKING, Any

from crossdock.workers.model.architecture import text_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

BASE = "rope_theta"  # in the rotation in newer files, beside it in older ones
STAYS = (BASE, "partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Fields of a rotation that a new rotation keeps from the old one, unless it gives them itself."""

_DEFAULT = 2048  # of models without positions
_WITH = "give --hf-overrides"


def longest_request(config: "PretrainedConfig", max_model_len: int | None) -> int:
    """Return the most tokens that a request can have. ValueError: `max_model_len` is more than the model computes.

    Dynamic scaling lengthens the context for a server that asks for it: then its rotary base is fixed by
    `max_model_len`, and keys are not those of transformers for shorter requests.
    """
    longest = own_length(config)
    if max_model_len and longest and max_model_len > longest:
        stretched = _stretched_length(config)
        if stretched is None or max_model_len > stretched:
            more = "" if stretched is None else f", and than {stretched} with its dynamic scaling"
            why = f"max_model_len ({max_model_len}) is more than the model's own {longest} positions{more}"
            raise ValueError(f"{why}; {_hint(config, max_model_len)}")
    return max_model_len or longest or _DEFAULT


def own_length(config: "PretrainedConfig") -> int | None:
    """Return the positions of a model with its rotary scaling, or None where nothing bounds them.

    Linear scaling lengthens `max_position_embeddings`, and yarn the length of the original training, as in vLLM.
    Configurations of llama3 and longrope name the longer context themselves. So do those whose layers scale apart.
    """
    decoder = text_config(config)
    positions: int | None = getattr(decoder, "max_position_embeddings", None)
    scaling = _scaling(decoder)
    factor = scaling.get("factor")
    if not positions or not isinstance(factor, int | float):
        return positions
    if scaling.get("rope_type") == "linear":
        return int(positions * factor)
    if scaling.get("rope_type") == "yarn":
        return max(positions, int(scaling.get("original_max_position_embeddings", positions) * factor))
    return positions


def _stretched_length(config: "PretrainedConfig") -> int | None:
    """Return the positions of a model with dynamic scaling times its factor, as in vLLM; None for other models."""
    decoder = text_config(config)
    scaling = _scaling(decoder)
    factor = scaling.get("factor")
    if scaling.get("rope_type") != "dynamic" or not isinstance(factor, int | float):
        return None
    return int(decoder.max_position_embeddings * factor)


def _scaling(decoder: Any) -> dict[str, Any]:
    """Return the one rotary scaling of all layers, or {} where there is none, or more than one."""
    found = getattr(decoder, "rope_parameters", None)
    return found if isinstance(found, dict) and isinstance(found.get("rope_type"), str) else {}


def _hint(config: "PretrainedConfig", max_model_len: int) -> str:
    """Return the flag that gives a longer context."""
    decoder = text_config(config)
    scaling = _scaling(decoder)
    kind = scaling.get("rope_type")
    positions = decoder.max_position_embeddings
    if kind in ("linear", "yarn", "dynamic"):
        original = scaling.get("original_max_position_embeddings", positions) if kind == "yarn" else positions
        longer = {"rope_type": kind, "factor": float(math.ceil(max_model_len / original))}
        if kind == "yarn":
            longer["original_max_position_embeddings"] = original
        rest = {name: value for name, value in scaling.items() if name not in (*STAYS, *longer, "type")}
        scaling = longer | rest
        return f"for more, {_WITH} '{json.dumps({'rope_scaling': scaling})}'"
    if kind in ("llama3", "longrope"):
        return f"for more, {_WITH} '{{\"max_position_embeddings\": {max_model_len}}}', beside its {kind} scaling"
    if kind != "default":
        return "a longer context needs another model"
    scaled = f'"rope_type": "yarn", "factor": {math.ceil(max_model_len / positions)}.0'
    return (
        f"for more, if the model's card says that the model can: {_WITH} "
        f'\'{{"rope_scaling": {{{scaled}, "original_max_position_embeddings": {positions}}}}}\''
    )
