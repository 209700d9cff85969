"""What is noted of strangers: a line for each kind from each address, however often they come."""

from __future__ import annotations

import pytest

from farcall.options import RpcBackendOptions
from farcall.security.limits import Limits, StrangerLog, limits_from_options


def test_each_kind_from_each_address_is_new_once() -> None:
    log = StrangerLog()
    assert log.is_new("tcp:10.0.0.1:4000", "silent")
    assert not log.is_new("tcp:10.0.0.1:4001", "silent"), "the port is of no account"
    assert log.is_new("tcp:10.0.0.1:4000", "wrong secret")
    assert log.is_new("tcp:10.0.0.2:4000", "silent")
    assert log.is_new("unix:process 7", "silent")
    assert log.is_new("unix:process 8", "silent")


def test_it_does_not_grow_for_ever() -> None:
    log = StrangerLog(max_entries=3)
    for host in range(10):
        assert log.is_new(f"tcp:10.0.0.{host}:1", "silent")
    assert len(log._seen) == 3
    assert not log.is_new("tcp:10.0.0.9:1", "silent")
    assert log.is_new("tcp:10.0.0.0:1", "silent")


def test_one_without_entries_remembers_nothing() -> None:
    log = StrangerLog(max_entries=0)
    assert log.is_new("tcp:10.0.0.1:1", "silent")
    assert log.is_new("tcp:10.0.0.1:1", "silent")


def test_the_limits_are_those_of_the_options() -> None:
    options = RpcBackendOptions(max_strangers=3, proof_timeout=0.5, max_greeting_size=2048)
    assert limits_from_options(options) == Limits(3, 0.5, 2048)
    assert limits_from_options(RpcBackendOptions()) == Limits()


@pytest.mark.parametrize(
    ("one", "other", "is_new"),
    [
        ("tcp:127.0.0.1:4000", "tcp:127.3.4.5:4001", False),
        ("127.0.0.1:4000", "[::1]:4001", False),
        ("tcp:127.0.0.1:4000", "[::ffff:127.0.0.9]:4001", False),
        ("tcp:[2001:db8:1:2::1]:4000", "tcp:[2001:db8:1:2:3:4:5:6]:4000", False),
        ("tcp:[2001:db8:1:2::1]:4000", "tcp:[2001:db8:1:3::1]:4000", True),
        ("tcp:[fe80::1%eth0]:4000", "tcp:[fe80::2%eth0]:4000", False),
        ("tcp:192.0.2.1:4000", "tcp:192.0.2.2:4000", True),
    ],
)
def test_addresses_that_one_stranger_may_have_count_as_one(one: str, other: str, is_new: bool) -> None:
    log = StrangerLog()
    assert log.is_new(one, "silent")
    assert log.is_new(other, "silent") is is_new
