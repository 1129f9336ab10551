"""Which replicas are up, as Serve last reported to the routers of this process.

Serve pickles a router class by value, so state that the router and the dispatcher share cannot live beside that class.
"""

from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any

Members = Mapping[str, dict[str, Any]]  # replica id -> the static profile that it advertises

_lock = Lock()
_members: dict[str, Members] = {}  # by deployment
_listeners: dict[str, list[Callable[[Members], None]]] = {}  # by deployment


def publish(deployment: str, members: Members) -> None:
    """Report the set of replicas. The router calls this, in its thread, at every change."""
    with _lock:
        _members[deployment] = members
        listeners = list(_listeners.get(deployment, ()))
    for listener in listeners:
        listener(members)


def subscribe(deployment: str, listener: Callable[[Members], None]) -> None:
    """Call `listener` at once with the known members, and at every change, in the thread of that change."""
    with _lock:
        _listeners.setdefault(deployment, []).append(listener)
        known = _members.get(deployment)
    if known is not None:
        listener(known)
