"""A socket whose descriptor outlives its closing, as long as a thread may be about to use the number."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterator

import pytest

from farcall.transports.sockets import OwnSocket


@pytest.fixture
def pair() -> Iterator[tuple[list[OwnSocket], socket.socket]]:
    """A list with the only reference to one end, and the other end."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(20.0)
    held = [OwnSocket(ours)]
    with theirs:
        yield held, theirs
    while held:
        held.pop().release()


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_it_takes_the_socket_over_and_makes_it_non_blocking() -> None:
    ours, theirs = socket.socketpair()
    descriptor = ours.fileno()
    own = OwnSocket(ours)
    assert ours.fileno() == -1
    assert own.fileno() == descriptor
    assert not os.get_blocking(descriptor)
    assert not os.get_inheritable(descriptor)
    own.release()
    theirs.close()


def test_the_descriptor_is_given_back_with_the_last_reference(pair: tuple[list[OwnSocket], socket.socket]) -> None:
    held, theirs = pair
    descriptor = held[0].fileno()
    held[0].release()
    held[0].release()
    assert theirs.recv(1) == b""
    assert is_open(descriptor)
    held.clear()
    assert not is_open(descriptor)


def test_a_call_under_way_keeps_the_descriptor_but_not_the_stream(pair: tuple[list[OwnSocket], socket.socket]) -> None:
    held, theirs = pair
    descriptor = held[0].fileno()
    under_way = held[0].recv  # what a thread holds that is just about to enter the kernel
    held.pop().release()
    assert theirs.recv(1) == b""
    newcomer, other = socket.socketpair()
    with newcomer, other:
        assert descriptor not in (newcomer.fileno(), other.fileno())
        other.send(b"for the newcomer")
        assert under_way(100) == b""
        del under_way
        assert not is_open(descriptor)
        assert newcomer.recv(100) == b"for the newcomer"


def test_a_socket_that_was_not_released_is_warned_of(pair: tuple[list[OwnSocket], socket.socket]) -> None:
    held, theirs = pair
    descriptor = held[0].fileno()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        held.clear()
        assert not is_open(descriptor)
        assert theirs.recv(1) == b""
    assert [warning.category for warning in caught] == [ResourceWarning]


def test_a_forked_child_leaves_the_stream_to_its_parent(pair: tuple[list[OwnSocket], socket.socket]) -> None:
    held, theirs = pair
    child = os.fork()
    if not child:
        held[0].abandon()
        os._exit(is_open(held[0].fileno()) if held[0].fileno() >= 0 else 0)
    assert os.waitpid(child, 0)[1] == 0
    theirs.send(b"still here")
    assert held[0].recv(100) == b"still here"
