from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterator

import pytest

from farcall.testing.conformance import refusal
from farcall.transports.sockets import SocketChannel, SocketListener


@pytest.fixture
def pair() -> Iterator[tuple[SocketChannel, socket.socket]]:
    ours, theirs = socket.socketpair()
    channel = SocketChannel(ours, "test:peer")
    with theirs:
        yield channel, theirs
    channel.close()


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_the_methods_are_the_sockets_own(pair: tuple[SocketChannel, socket.socket]) -> None:
    channel, _ = pair
    methods = (channel.fileno, channel.receive, channel.receive_into, channel.send, channel.send_gather)
    assert [method.__name__ for method in methods] == ["fileno", "recv", "recv_into", "send", "sendmsg"]
    assert {type(method).__name__ for method in methods} == {"builtin_function_or_method"}


def test_the_channel_takes_the_socket_over_and_makes_it_non_blocking() -> None:
    ours, theirs = socket.socketpair()
    descriptor = ours.fileno()
    channel = SocketChannel(ours, "test:peer")
    assert ours.fileno() == -1
    assert channel.fileno() == descriptor
    assert not os.get_blocking(descriptor)
    assert not os.get_inheritable(descriptor)
    channel.close()
    theirs.close()


def test_closing_gives_the_descriptor_back(pair: tuple[SocketChannel, socket.socket]) -> None:
    channel, _ = pair
    descriptor = channel.fileno()
    channel.close()
    assert not is_open(descriptor)


def test_a_call_under_way_keeps_the_descriptor_but_not_the_stream(pair: tuple[SocketChannel, socket.socket]) -> None:
    channel, theirs = pair
    descriptor = channel.fileno()
    under_way = channel.receive  # what a thread holds that is just about to enter the kernel
    channel.close()
    theirs.settimeout(20.0)
    assert theirs.recv(1) == b""
    newcomer, other = socket.socketpair()
    with newcomer, other:
        assert descriptor not in (newcomer.fileno(), other.fileno())
        other.send(b"for the newcomer")
        assert under_way(100) == b""
        del under_way
        assert not is_open(descriptor)
        assert newcomer.recv(100) == b"for the newcomer"


def test_a_closed_channel_says_who_it_led_to(pair: tuple[SocketChannel, socket.socket]) -> None:
    channel, _ = pair
    assert repr(channel) == "<SocketChannel test:peer>"
    channel.close()
    assert repr(channel) == "<SocketChannel test:peer closed>"
    assert "the channel to test:peer is closed" in str(refusal(channel.send, b"x"))


def test_a_channel_of_a_connection_that_is_gone_closes_quietly() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        channel = SocketChannel(socket.create_connection(server.getsockname()), "test:peer")
        accepted, _ = server.accept()
        channel.send(b"unread")
        assert accepted.recv(1) == b"u"
        accepted.close()  # with unread bytes: a reset
        assert isinstance(refusal(drain, channel), ConnectionError)
        channel.close()


def drain(channel: SocketChannel) -> None:
    while True:
        try:
            channel.receive(10)
        except BlockingIOError:
            pass


def test_a_channel_that_nobody_closed_is_complained_about() -> None:
    ours, theirs = socket.socketpair()
    with theirs, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        channel = SocketChannel(ours, "test:peer")
        descriptor = channel.fileno()
        del channel
        assert not is_open(descriptor)
        assert theirs.recv(1) == b""
    assert [warning.category for warning in caught] == [ResourceWarning]


def test_a_listener_that_is_closed_while_it_accepts_refuses_the_next() -> None:
    listener = SocketListener(socket.create_server(("127.0.0.1", 0)), "test:here", SocketChannel)
    assert repr(listener) == "<SocketListener test:here>"
    descriptor = listener.fileno()
    port = socket.socket(fileno=os.dup(descriptor))
    address = port.getsockname()
    port.close()
    under_way = listener._open()
    listener.close()
    assert is_open(descriptor)
    with socket.socket() as client:
        assert client.connect_ex(address) != 0
    del under_way
    assert not is_open(descriptor)
    assert repr(listener) == "<SocketListener test:here closed>"
    assert "the listener at test:here is closed" in str(refusal(listener.accept))


def test_a_connection_that_was_given_up_before_it_was_accepted_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = SocketListener(socket.create_server(("127.0.0.1", 0)), "test:here", SocketChannel)

    def aborted(_: socket.socket) -> None:
        raise ConnectionAbortedError(103, "Software caused connection abort")

    monkeypatch.setattr(socket.socket, "accept", aborted)
    assert listener.accept() is None
    listener.close()
