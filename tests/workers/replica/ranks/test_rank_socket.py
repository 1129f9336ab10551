"""A connection of two ranks: nothing is read of a process without the cookie, and messages are whole and bounded."""

import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from crossdock.workers.replica.ranks.rank_socket import AuthenticationFailed, RankSocket, WorkerGroupAddress

COOKIE = b"c" * 32


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def connected(listener: socket.socket, cookie: bytes = COOKIE) -> tuple[RankSocket, RankSocket, socket.socket]:
    """Return both ends, the driver's first, and the driver's connection. Raises what the driver's end raises."""
    address = WorkerGroupAddress("127.0.0.1", listener.getsockname()[1], 0, cookie)
    with ThreadPoolExecutor(1) as pool:
        follower = pool.submit(RankSocket.connect, address)
        connection, _ = listener.accept()
        try:
            driver = RankSocket(connection, COOKIE, is_driver=True)
        except ConnectionError:
            with pytest.raises((ConnectionError, EOFError)):
                follower.result()
            raise
        return driver, follower.result(), connection


def test_messages_arrive_whole_and_in_order(listener: socket.socket) -> None:
    driver, follower, _ = connected(listener)
    messages = [bytes([number]) * size for number, size in enumerate((0, 1, 100, 3 << 20, 7))]
    sending = threading.Thread(target=lambda: [driver.send(message) for message in messages])
    sending.start()
    assert [follower.receive() for _ in messages] == messages
    sending.join()
    follower.send(b"back")
    assert driver.receive() == b"back"
    driver.close()
    with pytest.raises(EOFError):
        follower.receive()
    follower.close()


def test_follower_with_another_cookie_is_refused_on_both_sides(listener: socket.socket) -> None:
    with pytest.raises(AuthenticationFailed):
        connected(listener, b"guess" * 6)


@pytest.mark.parametrize("first", [b"", b"GET / HTTP/1.1\r\n\r\n" * 10, b"\0" * 64])
def test_stranger_is_refused_before_anything_is_parsed(listener: socket.socket, first: bytes) -> None:
    with socket.create_connection(listener.getsockname()) as stranger:
        stranger.sendall(first)
        stranger.shutdown(socket.SHUT_WR)
        with pytest.raises((AuthenticationFailed, EOFError)):
            RankSocket(listener.accept()[0], COOKIE, is_driver=True)


def test_echo_of_the_drivers_own_proof_is_refused(listener: socket.socket) -> None:
    """A stranger that sends back what it gets proves nothing."""
    with socket.create_connection(listener.getsockname()) as stranger:

        def echo() -> None:
            while data := stranger.recv(1024):
                stranger.sendall(data)

        echoing = threading.Thread(target=echo)
        echoing.start()
        with pytest.raises(AuthenticationFailed):
            RankSocket(listener.accept()[0], COOKIE, is_driver=True)
        echoing.join()


def test_silent_stranger_is_refused_at_the_deadline(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crossdock.workers.replica.ranks.rank_socket._HANDSHAKE_S", 0.05)
    with socket.create_connection(listener.getsockname()), pytest.raises(TimeoutError):
        RankSocket(listener.accept()[0], COOKIE, is_driver=True)


def test_message_over_the_limit_is_refused_before_it_is_read(listener: socket.socket) -> None:
    driver, follower, connection = connected(listener)
    connection.sendall(struct.pack("!I", 1 << 31))
    with pytest.raises(OSError, match="are taken"):
        follower.receive()
    with pytest.raises(ValueError, match="at most"):
        driver.send(bytes((1 << 28) + 1))
    driver.close()
    follower.close()


def test_close_wakes_a_reader_in_another_thread(listener: socket.socket) -> None:
    driver, follower, _ = connected(listener)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(driver.receive)
        driver.close()
        with pytest.raises((EOFError, OSError)):
            reading.result(240)
    follower.close()


def test_stranger_that_sends_byte_by_byte_is_refused_at_the_deadline(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline is of the whole proof: no byte of it renews it."""
    monkeypatch.setattr("crossdock.workers.replica.ranks.rank_socket._HANDSHAKE_S", 0.3)
    with socket.create_connection(listener.getsockname()) as stranger:
        has_ended = threading.Event()

        def drip() -> None:
            for _ in range(64):  # all of a proof, in 3.2 s
                if has_ended.wait(0.05):
                    return
                stranger.sendall(b"x")

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            with pytest.raises(TimeoutError):
                RankSocket(listener.accept()[0], COOKIE, is_driver=True)
        finally:
            has_ended.set()
            dripping.join()
