"""Short notices from replicas and ingresses to the command that started the server, in Ray's key-value store.

A replica that starts can be asked nothing, and an ingress does not know the command. Notices are for people: where one
cannot be left, the server goes on without it.
"""

import json
import logging
from typing import Any, Literal, TypeAlias

from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_initialized,
    _internal_kv_list,
    _internal_kv_put,
)

logger = logging.getLogger("ray.serve")

Subject: TypeAlias = Literal["start", "loss"]
"""start: how far a replica is with its start; loss: a replica that an ingress has lost."""
_NAMESPACE = "crossdock"


def leave_notice(application: str, subject: Subject, name: str, content: dict[str, Any]) -> None:
    """Leave a notice under a name, in the place of an earlier one."""
    try:
        _internal_kv_put(f"{application}/{subject}/{name}", json.dumps(content), namespace=_NAMESPACE)
    except Exception as error:  # Ray raises all kinds
        logger.info("no notice was left for the command: %s", error)


def remove_notice(application: str, subject: Subject, name: str) -> None:
    """Remove the notice of a name, if there is one."""
    try:
        _internal_kv_del(f"{application}/{subject}/{name}", namespace=_NAMESPACE)
    except Exception as error:  # Ray raises all kinds
        logger.info("a notice was not removed: %s", error)


def read_notices(application: str, subject: Subject) -> dict[str, dict[str, Any]]:
    """Return all notices about a subject, by name; empty where Ray does not answer."""
    prefix = f"{application}/{subject}/"
    found: dict[str, dict[str, Any]] = {}
    try:
        if not _internal_kv_initialized():
            return {}
        for key in _internal_kv_list(prefix, namespace=_NAMESPACE):
            if (content := _internal_kv_get(key, namespace=_NAMESPACE)) is not None:
                found[key.decode().removeprefix(prefix)] = json.loads(content)
    except Exception as error:  # Ray raises all kinds
        logger.info("notices could not be read: %s", error)
    return found
