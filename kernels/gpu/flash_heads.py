"""The heads that both flash-attn packages take."""

from torch import Tensor

_MULTIPLE = 8  # elements: for other sizes the packages copy the whole pool in each call, or refuse
_MOST = 256


def require_heads(backend: str, k_pages: Tensor, v_pages: Tensor, sinks: Tensor | None) -> None:
    """Refuse a layer that the package would compute wrongly, slowly or not at all.

    The model's probe calls every layer at load, so a server that starts has no such layer.

    Raises:
        ValueError: the layer has attention sinks, keys and values of different sizes, or a head size that is not a
            multiple of 8 up to 256.
    """
    key_dim, value_dim = k_pages.shape[3], v_pages.shape[3]
    if sinks is not None or key_dim != value_dim or key_dim > _MOST:
        raise ValueError(
            f"attention_backend {backend} takes no attention sinks, and keys and values of one size up to {_MOST}, not "
            f"{key_dim} and {value_dim}; choose triton"
        )
    if key_dim % _MULTIPLE:
        raise ValueError(
            f"attention_backend {backend} takes head sizes that are multiples of {_MULTIPLE}, not {key_dim}: it would "
            f"copy all pages in every call; choose triton"
        )
