"""Keys come and go without a restart, and what one may use is counted."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.keys import ApiKey, KeyRing, read_keys
from crossdock.cluster.api.limits import Account, Ledger

CLASSES = ("interactive", "batch")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def replace(path: Path, text: str) -> None:
    """As Kubernetes does with a mounted Secret: a new file takes the name."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def accepts(ring: KeyRing, key: str) -> bool:
    try:
        return ring.find(f"Bearer {key}".encode()).key == key
    except ApiError:
        return False


@pytest.mark.parametrize(
    "text",
    [
        "- first\n- key: second\n  classes: [batch]\n",
        '["first", {"key": "second"}]',
        "first\nsecond\n",
        "first second",
    ],
)
def test_a_file_of_keys(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    assert [key.key for key in read_keys(path, CLASSES)] == ["first", "second"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "neither YAML nor a key on each line"),
        ("key: hunter2", "hunter2"),
        ("[{key: hunter2, class: [batch]}]", "0.class"),
        ("[{key: hunter2, classes: [gold]}]", "'gold' is none of engine.slo_classes"),
        ("[hunter2, hunter2]", "0 and 1 are the same key"),
        ("[12345678]", "must be a string, or an object with key, classes"),
        ("[{key: hunter2, requests_per_minute: 0}]", "0.requests_per_minute"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        KeyRing((), path, CLASSES)
    assert "http.api_keys_file" in str(error.value)
    assert "hunter2" not in str(error.value)
    if message != "hunter2":
        assert message in str(error.value)


def test_no_file_is_an_error_not_an_open_door(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        KeyRing((), tmp_path / "keys")
    (tmp_path / "keys").write_text("")
    ring = KeyRing((), tmp_path / "keys")
    assert not ring.is_open
    assert not accepts(ring, "")


def test_keys_are_rotated_while_serving(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", Clock()
    path.write_text("old\n")
    ring = KeyRing((ApiKey(key="fixed"),), path, CLASSES, clock)
    assert [accepts(ring, key) for key in ("fixed", "old", "new")] == [True, True, False]
    replace(path, "old\nnew\n")
    clock.now += 2
    assert [accepts(ring, key) for key in ("fixed", "old", "new")] == [True, True, True]
    replace(path, "new\n")
    clock.now += 2
    assert [accepts(ring, key) for key in ("fixed", "old", "new")] == [True, False, True]


def test_a_broken_file_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, clock = tmp_path / "keys", Clock()
    path.write_text("old\n")
    ring = KeyRing((), path, CLASSES, clock)
    for text in ("[hunter2, {key: ", "[{key: hunter2, classes: [gold]}]"):
        replace(path, text)
        clock.now += 2
        with caplog.at_level(logging.ERROR, "ray.serve"):
            assert accepts(ring, "old")
    path.unlink()
    clock.now += 2
    assert accepts(ring, "old")
    assert len(caplog.records) == 3
    assert "hunter2" not in caplog.text
    replace(path, "new\n")
    clock.now += 2
    assert [accepts(ring, key) for key in ("old", "new")] == [False, True]


def test_the_file_is_looked_at_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, clock = tmp_path / "keys", Clock()
    path.write_text("old\n")
    ring = KeyRing((), path, CLASSES, clock)
    looks: list[Path] = []
    stat = Path.stat
    monkeypatch.setattr(Path, "stat", lambda self, **options: (looks.append(self), stat(self, **options))[1])
    for _ in range(100):
        clock.now += 0.05
        assert accepts(ring, "old")
    assert 4 <= looks.count(path) <= 6


def test_salts_keep_tenants_apart() -> None:
    """By default nobody shares; a group does; and no two pairs of a group and a salt read the same."""
    first, second = ApiKey(key="a"), ApiKey(key="b")
    assert first.cache_salt("") != second.cache_salt("")
    assert first.cache_salt("x") != first.cache_salt("")
    assert first.cache_salt("") == ApiKey(key="a").cache_salt("")
    together = [ApiKey(key=key, cache_group="us").cache_salt("s") for key in "ab"]
    assert together[0] == together[1]
    assert ApiKey(key="a", cache_group="us").cache_salt("er") != ApiKey(key="a", cache_group="user").cache_salt("")


@given(st.text(), st.text(), st.text(), st.text())
def test_salts_are_injective(group: str, salt: str, other_group: str, other_salt: str) -> None:
    one = ApiKey(key="a", cache_group=group).cache_salt(salt)
    other = ApiKey(key="a", cache_group=other_group).cache_salt(other_salt)
    assert (one == other) == ((group, salt) == (other_group, other_salt))


# -- limits ------------------------------------------------------------------------------------------------------------


def account(clock: Clock, share: int = 1, **limits: Any) -> Account:
    return Ledger(share, clock).account(ApiKey(key="a", **limits))


def refusal(call: Any, *args: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        call(*args)
    assert (error.value.status, error.value.kind, error.value.code) == (429, "rate_limit_error", "rate_limit_exceeded")
    return error.value


def test_requests_per_minute() -> None:
    clock = Clock()
    it = account(clock, requests_per_minute=6)
    for _ in range(6):
        it.begin()
        it.end()
    error = refusal(it.begin)
    assert error.headers == {
        "Retry-After": "10",
        "x-ratelimit-limit-requests": "6",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m0s",
    }
    assert "6 requests per minute. Try again in 10s." in str(error)
    clock.now += 10
    it.begin()
    refusal(it.begin)


def test_requests_at_once() -> None:
    it = account(Clock(), max_concurrent_requests=2)
    it.begin()
    it.begin()
    assert refusal(it.begin).headers == {"Retry-After": "1"}
    it.end()
    it.begin()


def test_tokens_per_minute() -> None:
    """Prompts are paid for at once, outputs when they have come."""
    clock = Clock()
    it = account(clock, tokens_per_minute=600)
    it.prompt(500)
    error = refusal(it.prompt, 200)
    assert error.headers["Retry-After"] == "10"
    assert error.headers["x-ratelimit-remaining-tokens"] == "100"
    it.output(400)
    assert it.headers()["x-ratelimit-remaining-tokens"] == "0"
    clock.now += 30
    assert int(refusal(it.prompt, 1).headers["Retry-After"]) == 1
    clock.now += 30
    it.prompt(300)
    assert "Retry-After" not in refusal(it.prompt, 601).headers, "waiting does not help a prompt larger than the limit"


def test_every_ingress_has_its_share() -> None:
    clock = Clock()
    it = account(clock, 3, requests_per_minute=9, max_concurrent_requests=2)
    it.begin()
    refusal(it.begin)
    it.end()
    it.begin()
    it.end()
    assert it.headers()["x-ratelimit-remaining-requests"] == "3"
    it.begin()
    it.end()
    refusal(it.begin)


def test_changed_limits_are_a_new_account() -> None:
    ledger = Ledger(1, Clock())
    key = ApiKey(key="a", requests_per_minute=1)
    ledger.account(key).begin()
    assert ledger.account(ApiKey(key="a", requests_per_minute=1)) is ledger.account(key)
    refusal(ledger.account(key).begin)
    ledger.account(ApiKey(key="a", requests_per_minute=2)).begin()
    ledger.account(ApiKey(key="b", requests_per_minute=1)).begin()


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 900), st.integers(0, 300)), max_size=60))
def test_no_minute_has_more_than_the_limit_and_what_came_late(events: list[tuple[float, int, int]]) -> None:
    """In any minute, prompts begun cost at most the limit and what one bucket held before."""
    clock, limit = Clock(), 600
    it = account(clock, tokens_per_minute=limit)
    begun: list[tuple[float, int]] = []
    for seconds, prompt, output in events:
        clock.now += seconds
        try:
            it.prompt(prompt)
        except ApiError:
            continue
        begun.append((clock.now, prompt))
        it.output(output)
    for start, _ in begun:
        assert sum(tokens for when, tokens in begun if start <= when < start + 60) <= 2 * limit
