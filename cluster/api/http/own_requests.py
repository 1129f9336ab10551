"""Requests that no client has sent over HTTP: of this process itself, or the lines of a batch."""

from typing import Any

from fastapi import Request

from crossdock.cluster.api.http.keys import ApiKey, owner_of
from crossdock.cluster.api.http.limits import Charge
from crossdock.cluster.api.http.request_memory import RequestMemory
from crossdock.cluster.api.http.service_tiers import SLO_CLASS_HEADER
from crossdock.cluster.api.http.tenant_reader import Tenant, TenantReader
from crossdock.workers.schedule.shares import Shares


def own_request(
    request_id: str,
    shares: Shares,
    *,
    slo_class: str | None = None,
    key: ApiKey | None = None,
    account: Charge | None = None,
    tenant: Tenant | None = None,
) -> Request:
    """Return a request as the guard passes it on. The caller releases its memory, `state.memory`.

    Args:
        request_id: name of the request, also in timelines.
        shares: memory that the request takes its part of.
        slo_class: class of the request; None: by its body.
        key: its owner; None: no keys are in use.
        account: of the key.
        tenant: whose share of the replicas' time is used; None: the key's.
    """
    names = {"x-request-id": request_id} | ({} if slo_class is None else {SLO_CLASS_HEADER.lower(): slo_class})
    state: dict[str, Any] = {"request_id": request_id, "api_key": key, "account": account}
    state |= {"memory": RequestMemory(shares, owner_of(key)), "tenant": tenant or TenantReader().of(key, {})}
    headers = [(name.encode(), value.encode()) for name, value in names.items()]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": headers, "state": state})
