"""References from one part of a JSON schema to another."""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote


def resolved(root: Any, pointer: Any) -> Any:
    """Return the part of a schema that a JSON pointer such as `#/$defs/name` means; None where there is no such part.

    References to other documents and to anchors mean no part here.
    """
    if not isinstance(pointer, str) or re.match(r"#(/|\Z)", pointer) is None:
        return None
    found = root
    for step in pointer[1:].split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found
