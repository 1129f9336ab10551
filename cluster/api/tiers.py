"""Which SLO class a request gets: from its `service_tier`, its header, its API key, and the engine's default."""

from collections.abc import Sequence

from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.keys import ApiKey
from crossdock.workers.schedule.slo import DEFAULT_CLASS, DEFAULT_CLASSES, SloClass

HEADER = "X-SLO-Class"
_LEFT_TO_THE_SERVER = ("auto", "default")  # of OpenAI's tiers; the others are `priority` and `flex`


class Tiers:
    """The classes that requests may ask for, most urgent first."""

    def __init__(self, classes: Sequence[SloClass] = DEFAULT_CLASSES, default: str = DEFAULT_CLASS) -> None:
        self.names = [slo.name for slo in classes]
        self._default = default

    def choose(self, service_tier: str | None, header: str | None, key: ApiKey | None) -> str:
        """The class of a request whose body has `service_tier`, whose `X-SLO-Class` is `header`, and that came with
        `key`. Body and header may both speak if they say the same; `auto`, like nothing at all, leaves it to the other.

        Raises ApiError: 400 for an unknown name or a contradiction, 403 for a class that the key may not use.
        """
        by_body = None if service_tier is None else self._of_tier(service_tier, key)
        by_header = None if header is None else self._of_header(header)
        if service_tier == "auto" and service_tier not in self.names and by_header is not None:
            by_body = None
        if by_body is not None and by_header is not None and by_body != by_header:
            reason = f"'service_tier' asks for the class {by_body!r} and the header '{HEADER}' for {by_header!r}"
            raise ApiError(f"{reason}: give one of them.", param="service_tier", code="invalid_value")
        name = by_header or by_body or self._default_of(key)
        if key is not None and not key.allows(name):
            reason = f"This API key may not use the class {name!r}. It may use {', '.join(key.classes or ())}."
            param = "service_tier" if by_header is None else HEADER
            raise ApiError(reason, status=403, kind="permission_error", param=param, code="slo_class_not_allowed")
        return name

    def _default_of(self, key: ApiKey | None) -> str:
        """The key's, or the engine's; for a key that may not use that one, the first it may use."""
        if key is not None and key.default is not None:
            return key.default
        if key is not None and key.classes is not None and self._default not in key.classes:
            return key.classes[0]
        return self._default

    def _of_tier(self, tier: str, key: ApiKey | None) -> str:
        if tier in self.names:
            return tier
        if tier in _LEFT_TO_THE_SERVER:
            return self._default_of(key)
        if tier == "priority":
            return self.names[0]
        if tier == "flex":
            return self.names[-1]
        accepted = [*self.names, *_LEFT_TO_THE_SERVER, "priority", "flex"]
        raise _unknown("'service_tier'", "service_tier", tier, accepted)

    def _of_header(self, name: str) -> str:
        if name not in self.names:
            raise _unknown(f"the header '{HEADER}'", HEADER, name, self.names)
        return name


def _unknown(where: str, param: str, given: str, accepted: Sequence[str]) -> ApiError:
    reason = f"Invalid value for {where}: {given[:100]!r} is none of {', '.join(accepted)}."
    return ApiError(reason, param=param, code="invalid_value")
