"""The SLO class of a request: chosen by its `service_tier`, its header, its API key, or the engine's default."""

from collections.abc import Sequence
from dataclasses import dataclass

from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.http.keys import ApiKey
from crossdock.workers.schedule.request.slo import DEFAULT_CLASS, DEFAULT_CLASSES, SloClass

SLO_CLASS_HEADER = "X-SLO-Class"
_SERVER_DECIDES = ("auto", "default")  # of OpenAI's tiers; the others are `priority` and `flex`


@dataclass(frozen=True, slots=True)
class ServiceTier:
    """The SLO class of one request."""

    slo_class: str
    is_promised: bool  # the client or its key's entry asked for the class: a request that would be late is refused
    openai_name: str  # for the answer's `service_tier`: clients of OpenAI's types refuse every other name


class ServiceTiers:
    """The classes that requests may ask for, most urgent first."""

    def __init__(self, classes: Sequence[SloClass] = DEFAULT_CLASSES, default: str = DEFAULT_CLASS) -> None:
        self.names = [slo.name for slo in classes]
        self._ttft_s = {slo.name: slo.ttft_s for slo in classes}
        self._default = default

    def choose(self, service_tier: str | None, header: str | None, key: ApiKey | None) -> ServiceTier:
        """Return the class of a request with this `service_tier`, this `X-SLO-Class` header and this key.

        Tier and header may both be given if they agree; the tier `auto` gives way to the header. `auto`, `default` and
        no tier ask for no class. Then the key's `default` does, if the key has one.

        Raises:
            ApiError: 400 for an unknown name or a contradiction, 403 for a class that the key may not use.
        """
        by_body = None if service_tier is None else self._of_tier(service_tier, key)
        by_header = None if header is None else self._of_header(header)
        if service_tier == "auto" and service_tier not in self.names and by_header is not None:
            by_body = None
        if by_body is not None and by_header is not None and by_body != by_header:
            reason = (
                f"'service_tier' asks for the class {by_body!r} and the header '{SLO_CLASS_HEADER}' for {by_header!r}"
            )
            raise ApiError(f"{reason}: give one of them.", param="service_tier", code="invalid_value")
        name = by_header or by_body or self._default_of(key)
        is_asked_for = by_header is not None or self._names_class(service_tier)
        if key is not None and not key.allows(name):
            reason = f"This API key may not use the class {name!r}. It may use {', '.join(key.classes or ())}."
            param = "service_tier" if by_header is None else SLO_CLASS_HEADER
            raise ApiError(reason, status=403, kind="permission_error", param=param, code="slo_class_not_allowed")
        is_promised = is_asked_for or (key is not None and key.default is not None)
        return ServiceTier(name, is_promised, self._openai_name(name))

    def patience_s(self, tier: ServiceTier) -> float | None:
        """Return how long a request may wait for its model to start; None: it asked for no class, so it waits."""
        return self._ttft_s[tier.slo_class] if tier.is_promised else None

    def _openai_name(self, slo_class: str) -> str:
        """Return OpenAI's tier that is nearest to a class: the most urgent, the least urgent, or one between them."""
        if slo_class == self._default:
            return "default"
        return {self.names[0]: "priority", self.names[-1]: "flex"}.get(slo_class, "default")

    def _names_class(self, service_tier: str | None) -> bool:
        return service_tier is not None and (service_tier in self.names or service_tier not in _SERVER_DECIDES)

    def _default_of(self, key: ApiKey | None) -> str:
        """Return the key's default or the engine's; if the key may not use the engine's, the first class it may use."""
        if key is not None and key.default is not None:
            return key.default
        if key is not None and key.classes is not None and self._default not in key.classes:
            return key.classes[0]
        return self._default

    def _of_tier(self, tier: str, key: ApiKey | None) -> str:
        if tier in self.names:
            return tier
        if tier in _SERVER_DECIDES:
            return self._default_of(key)
        if tier == "priority":
            return self.names[0]
        if tier == "flex":
            return self.names[-1]
        accepted = [*self.names, *_SERVER_DECIDES, "priority", "flex"]
        raise _unknown("'service_tier'", "service_tier", tier, accepted)

    def _of_header(self, name: str) -> str:
        if name not in self.names:
            raise _unknown(f"the header '{SLO_CLASS_HEADER}'", SLO_CLASS_HEADER, name, self.names)
        return name


def _unknown(where: str, param: str, given: str, accepted: Sequence[str]) -> ApiError:
    reason = f"Invalid value for {where}: {given[:100]!r} is none of {', '.join(accepted)}."
    return ApiError(reason, param=param, code="invalid_value")
