"""API keys are rotated without a restart, and the use of each is limited."""

import logging
import os
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.http.keys import ApiKey, KeyRing
from crossdock.cluster.api.http.limits import ASK_S, READS_PER_MINUTE, Account, Charge, Ledger, Loan, Unit
from crossdock.cluster.api.http.tenant_reader import TenantReader
from tests.waiting import Clock

CLASSES = ("interactive", "batch")


def replace(path: Path, text: str) -> None:
    """Replace a file as Kubernetes does with a mounted Secret: a new file takes the name."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def key_file(folder: Path, text: str, *keys: ApiKey) -> tuple[Path, Clock, KeyRing]:
    """Return a file of keys, and a ring of its keys and others."""
    path, clock = folder / "keys", Clock()
    path.write_text(text)
    return path, clock, KeyRing(keys, path, CLASSES, clock)


def settle(ring: KeyRing, clock: Clock) -> None:
    """Let two checks pass: a file counts when it is seen unchanged for the second time."""
    for _ in range(2):
        clock.now += 2
        accepts(ring, "any")


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
def test_key_file_in_any_form_is_read(tmp_path: Path, text: str) -> None:
    _, _, ring = key_file(tmp_path, text)
    assert [accepts(ring, key) for key in ("first", "second", "")] == [True, True, False]


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
def test_unusable_key_file_is_refused_and_shows_no_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        key_file(tmp_path, text)
    assert "http.api_keys_file" in str(error.value)
    assert "hunter2" not in str(error.value)
    if message != "hunter2":
        assert message in str(error.value)


def test_missing_key_file_does_not_open_the_api(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        KeyRing((), tmp_path / "keys")
    (tmp_path / "keys").write_text("")
    ring = KeyRing((), tmp_path / "keys")
    assert not ring.is_open
    assert not accepts(ring, "")


def test_changed_key_file_rotates_keys(tmp_path: Path) -> None:
    path, clock, ring = key_file(tmp_path, "old\n", ApiKey(key="fixed"))
    assert [accepts(ring, key) for key in ("fixed", "old", "new")] == [True, True, False]
    replace(path, "old\nnew\n")
    settle(ring, clock)
    assert [accepts(ring, key) for key in ("fixed", "old", "new")] == [True, True, True]
    replace(path, "new\n")
    settle(ring, clock)
    assert [accepts(ring, key) for key in ("fixed", "old", "new")] == [True, False, True]


def test_broken_key_file_keeps_old_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, clock, ring = key_file(tmp_path, "old\n")
    for text in ("[hunter2, {key: ", "[{key: hunter2, classes: [gold]}]"):
        replace(path, text)
        with caplog.at_level(logging.ERROR, "ray.serve"):
            settle(ring, clock)
            assert accepts(ring, "old")
    path.unlink()
    settle(ring, clock)
    assert accepts(ring, "old")
    assert len(caplog.records) == 3
    assert "hunter2" not in caplog.text
    replace(path, "new\n")
    settle(ring, clock)
    assert [accepts(ring, key) for key in ("old", "new")] == [False, True]


@pytest.mark.parametrize("mark", ["", "...\n"])
def test_key_file_cut_off_at_any_byte_gives_all_keys_or_the_old_ones(tmp_path: Path, mark: str) -> None:
    """A part of YAML is YAML, and the part of a key is a key. With an end mark, the whole file counts."""
    path, clock, ring = key_file(tmp_path, "- old\n")
    whole = f"- first\n- key: second\n  classes: [batch]\n- third\n{mark}"
    keys = ["old", "first", "second", "third"]
    found = []
    for length in range(len(whole) + 1):
        path.write_text(whole[:length])
        os.utime(path, ns=(length, length))  # each cut has a time of its own, however fast the test is
        settle(ring, clock)
        found.append([key for key in keys if accepts(ring, key)])
        assert len(ring._keys) == len(found[-1]), "no key is a part of another"
    assert found[:-2] == [["old"]] * (len(whole) - 1)
    assert found[-1] == (["first", "second", "third"] if mark else ["old"])


def test_file_still_being_written_is_not_read(tmp_path: Path) -> None:
    """Though it is a new one: it counts when a second check finds it unchanged."""
    path, clock, ring = key_file(tmp_path, "old")
    path.unlink()
    with path.open("w") as file:
        for part in ("fir", "st\nsec"):
            file.write(part)
            file.flush()
            clock.now += 2
            assert [accepts(ring, key) for key in ("old", "fir", "first", "sec")] == [True, False, False, False]
        file.write("ond\n")
    settle(ring, clock)
    assert [accepts(ring, key) for key in ("old", "first", "second", "sec")] == [False, True, True, False]


def test_replaced_file_counts_though_its_predecessors_number_is_free_again(tmp_path: Path) -> None:
    """File systems give the number of a deleted file to the next new one."""
    path, clock, ring = key_file(tmp_path, "old")
    for text in ("first", "second", "third"):
        replace(path, text)
    settle(ring, clock)
    assert [accepts(ring, key) for key in ("old", "third")] == [False, True]


def test_key_file_is_checked_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, clock, ring = key_file(tmp_path, "old\n")
    looks: list[Path] = []
    stat = Path.stat
    monkeypatch.setattr(Path, "stat", lambda self, **options: (looks.append(self), stat(self, **options))[1])
    for _ in range(100):
        clock.now += 0.05
        assert accepts(ring, "old")
    assert 4 <= looks.count(path) <= 6


def test_cache_salt_differs_between_owners() -> None:
    """Keys share a salt only within a group, and no two pairs of group and salt give the same."""
    first, second = ApiKey(key="a"), ApiKey(key="b")
    assert first.cache_salt("") != second.cache_salt("")
    assert first.cache_salt("x") != first.cache_salt("")
    assert first.cache_salt("") == ApiKey(key="a").cache_salt("")
    together = [ApiKey(key=key, cache_group="us").cache_salt("s") for key in "ab"]
    assert together[0] == together[1]
    assert ApiKey(key="a", cache_group="us").cache_salt("er") != ApiKey(key="a", cache_group="user").cache_salt("")


# -- limits ------------------------------------------------------------------------------------------------------------


def account(clock: Clock, share: int = 1, **limits: Any) -> Account:
    return Ledger(share, clock).account(ApiKey(key="a", **limits))


def charge(clock: Clock, **limits: Any) -> Charge:
    return Charge(account(clock, **limits))


def done(call: Coroutine[Any, Any, Any] | None) -> Any:
    """Return the result of a coroutine that has nothing to wait for."""
    if call is None:
        return None
    with pytest.raises(StopIteration) as end:
        call.send(None)
    return end.value.value


def refusal(call: Any, *args: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        done(call(*args))
    assert (error.value.status, error.value.kind, error.value.code) == (429, "rate_limit_error", "rate_limit_exceeded")
    return error.value


def test_requests_beyond_limit_per_minute_are_refused() -> None:
    clock = Clock()
    limited = account(clock, requests_per_minute=6)
    for _ in range(6):
        done(limited.begin())
        limited.end()
    error = refusal(limited.begin)
    assert error.headers == {
        "Retry-After": "10",
        "x-ratelimit-limit-requests": "6",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m0s",
    }
    assert "6 requests per minute. Try again in 10s." in str(error)
    clock.now += 10
    done(limited.begin())
    refusal(limited.begin)


def test_concurrent_requests_beyond_limit_are_refused() -> None:
    limited = account(Clock(), max_concurrent_requests=2)
    done(limited.begin())
    done(limited.begin())
    assert refusal(limited.begin).headers == {"Retry-After": "1"}
    limited.end()
    done(limited.begin())


def test_tokens_beyond_limit_per_minute_are_refused() -> None:
    """Prompts are charged at once, outputs that nothing was reserved for as they come."""
    clock = Clock()
    limited = charge(clock, tokens_per_minute=600)
    done(limited.prompt(500))
    error = refusal(limited.prompt, 200)
    assert error.headers["Retry-After"] == "10"
    assert error.headers["x-ratelimit-remaining-tokens"] == "100"
    limited.output(400)
    assert limited.headers()["x-ratelimit-remaining-tokens"] == "0"
    clock.now += 30
    assert int(refusal(limited.prompt, 1).headers["Retry-After"]) == 1
    clock.now += 30
    done(limited.prompt(300))
    assert "Retry-After" not in refusal(limited.prompt, 601).headers, (
        "waiting does not help a prompt larger than the limit"
    )


def test_output_is_reserved_and_what_was_not_used_is_given_back() -> None:
    clock = Clock()
    one = charge(clock, tokens_per_minute=600)
    done(one.prompt(100, 300))
    beside = Charge(one.account)
    refusal(beside.prompt, 100, 101)
    one.output(50)
    one.end()
    one.end()
    assert one.headers()["x-ratelimit-remaining-tokens"] == "450"
    done(beside.prompt(100, 350))
    beside.output(350)
    assert one.headers()["x-ratelimit-remaining-tokens"] == "0"
    beside.output(60)  # more than it had reserved
    beside.end()
    clock.now += 6
    assert one.account.tokens is not None
    assert (one.headers()["x-ratelimit-remaining-tokens"], one.account.tokens.level) == ("0", 0)


def test_requests_begun_at_once_use_no_more_tokens_than_the_limit() -> None:
    """With outputs that may be longer than the limit, one request runs at a time."""
    clock = Clock()
    limited = account(clock, tokens_per_minute=100)
    running = []
    for _ in range(1000):
        one = Charge(limited)
        with suppress(ApiError):
            done(one.prompt(1, 2000))
            running.append(one)
    assert len(running) == 1
    running[0].output(2000)
    running[0].end()
    clock.now += 60 * 19
    refusal(Charge(limited).prompt, 0)
    clock.now += 61
    done(Charge(limited).prompt(1, 2000))


def test_reads_are_limited_for_every_key() -> None:
    clock = Clock()
    limited = account(clock)
    for _ in range(READS_PER_MINUTE):
        done(Charge(limited).begin(is_read=True))
    assert "GET" in str(refusal(Charge(limited).begin, True))
    done(Charge(limited).begin(is_read=False))
    clock.now += 1
    for _ in range(READS_PER_MINUTE // 60):
        done(Charge(limited).begin(is_read=True))
    refusal(Charge(limited).begin, True)


def test_seconds_are_reserved_as_tokens_took_of_late_and_paid_as_charged() -> None:
    clock = Clock()
    limited = account(clock, seconds_per_minute=30)
    first = Charge(limited)
    done(first.prompt(100, 50))  # no price is known: nothing is reserved
    first.output(50)
    first.spent(15.0, 150)
    first.end()
    assert limited.seconds is not None
    assert limited.seconds.level == pytest.approx(15)
    second = Charge(limited)
    done(second.prompt(100, 40))
    assert limited.seconds.level == pytest.approx(1.0), "0.1 s for each token"
    refused = refusal(Charge(limited).prompt, 20, 10)
    assert "30 seconds per minute" in str(refused)
    assert refused.headers["Retry-After"] == "4", "2 s are missing, at half a second per second"
    second.end()
    assert limited.seconds.level == pytest.approx(15 - 10), "it left before its end, and pays for its prompt"


def test_seconds_of_another_ingress_are_borrowed() -> None:
    clock = Clock()
    ingresses = Ingresses(2, clock, seconds_per_minute=60)
    ingresses[0].pay(10.0, 100)
    ingresses[1].pay(10.0, 100)
    assert done(ingresses[0].reserve_seconds(400)) == 30.0, "its own share at most"
    assert done(ingresses[0].reserve_seconds(200)) == 20.0, "of the other's"
    refusal(partial(ingresses[0].reserve_seconds, 150))


def test_tenant_is_the_key_or_whom_a_trusted_header_names() -> None:
    gateway, own = ApiKey(key="g", name="gate", weight=2, names_tenants=True), ApiKey(key="k", weight=3)
    tenant_reader, headers = TenantReader("X-Tenant", {"gold": 5.0}), {b"x-tenant": b"gold"}
    assert tenant_reader.of(own, headers) == (own.owner[:8], 3.0, ""), "a client's key names no tenant"
    assert tenant_reader.of(gateway, headers) == ("gold", 5.0, "gate")
    assert tenant_reader.of(gateway, {b"x-tenant": b"other"}) == ("other", 2.0, "gate")
    assert tenant_reader.of(gateway, {}) == ("gate", 2.0, "")
    assert tenant_reader.of(None, headers) == ("gold", 5.0, "")
    assert TenantReader().of(None, headers) == ("", 1.0, ""), "the header is not trusted"
    with pytest.raises(ApiError, match="X-Tenant"):
        tenant_reader.of(None, {b"x-tenant": b"two words"})


def test_tenants_of_two_keys_share_no_account_though_their_names_are_equal() -> None:
    """The name of a key, and what two gateways call a tenant of theirs."""
    tenant_reader, headers = TenantReader("X-Tenant"), {b"x-tenant": b"search"}
    keys = [ApiKey(key="a", name="search")]
    keys += [ApiKey(key=name, name=name, names_tenants=True) for name in ("one", "two")]
    accounts = [tenant_reader.of(key, headers).account for key in keys]
    assert accounts == ["search", "one/search", "two/search"]
    nameless = [ApiKey(key=name, names_tenants=True) for name in ("c", "d")]
    assert len({tenant_reader.of(key, headers).account for key in nameless}) == 2
    stored = tenant_reader.of(keys[1], {})
    assert tenant_reader.named(keys[1], stored.name) == stored, "a batch keeps the name alone"


class Ingresses:
    """Ledgers of several ingresses, each of which can ask the others."""

    def __init__(self, count: int, clock: Clock, **limits: Any) -> None:
        self.key = ApiKey(key="a", **limits)
        self.num_asked = 0
        self.silent: set[int] = set()
        self.ledgers = [Ledger(count, clock, partial(self.ask, number)) for number in range(count)]

    async def ask(self, asker: int, owner: str, unit: Unit, amount: float) -> list[Loan]:
        assert owner == self.key.owner
        self.num_asked += 1
        return [
            ledger.account(self.key).lend(unit, amount)
            for number, ledger in enumerate(self.ledgers)
            if number != asker and number not in self.silent
        ]

    def __getitem__(self, number: int) -> Account:
        return self.ledgers[number].account(self.key)


def test_one_connection_may_use_the_whole_limit_and_all_together_no_more() -> None:
    clock = Clock()
    ingresses = Ingresses(3, clock, requests_per_minute=9, tokens_per_minute=900)
    for _ in range(9):
        done(ingresses[0].begin())
        ingresses[0].end()
    for number in range(3):
        refusal(ingresses[number].begin)
    clock.now += ASK_S
    assert done(ingresses[1].reserve(100, 200)) == 300
    assert done(ingresses[0].reserve(500, 0)) == 500, "a prompt that is longer than a share"
    refusal(ingresses[2].reserve, 101, 0)
    refusal(ingresses[2].reserve, 901, 0)


def test_refused_requests_ask_the_other_ingresses_seldom() -> None:
    clock = Clock()
    ingresses = Ingresses(2, clock, requests_per_minute=2)
    for _ in range(2):
        done(ingresses[0].begin())
    asked = ingresses.num_asked
    for _ in range(100):
        refusal(ingresses[0].begin)
        clock.now += 0.001
    assert ingresses.num_asked == asked + 1


def test_running_requests_are_counted_at_all_ingresses() -> None:
    ingresses = Ingresses(4, Clock(), max_concurrent_requests=2)
    done(ingresses[0].begin())
    done(ingresses[1].begin())
    for number in range(4):
        refusal(ingresses[number].begin)
    ingresses[0].end()
    done(ingresses[3].begin())
    ingresses.silent = {0, 1, 2}
    done(ingresses[3].begin())
    refusal(ingresses[3].begin)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.floats(0, 10), st.integers(0, 400), st.integers(0, 400), st.floats(0, 1)),
        max_size=60,
    )
)
def test_ingresses_together_stay_within_the_limit(events: list[tuple[int, float, int, int, float]]) -> None:
    clock, limit = Clock(), 600
    ingresses = Ingresses(3, clock, tokens_per_minute=limit)
    used = 0
    for number, seconds, prompt, reserved, share in events:
        clock.now += seconds
        one = Charge(ingresses[number])
        with suppress(ApiError):
            done(one.prompt(prompt, reserved))
            output = int(share * min(reserved, max(0, limit // 3 - prompt)))  # no more than was reserved
            one.output(output)
            one.end()
            used += prompt + output
        assert used <= limit + limit / 60 * clock.now + 1e-6


def test_changed_limits_begin_a_new_account() -> None:
    ledger = Ledger(1, Clock())
    key = ApiKey(key="a", requests_per_minute=1)
    done(ledger.account(key).begin())
    assert ledger.account(ApiKey(key="a", requests_per_minute=1)) is ledger.account(key)
    refusal(ledger.account(key).begin)
    done(ledger.account(ApiKey(key="a", requests_per_minute=2)).begin())
    done(ledger.account(ApiKey(key="b", requests_per_minute=1)).begin())


def test_accounts_of_keys_that_are_no_longer_used_are_forgotten() -> None:
    clock = Clock()
    ledger = Ledger(1, clock)
    busy, in_debt = ApiKey(key="busy", requests_per_minute=9), ApiKey(key="in debt", tokens_per_minute=10)
    done(ledger.account(busy).begin())
    Charge(ledger.account(in_debt)).output(10_000)
    for number in range(10_000):
        account = ledger.account(ApiKey(key=f"key {number}", requests_per_minute=60, tokens_per_minute=600))
        one = Charge(account)
        done(one.begin(is_read=False))
        done(one.prompt(10, 5))
        one.end()
        clock.now += 2
    assert len(ledger) < 200
    refusal(Charge(ledger.account(in_debt)).prompt, 1)
    assert ledger.account(busy).num_running == 1


@given(
    st.lists(
        st.tuples(st.floats(0, 30), st.integers(1, 600), st.integers(0, 900), st.floats(0, 1.5), st.integers(0, 3)),
        max_size=40,
    )
)
def test_tokens_over_any_time_stay_within_the_limit_and_what_outputs_exceed(
    events: list[tuple[float, int, int, float, int]],
) -> None:
    """… their reservations by. Requests overlap, and each ends after up to three others have begun."""
    clock, limit = Clock(), 600
    limited = account(clock, tokens_per_minute=limit)
    used, beyond = 0, 0
    running: list[tuple[int, Charge, int]] = []
    for number, (seconds, prompt, reserved, share, others) in enumerate(events):
        clock.now += seconds
        one = Charge(limited)
        with suppress(ApiError):
            done(one.prompt(prompt, reserved))
            output = int(share * reserved)
            used += prompt
            beyond += max(0, prompt + output - min(prompt + reserved, limit))
            running.append((number + others, one, output))
        for end, ended, output in [*running]:
            if end <= number:
                running.remove((end, ended, output))
                for _ in range(output):  # one by one, as they come
                    ended.output(1)
                used += output
                ended.end()
        assert used <= limit + limit / 60 * clock.now + beyond + 1e-6


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 900), st.integers(0, 300)), max_size=60))
def test_tokens_begun_in_any_minute_stay_within_twice_the_limit(events: list[tuple[float, int, int]]) -> None:
    """In any minute, what is reserved is at most the limit and the content of the bucket before."""
    clock, limit = Clock(), 600
    limited = account(clock, tokens_per_minute=limit)
    begun: list[tuple[float, int]] = []
    for seconds, prompt, output in events:
        clock.now += seconds
        one = Charge(limited)
        try:
            done(one.prompt(prompt, output))
        except ApiError:
            continue
        begun.append((clock.now, min(prompt + output, limit)))
        one.output(output)
        one.end()
    for start, _ in begun:
        assert sum(tokens for when, tokens in begun if start <= when < start + 60) <= 2 * limit
