"""One tensor of floats in a file of safetensors, without torch: for heads that an ingress computes."""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_MOST_HEADER_BYTES = 100 << 20  # as safetensors
_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def float_tensor(file: Path, name: str) -> NDArray[np.float32]:
    """Read a tensor of float32, float16 or bfloat16, in the shape that the file says.

    Raises:
        ValueError: the file cannot be read, or has no such tensor.
    """
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size)) if size < _MOST_HEADER_BYTES else {}
            entry = header[name]
            begin, end = entry["data_offsets"]
            opened.seek(8 + size + begin)
            found = np.frombuffer(opened.read(end - begin), _DTYPES[entry["dtype"]]).reshape(entry["shape"])
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file}: {name} cannot be read ({type(error).__name__}: {error})") from None
    if entry["dtype"] == "BF16":  # the upper half of a float32
        found = (found.astype("<u4") << 16).view("<f4")
    return found.astype(np.float32)
