"""A transfer that is begun again under the epoch of one that has not ended: never silently ignored."""

import pytest

from crossdock.kvtransfer.events import Failed, Reason, Released, WriterStopped
from crossdock.kvtransfer.messages import Grant, Stopped
from crossdock.kvtransfer.next_write import TargetRank
from crossdock.kvtransfer.protocol_outputs import ProtocolOutput
from crossdock.kvtransfer.receiver import Receiver
from crossdock.kvtransfer.sender import Sender

from .one_group import whole


def reasons(outputs: list[ProtocolOutput]) -> list[Reason]:
    return [output.reason for output in outputs if isinstance(output, Failed)]


@pytest.mark.parametrize("source", ["p", "q"])
def test_expectation_that_is_still_stopping_fails_when_it_is_begun_again(source: str) -> None:
    receiver = Receiver(16, b"blob", 1.0)
    receiver.expect("r", 0, {"p": (0, 100)}, 10.0, 0.0)
    receiver.grant("r", 0, 0, whole((1, 2)), 0.1)
    receiver.cancel("r", 0, 0.2)
    assert reasons(receiver.expect("r", 0, {source: (0, 100)}, 10.0, 0.3)) == [Reason.SUPERSEDED]
    assert receiver.receive("p", Stopped("r", 0, True), 0.4) == [WriterStopped("r", 0)]


def test_expectation_from_other_sources_fails_and_from_the_same_goes_on() -> None:
    receiver = Receiver(16, b"blob", 1.0)
    receiver.expect("r", 0, {"p": (0, 100)}, 10.0, 0.0)
    assert receiver.expect("r", 0, {"p": (0, 100)}, 10.0, 0.1) == []
    assert reasons(receiver.expect("r", 0, {"q": (0, 100)}, 10.0, 0.2)) == [Reason.SUPERSEDED]


def test_shipment_that_is_still_stopping_fails_when_it_is_begun_again() -> None:
    sender, target = Sender(0, 16, 1 << 20), TargetRank(10, (100,), 1)
    sender.ship("r", 0, {"d": target}, 10.0, 0.0)
    sender.chunk("r", whole((1, 2)), 32, 0.1)
    sender.receive("d", Grant("r", 0, 0, whole((3, 4))), 0.2)  # a write is open from now on
    sender.cancel("r", 0, 0.3)
    assert reasons(sender.ship("r", 0, {"e": target}, 10.0, 0.4)) == [Reason.SUPERSEDED]
    assert any(isinstance(output, Released) for output in sender.write_done("r", 0, "d", 0.5))


def test_shipment_to_other_targets_fails_and_to_the_same_goes_on() -> None:
    sender, target = Sender(0, 16, 1 << 20), TargetRank(10, (100,), 1)
    sender.ship("r", 0, {"d": target}, 10.0, 0.0)
    assert sender.ship("r", 0, {"d": target}, 10.0, 0.1) == []
    assert reasons(sender.ship("r", 0, {"e": target}, 10.0, 0.2)) == [Reason.SUPERSEDED]
