"""What a member of the group may not do, though it knows the secret: lie about itself, nest endlessly, forge logs."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hostile_member import (
    CALLS,
    CONTROL,
    GOSSIP,
    STORE,
    VERSION,
    HandMade,
    listening_paths,
    listening_ports,
    network_of_this_process,
)

import farcall as rpc
from eventually import eventually
from farcall.testing import LocalGroup
from ports import free_port

pytestmark = pytest.mark.timeout(60)

SECRET = "the secret of this test"


class OpenGroup:
    """An open group of one worker, in this process, and how to say something to it by hand."""

    def __init__(self, transport: str = "tcp") -> None:
        self.store = free_port()
        options = rpc.RpcBackendOptions(
            init_method=f"tcp://127.0.0.1:{self.store}",
            transports=(transport,),
            secret=SECRET,
            proof_timeout=600,
            heartbeat_patience=600,  # who is closed is closed for what it sent, not for its silence
        )
        ports, paths = listening_ports(), listening_paths()
        rpc.init_rpc("w0", rpc_backend_options=options)
        self.worker: int | str
        (self.worker,) = (listening_ports() - ports - {self.store}) | (listening_paths() - paths)
        self.number = rpc.get_worker_info().id
        with HandMade(self.store, STORE, SECRET) as hand:
            self.greet_store(hand)
            self.run = hand.ask_store(type="read", prefix="open/run")["entries"]["open/run"].decode()

    def greet_store(self, hand: HandMade, **changed: Any) -> dict[str, Any]:
        place = f"127.0.0.1:{self.store}"
        hello = {"group": f"{place}, open", "name": "x", "rank": -1, "wanted": "", "dialed": place}
        return hand.greet(**{**hello, "network": network_of_this_process(), **changed})

    def greet_worker(self, hand: HandMade, **changed: Any) -> dict[str, Any]:
        hello = {
            "group": self.run,
            "name": "x",
            "rank": -1,
            "wanted": "w0",
            "wanted_number": self.number,
            "number": 77,
            "host": "",
            "addresses": [],
            "dialed": f"tcp:127.0.0.1:{self.worker}" if isinstance(self.worker, int) else f"unix:{self.worker}",
            "network": network_of_this_process(),
        }
        return hand.greet(**{**hello, **changed})

    def names(self) -> list[str]:
        return [each.name for each in rpc.api.current_agent().get_worker_infos()]


@pytest.fixture
def group() -> Iterator[OpenGroup]:
    group = OpenGroup()
    yield group
    rpc.shutdown(graceful=False)


def test_an_honest_greeting_by_hand_is_welcome(group: OpenGroup) -> None:
    """Else the refusals below would say nothing."""
    with HandMade(group.worker, CALLS, SECRET) as hand:
        assert group.greet_worker(hand)["type"] == "welcome"
        eventually(lambda: group.names() == ["w0", "x"])


@pytest.mark.parametrize(
    "lie",
    [
        {"number": -5},
        {"number": 2**40},
        {"number": 2**63},
        {"wanted_number": -1},
        {"rank": -2},
        {"rank": 2**60},
        {"name": "n" * 300},
        {"name": "two\nlines"},
        {"name": "\x1b[31mred"},
        {"host": "h" * 5000},
        {"addresses": ["tcp:127.0.0.1:1"] * 1000},
        {"addresses": ["a" * 10000]},
        {"limits": [-1, -1]},
        {"limits": [2**64 - 1, 0]},
        {"nonce": bytes(10000)},
        {"dialed": "d" * 5000},
        {"network": "n" * 5000},
    ],
    ids=lambda lie: "-".join(f"{key}-{str(value)[:12]!r}" for key, value in lie.items()),
)
def test_a_hello_with_impossible_fields_is_refused(
    group: OpenGroup, lie: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "farcall"), HandMade(group.worker, CALLS, SECRET) as hand:
        assert group.greet_worker(hand, **lie)["type"] == "refused"
        assert hand.is_closed()
    assert group.names() == ["w0"]
    messages = [record.getMessage() for record in caplog.records]
    assert messages
    assert all(message.isprintable() and len(message) < 2000 for message in messages)


@pytest.mark.parametrize("older", range(1, VERSION))
def test_a_worker_of_an_older_release_hears_which_versions_there_are(group: OpenGroup, older: int) -> None:
    for port, purpose in ((group.worker, CALLS), (group.store, STORE)):
        with HandMade(port, purpose, SECRET) as hand:
            hello = {"type": "hello", "group": "g", "name": "x", "rank": 0, "wanted": "w0", "nonce": bytes(32)}
            hand.send(msgspec.msgpack.encode(hello), version=older)
            reason = hand.receive()["reason"]
            assert f"speaks version {older}" in reason
            assert f"speaks version {VERSION}; install the same release" in reason
            assert hand.is_closed()


def test_what_a_stranger_calls_itself_forges_no_line_of_the_log(
    group: OpenGroup, caplog: pytest.LogCaptureFixture
) -> None:
    lie = "x\nERROR all is lost \x1b[2J"
    with caplog.at_level(logging.DEBUG, "farcall"):
        for port, purpose, greet in (
            (group.store, STORE, group.greet_store),
            (group.worker, CALLS, group.greet_worker),
        ):
            for changed in ({"name": lie}, {"group": lie}, {"type": lie}, {"dialed": lie}, {lie: 1, "rank": lie}):
                for secret in (SECRET, "another secret than that"):
                    with HandMade(port, purpose, secret) as hand:
                        greet(hand, **changed)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) > 4
    assert [message for message in messages if not message.isprintable()] == []


def test_a_stranger_with_many_addresses_does_not_fill_the_log(
    group: OpenGroup, caplog: pytest.LogCaptureFixture
) -> None:
    """Any user of this host may come from all of 127.0.0.0/8."""
    with caplog.at_level(logging.INFO, "farcall"):
        for port in (group.worker, group.store):
            for last in range(2, 52):
                with socket.create_connection(("127.0.0.1", port), 20, (f"127.0.0.{last}", 0)) as sock:
                    sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
                    with contextlib.suppress(ConnectionError):
                        while sock.recv(65536):
                            pass
    assert 1 <= len(caplog.records) <= 4, caplog.text


def test_news_that_nest_without_end_close_the_connection(group: OpenGroup) -> None:
    with HandMade(group.worker, CALLS, SECRET) as hand:
        assert group.greet_worker(hand)["type"] == "welcome"
        hand.frame(GOSSIP, b"\x93\x01\x00" + b"\x91" * 200_000 + b"\x00")  # a ping, and something behind it
        assert hand.is_closed()


@pytest.mark.parametrize(
    "message",
    [
        [3, [[number, f"n{number}", -1, "", []] for number in range(100, 70_100)]],
        [3, [], [[number, number] for number in range(100, 140_100, 2)]],
        [4, [], [[number, number] for number in range(100, 140_100, 2)]],
        [5, [[0, 2**32 - 1]] * 70_000],
        [6, list(range(100, 70_100))],
    ],
    ids=["members", "those who left", "a view", "wanted", "targets of a probe"],
)
def test_news_about_more_workers_than_any_group_has_close_the_connection(group: OpenGroup, message: list[Any]) -> None:
    with HandMade(group.worker, CALLS, SECRET) as hand:
        assert group.greet_worker(hand)["type"] == "welcome"
        hand.sock.settimeout(10)
        hand.frame(GOSSIP, msgspec.msgpack.encode(message))
        assert hand.is_closed()
    assert len(group.names()) <= 2


def test_claims_of_references_that_were_never_created_take_bounded_memory(group: OpenGroup) -> None:
    """The claim of a reference may overtake its creation, so it is noted; but not any number of claims."""
    fork_request, user_deleted, most = 0, 4, 100_000
    tokens = [os.urandom(16) for _ in range(most + 1000)]
    said = 0

    def say(hand: HandMade, kind: int, claims: range) -> None:
        nonlocal said
        body = bytearray(bytes(8))
        for claim in claims:
            said += 1
            number = 10**6 + claim
            body += struct.pack("<QBIIQ16sIQ", said, kind, group.number, group.number, number, tokens[claim], 77, claim)
        hand.frame(CONTROL, bytes(body))

    def refused() -> int:
        number: int = rpc.api.current_agent().get_metrics()["references_refused"]
        return number

    with HandMade(group.worker, CALLS, SECRET) as hand:
        assert group.greet_worker(hand)["type"] == "welcome"
        reader = threading.Thread(target=hand.is_closed)  # the answers
        reader.start()
        try:
            for begin in range(0, most, 5000):
                say(hand, fork_request, range(begin, begin + 5000))
            say(hand, fork_request, range(most, most + 1000))
            eventually(lambda: refused() == 1000)
            say(hand, user_deleted, range(600))  # they stay noted, because a use may wait for one of them
            say(hand, fork_request, range(most, most + 1000))
            eventually(lambda: refused() == 2000)
        finally:
            hand.sock.shutdown(socket.SHUT_RDWR)
            reader.join()


def test_a_wait_that_never_ends_and_is_no_number_closes_the_connection_to_the_store(group: OpenGroup) -> None:
    with HandMade(group.store, STORE, SECRET) as hand:
        group.greet_store(hand)
        with pytest.raises(ConnectionError):
            hand.ask_store(type="get", key="k", timeout=float("nan"))


JOINING = """
import sys
import farcall as rpc

options = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{sys.argv[1]}", transports=("tcp",), secret=sys.argv[2])
rpc.init_rpc("w1", rpc_backend_options=options)
print(rpc.rpc_sync("w0", abs, args=(-3,)))
rpc.shutdown(graceful=False)
"""


def test_entries_of_the_store_that_no_worker_wrote_keep_nobody_from_joining(group: OpenGroup) -> None:
    with HandMade(group.store, STORE, SECRET) as hand:
        group.greet_store(hand)
        for key, value in {
            "open/here/abc": b"no number",
            "open/name/no number": b"\xff",
            "open/name/no member": b"99",
            "open/here/99": b"\xc1",
            "open/name/another number": b"98",
            "open/here/98": msgspec.msgpack.encode([2**40, "another number", -1, "", []]),
            "open/name/two\nlines": b"97",
            "open/here/97": msgspec.msgpack.encode([97, "two\nlines", -1, "", []]),
            "open/name/w1": b"not a number",
        }.items():
            assert hand.ask_store(type="set", key=key, value=value)["type"] == "done"
    command = [sys.executable, "-c", JOINING, str(group.store), SECRET]
    done = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False)
    assert done.stdout == "3\n", done.stderr


def test_a_refused_name_forges_no_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    module = types.ModuleType("harmless\nERROR all is lost")
    exec("def function(): pass", vars(module))
    sys.modules[module.__name__] = module
    try:
        with (
            LocalGroup(2, rpc.RpcBackendOptions(allow=[])) as group,
            caplog.at_level(logging.DEBUG, "farcall"),
            pytest.raises(rpc.NotAllowedError) as caught,
        ):
            group.agents[0].call("worker1", module.function, (), None, 20).wait()
        assert "harmless\\nERROR" in str(caught.value).splitlines()[0]
    finally:
        del sys.modules[module.__name__]
    refusals = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert refusals
    assert all(message.isprintable() for message in refusals)
