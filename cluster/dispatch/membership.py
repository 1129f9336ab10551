"""Which replicas are up, as Serve last told the routers of this process.

Serve pickles a router class by value, so what the router and the dispatcher share cannot live beside that class.
"""

from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any

Members = Mapping[str, dict[str, Any]]  # replica id -> what it advertises

_lock = Lock()
_members: dict[str, Members] = {}
_listeners: dict[str, list[Callable[[Members], None]]] = {}


def publish(deployment: str, members: Members) -> None:
    """Called by the router, in its thread, whenever the set of replicas changes."""
    with _lock:
        _members[deployment] = members
        listeners = list(_listeners.get(deployment, ()))
    for listener in listeners:
        listener(members)


def subscribe(deployment: str, listener: Callable[[Members], None]) -> None:
    """`listener` is called at once with what is known, and at every change, in whatever thread that happens."""
    with _lock:
        _listeners.setdefault(deployment, []).append(listener)
        known = _members.get(deployment)
    if known is not None:
        listener(known)
