"""How the mixers of recurrent layers are divided among ranks: gated delta nets, Mamba-2 and short convolutions.

A rank computes whole heads (of Mamba-2 groups of heads, of short convolutions channels), and keeps their states alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class PackedPiece(NamedTuple):
    """One of the matrices or vectors that a parameter holds, one after the other."""

    size: int
    is_divided: bool = True  # False: every rank has all of it


Pieces = tuple[PackedPiece, ...]


@dataclass(frozen=True, slots=True)
class MixerDivision:
    """Names the tensors of a mixer that are divided, in equal units. All others are whole on every rank."""

    num_units: int  # of which a rank has a range
    units: str  # names them, for logs
    tensors: Mapping[str, Pieces]  # by parameter or module, along its outputs
    output: str  # the projection whose inputs are divided, and whose outputs are summed
    convolution: str
    counts: tuple[str, ...] = ()  # attributes that count heads or features
    norm: str = ""  # the norm over the features of all ranks; empty: there is none
    multipliers: str = ""  # a buffer that is laid out as the outputs of `in_proj`; empty: there is none


_BY_HEADS = (
    *("in_proj_qkvz", "in_proj_ba", "in_proj_z", "in_proj_b", "in_proj_a", "dt_bias", "A_log"),
    *("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj", "g_b_proj"),
    *("forget_gate.f_proj", "forget_gate.f_b_proj", "forget_gate.dt_bias", "forget_gate.A_log"),
)
"""Projections and vectors of gated delta nets whose outputs follow the heads."""


def division_of(mixer: Any) -> MixerDivision | None:
    """Return how a mixer can be divided; None: `mixer` is no mixer of a known kind."""
    if hasattr(mixer, "ssm_state_size") and hasattr(mixer, "conv1d") and hasattr(mixer, "n_groups"):
        return _mamba2(mixer)
    if hasattr(mixer, "num_k_heads") and hasattr(mixer, "conv1d"):
        counts = ("num_k_heads", "num_v_heads", "key_dim", "value_dim")
        return _delta_net(mixer, mixer.num_k_heads, mixer.key_dim, mixer.value_dim, counts)
    if hasattr(mixer, "forget_gate") and hasattr(mixer, "conv1d"):
        counts = ("num_heads", "qkv_dim", "forget_gate.num_heads", "forget_gate.qkv_dim")
        return _delta_net(mixer, mixer.num_heads, mixer.qkv_dim, mixer.qkv_dim, counts)
    if hasattr(mixer, "conv") and hasattr(mixer, "in_proj") and hasattr(mixer, "out_proj"):
        channels = mixer.conv.out_channels
        tensors = {"in_proj": (PackedPiece(channels),) * 3, "conv": (PackedPiece(channels),)}
        return MixerDivision(channels, "channels", tensors, "out_proj", "conv")
    return None


def _delta_net(mixer: Any, num_heads: int, key: int, value: int, counts: tuple[str, ...]) -> MixerDivision:
    """Divide by key heads, with which go as many value heads each."""
    queries_keys_values = PackedPiece(key), PackedPiece(key), PackedPiece(value)
    tensors: dict[str, Pieces] = {"conv1d": queries_keys_values, "in_proj_qkv": queries_keys_values}
    for name, parameter in mixer.named_parameters():
        owner = name.removesuffix(".weight").removesuffix(".bias")
        if owner in _BY_HEADS:
            tensors[owner] = (PackedPiece(max(parameter.shape) if parameter.dim() > 2 else parameter.shape[0]),)
    output = "out_proj" if hasattr(mixer, "out_proj") else "o_proj"
    return MixerDivision(num_heads, "key heads", tensors, output, "conv1d", counts)


def _mamba2(mixer: Any) -> MixerDivision:
    """Divide by groups of heads, which share B and C. The heads of a single group are divided themselves: every rank
    computes its B and C, and the norm is over the features of all ranks."""
    has_groups = mixer.n_groups > 1
    inner = PackedPiece(mixer.intermediate_size)
    heads = PackedPiece(mixer.num_heads)
    shared = PackedPiece(mixer.n_groups * mixer.ssm_state_size, has_groups)
    tensors: dict[str, Pieces] = {
        "in_proj": (inner, inner, shared, shared, heads),
        "conv1d": (inner, shared, shared),
        "norm": (inner,),
        **dict.fromkeys(("dt_bias", "A_log", "D"), (heads,)),
    }
    counts: tuple[str, ...] = ("num_heads", "intermediate_size")
    if has_groups:
        counts += ("n_groups", "norm.n_groups")
    return MixerDivision(
        mixer.n_groups if has_groups else mixer.num_heads,
        "groups of heads" if has_groups else "heads",
        tensors,
        "out_proj",
        "conv1d",
        counts,
        norm="" if has_groups or not hasattr(mixer.norm, "weight") else "norm",
        multipliers="mup_vector" if hasattr(mixer, "mup_vector") else "",
    )
