"""The SLO class of a request: by body, header and key; and the refusals."""

import pytest
from pydantic import ValidationError

from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.http.keys import ApiKey
from crossdock.cluster.api.http.service_tiers import ServiceTier, ServiceTiers
from crossdock.workers.schedule.request.slo import SloClass

TIERS = ServiceTiers()  # interactive, standard, batch


def key(*classes: str, default: str | None = None) -> ApiKey:
    return ApiKey(key="secret", classes=classes or None, default=default)


@pytest.mark.parametrize(
    ("tier", "header", "of_key", "chosen", "is_promised"),
    [
        (None, None, None, "standard", False),
        ("auto", None, None, "standard", False),
        ("default", None, None, "standard", False),
        ("standard", None, None, "standard", True),
        ("priority", None, None, "interactive", True),
        ("flex", None, None, "batch", True),
        ("batch", None, None, "batch", True),
        (None, "interactive", None, "interactive", True),
        ("auto", "interactive", None, "interactive", True),  # auto leaves it to the header
        ("priority", "interactive", None, "interactive", True),  # both name the same class
        ("default", "standard", None, "standard", True),
        (None, None, key(), "standard", False),
        ("priority", None, key(), "interactive", True),
        (None, None, key("batch", "standard"), "standard", False),  # the engine's default, if the key may use it
        (None, None, key("batch"), "batch", False),  # otherwise the first class that the key may use
        ("auto", None, key("batch"), "batch", False),
        (None, None, key("batch", "standard", default="batch"), "batch", True),  # the key's entry asks for it
        ("default", None, key(default="interactive"), "interactive", True),
        ("standard", None, key("batch", "standard", default="batch"), "standard", True),
    ],
)
def test_class_is_chosen_by_tier_header_and_key(
    tier: str | None, header: str | None, of_key: ApiKey | None, chosen: str, is_promised: bool
) -> None:
    tier_of_request = TIERS.choose(tier, header, of_key)
    assert (tier_of_request.slo_class, tier_of_request.is_promised) == (chosen, is_promised)
    openai_names = {"interactive": "priority", "standard": "default", "batch": "flex"}
    assert tier_of_request.openai_name == openai_names[chosen]


def test_class_with_name_of_tier_comes_first() -> None:
    classes = [SloClass(name=name, ttft_s=1, tpot_s=1) for name in ("gold", "flex", "auto", "rest")]
    tiers = ServiceTiers(classes, default="rest")
    chosen = [tiers.choose(name, None, None) for name in ("flex", "auto", "priority")]
    assert chosen == [
        ServiceTier("flex", True, "default"),
        ServiceTier("auto", True, "default"),
        ServiceTier("gold", True, "priority"),
    ]
    with pytest.raises(ApiError, match="give one of them"):
        tiers.choose("auto", "gold", None)  # here `auto` is a class like any other


@pytest.mark.parametrize(
    ("tier", "header", "param", "message"),
    [
        ("gold", None, "service_tier", "'gold' is none of interactive, standard, batch, auto, default, priority, flex"),
        (None, "gold", "X-SLO-Class", "'gold' is none of interactive, standard, batch"),
        (None, "priority", "X-SLO-Class", "'priority' is none of interactive, standard, batch"),
        (None, "", "X-SLO-Class", "'' is none of"),
        ("batch", "interactive", "service_tier", "the class 'batch' and the header 'X-SLO-Class' for 'interactive'"),
        ("default", "interactive", "service_tier", "give one of them"),
        ("x" * 1000, None, "service_tier", "x" * 100),
    ],
)
def test_unknown_or_contradictory_class_is_refused(
    tier: str | None, header: str | None, param: str, message: str
) -> None:
    with pytest.raises(ApiError) as error:
        TIERS.choose(tier, header, None)
    assert (error.value.status, error.value.param, error.value.code) == (400, param, "invalid_value")
    assert message in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("tier", "header", "param"),
    [("interactive", None, "service_tier"), ("priority", None, "service_tier"), (None, "interactive", "X-SLO-Class")],
)
def test_class_that_key_may_not_use_is_refused(tier: str | None, header: str | None, param: str) -> None:
    with pytest.raises(ApiError, match=r"may not use the class 'interactive'\. It may use batch, standard") as error:
        TIERS.choose(tier, header, key("batch", "standard"))
    assert (error.value.status, error.value.kind, error.value.param) == (403, "permission_error", param)
    assert error.value.code == "slo_class_not_allowed"
    assert "secret" not in str(error.value)


def test_owner_depends_on_key_alone() -> None:
    assert ApiKey(key="one").owner == ApiKey(key="one", classes=("batch",)).owner
    assert ApiKey(key="one").owner != ApiKey(key="two").owner
    assert "secret" not in key().owner


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([{"key": "hunter2", "classes": ["a"], "default": "b"}], "default 'b' must be one of its classes, which are a"),
        ([{"key": "hunter2", "classes": []}], "at least 1 item"),
        ([{"key": ""}], "at least 1 character"),
        ([{"key": "hunter2", "classs": ["a"]}], "Extra inputs"),
        ([["hunter2"]], "must be a string, or an object with key, classes, default, "),
        ([{"classes": ["a"]}], "key\n  Field required"),
    ],
)
def test_invalid_key_is_refused_and_not_shown(given: list[object], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        HttpConfig.model_validate({"api_keys": given})
    assert message in str(error.value)
    assert "hunter2" not in str(error.value)
