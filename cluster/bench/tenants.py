"""Tenants of a load: each sends requests of its own at its own rate, with and without the others."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from heapq import merge

from crossdock.cluster.bench.workloads import Job

_FORM = re.compile(r"(?P<name>[^=,]+)=(?P<share>\d+(\.\d+)?)(x(?P<weight>\d+(\.\d+)?))?")


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """One tenant. `name`: also its API key, where a server is measured."""

    name: str
    share: float  # its rate, as a multiple of the load's
    weight: float = 1.0  # in a simulation; a server knows its own


def parse_tenants(text: str) -> list[TenantLoad]:
    """Return the tenants of `own=1,flood=10` or `gold=1x3,free=1`.

    Raises:
        ValueError: a part is not NAME=SHARE or NAME=SHARExWEIGHT with numbers above 0, or a name comes twice.
    """
    found = []
    for part in text.split(","):
        form = _FORM.fullmatch(part.strip())
        if form is None or not float(form["share"]) > 0 or not float(form["weight"] or 1) > 0:
            raise ValueError(f"tenants: {part!r} is not NAME=SHARE or NAME=SHARExWEIGHT, e.g. own=1,flood=10")
        found.append(TenantLoad(form["name"], float(form["share"]), float(form["weight"] or 1)))
    if len({each.name for each in found}) < len(found):
        raise ValueError(f"tenants: {text!r} names one twice")
    return found


def jobs_of_tenants(text: str, jobs_of: Callable[[TenantLoad], Iterator[Job]]) -> Iterator[Job]:
    """Return the jobs of all tenants in order of arrival. `jobs_of`: those of one, each with its time."""
    return merge(*(_named(load, jobs_of(load)) for load in parse_tenants(text)), key=lambda job: job.due or 0.0)


def _named(load: TenantLoad, jobs: Iterator[Job]) -> Iterator[Job]:
    """Yield jobs as the tenant's. Their texts are no other tenant's."""
    for job in jobs:
        prompt = tuple(replace(segment, key=f"{load.name}/{segment.key}") for segment in job.prompt)
        yield replace(job, tenant=load.name, weight=load.weight, prompt=prompt)
