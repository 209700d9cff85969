"""Each check removed in turn, and the attack it is there for succeeds: so the attacks of the other tests are real.

With the check in place the same attack fails: every test does both.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

import service_stage
from farcall.errors import AuthenticationError, NotAllowedError, ProtocolError
from farcall.protocol.handshake import (
    MAX_MESSAGE,
    VERSION,
    Challenge,
    Hello,
    Proof,
    Purpose,
    encode,
    pack_prologue,
    take,
)
from farcall.runtime import server
from farcall.runtime.server import PendingHandshakes
from farcall.security import ClientHandshake, Credentials, Limits, Secret, ServerHandshake, proof
from farcall.security import secret as secrets_module
from farcall.security.allowed import AllowList
from farcall.security.secret import find_secret
from farcall.serialization import dumps_arguments, loads_restricted_arguments
from farcall.transports import large_frames, unix
from farcall.transports.large_frames import Assembler, pack_announcement, pack_chunk_header, unpack_inline
from farcall.transports.stream import StreamLink
from farcall.transports.unix import UnixTransport

OURS, THEIRS = Secret("the secret of the group"), Secret("a secret of somebody else")
HELLO = Hello("group", "a", 0, "b", 0, wanted_number=1, dialed="tcp:b", nonce=b"a" * 32)
Patch = Callable[[pytest.MonkeyPatch], None]


def fails_until(remove: Patch, attack: Callable[[], object], monkeypatch: pytest.MonkeyPatch, *errors: Any) -> None:
    """The attack fails; with the check removed it succeeds."""
    with pytest.raises(errors or ProtocolError):
        attack()
    with monkeypatch.context() as patch:
        remove(patch)
        attack()


def no_comparison(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hmac, "compare_digest", lambda ours, theirs: True)


def without(argument: int) -> Patch:
    """Proofs that leave that part out."""

    def remove(patch: pytest.MonkeyPatch) -> None:
        whole = proof.compute_proof

        def partial(*args: Any) -> bytes:
            arguments = list(args)
            arguments[argument] = Purpose.CALLS if argument == 2 else b""
            return whole(*arguments)

        patch.setattr(proof, "compute_proof", partial)

    return remove


SIDE, PURPOSE, BINDING = 1, 2, 5


def get_in(us: ClientHandshake, them: ServerHandshake, hello: Hello = HELLO, seen: Hello = HELLO) -> None:
    """`seen` is the hello that arrives."""
    answer = us.take(them.take(seen, encode(seen)))
    assert answer is not None
    us.take(them.take(answer, encode(answer)))
    assert them.is_proven
    assert us.is_proven


def client_handshake(secret: Secret = OURS, hello: Hello = HELLO, **more: Any) -> ClientHandshake:
    return ClientHandshake(secret, more.pop("purpose", Purpose.CALLS), hello, "it", **more)


def server_handshake(
    secret: Secret = OURS, nonce: bytes = b"n" * 32, address: str = "tcp:b", **more: Any
) -> ServerHandshake:
    return ServerHandshake(secret, more.pop("purpose", Purpose.CALLS), nonce, address, **more)


def test_the_comparison_keeps_out_who_does_not_know_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_until(no_comparison, lambda: get_in(client_handshake(THEIRS), server_handshake()), monkeypatch)


def test_the_comparison_keeps_a_worker_from_a_false_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def lie() -> None:
        us = client_handshake()
        us.take(Challenge(b"n" * 32))
        us.take(Proof(b"x" * 32))
        assert us.is_proven

    fails_until(no_comparison, lie, monkeypatch)


def test_fresh_nonces_make_a_recording_useless(monkeypatch: pytest.MonkeyPatch) -> None:
    def replay() -> None:
        ours = Credentials(OURS)
        us, hello = ours.client_handshake(Purpose.CALLS, HELLO, "it", b"")
        recorded = us.take(ours.server_handshake(Purpose.CALLS, "tcp:b", b"").take(hello, encode(hello)))
        assert recorded is not None
        later = ours.server_handshake(Purpose.CALLS, "tcp:b", b"")
        later.take(hello, encode(hello))
        later.take(recorded, encode(recorded))
        assert later.is_proven

    def same_nonces(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(secrets, "token_bytes", bytes)

    fails_until(same_nonces, replay, monkeypatch)


def test_the_side_in_the_proof_makes_a_reflection_useless(monkeypatch: pytest.MonkeyPatch) -> None:
    def reflect() -> None:
        us = client_handshake()
        own = us.take(Challenge(b"n" * 32))
        assert own is not None
        us.take(own)
        assert us.is_proven

    fails_until(without(SIDE), reflect, monkeypatch)


def test_the_fingerprint_in_the_proof_finds_who_stands_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_until(
        without(BINDING),
        lambda: get_in(client_handshake(binding=b"of the one between"), server_handshake(binding=b"of b")),
        monkeypatch,
    )


def test_the_purpose_in_the_proof_keeps_the_endpoints_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_until(
        without(PURPOSE),
        lambda: get_in(client_handshake(purpose=Purpose.STORE), server_handshake(address="tcp:b")),
        monkeypatch,
    )


def test_the_hello_in_the_proof_keeps_it_from_being_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = msgspec.structs.replace(HELLO, name="somebody else")
    fails_until(without(3), lambda: get_in(client_handshake(), server_handshake(), seen=changed), monkeypatch)


def test_the_address_keeps_a_worker_from_being_led_elsewhere() -> None:
    elsewhere = msgspec.structs.replace(HELLO, dialed="tcp:evil")
    with pytest.raises(AuthenticationError, match="relays the connection"):
        get_in(client_handshake(hello=elsewhere), server_handshake(), seen=elsewhere)
    get_in(client_handshake(hello=elsewhere), server_handshake(address=""), seen=elsewhere)


def test_the_limit_of_a_greeting_keeps_a_stranger_from_filling_the_memory() -> None:
    announced = bytearray(b"farcall\0" + bytes([VERSION, 0, 1, 0]) + (1 << 30).to_bytes(4, "little"))
    with pytest.raises(ProtocolError, match="at most"):
        take(announced, Purpose.CALLS, "it", MAX_MESSAGE)
    assert take(announced, Purpose.CALLS, "it", 1 << 31) is None, "it would wait for a gigabyte"


def test_the_limit_of_a_link_in_its_handshake_keeps_a_stranger_from_filling_the_memory() -> None:
    def announce(limit: int) -> list[Any]:
        ours, theirs = socket.socketpair()
        link = StreamLink(ours, "it", limit)
        try:
            theirs.sendall(pack_prologue() + (1 << 19).to_bytes(4, "little"))
            return link.receive()
        finally:
            link.close()
            theirs.close()

    with pytest.raises(ProtocolError, match="this worker takes 65,536 at most"):
        announce(MAX_MESSAGE)
    assert announce(1 << 20) == [], "it would wait for half a megabyte"


def test_the_limits_of_strangers_keep_them_from_piling_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        def is_admitted(self) -> bool:
            return False

        def dismiss(self, kind: str, why: str) -> None: ...

    def crowd(limits: Limits) -> int:
        pending = PendingHandshakes(limits)
        for second in range(1000):
            monkeypatch.setattr(server, "monotonic", lambda second=second: float(second))
            pending.add(Silent())  # type: ignore[arg-type]
        return len(pending)

    assert crowd(Limits(max_strangers=10, proof_timeout=1e9)) == 10
    assert crowd(Limits(max_strangers=10**9, proof_timeout=5)) == 5
    assert crowd(Limits(max_strangers=10**9, proof_timeout=1e9)) == 1000


@pytest.mark.parametrize("size", [(1 << 20) + 1, 1 << 63])
def test_the_limit_of_a_frame_keeps_a_peer_from_taking_all_memory(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def take_memory(size: int) -> memoryview:
        taken.append(size)
        return memoryview(bytearray(8))

    def announce() -> None:
        announcement = pack_announcement(1, b"", ())[:-8] + size.to_bytes(8, "little")
        Assembler(take_memory, 1 << 20).announce(announcement)

    fails_until(lambda patch: patch.setattr(large_frames, "check_size", lambda *_: None), announce, monkeypatch)
    assert taken == [size]


def test_memory_of_a_large_frame_is_taken_as_its_bytes_come() -> None:
    """Not on the word of the other end: it may announce 65,535 buffers of any size that is allowed."""
    taken: list[int] = []

    def take_memory(size: int) -> memoryview:
        taken.append(size)
        return memoryview(bytearray(size))

    assembler = Assembler(take_memory, 1 << 20)
    parts = [memoryview(bytes(1000))] * 100
    assembler.announce(pack_announcement(1, b"frame", parts))
    assert taken == [5]
    assembler.add_chunk(pack_chunk_header(1) + b"frame")
    assert taken == [5, 1000]


def test_sizes_that_do_not_add_up_are_refused() -> None:
    header = bytes([1, 0, 1, 0]) + (4).to_bytes(4, "little")
    for size, data in ((3, b"frame"), (0, b"frame and more"), (2, b""), (1 << 63, b"frame")):
        with pytest.raises(ProtocolError):
            unpack_inline(header + size.to_bytes(8, "little") + data, 1 << 20)
    assert unpack_inline(header + (1).to_bytes(8, "little") + b"frame", 1 << 20) == (b"fram", [memoryview(b"e")])


def test_the_mode_of_the_secrets_file_is_looked_at(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"HOME": str(tmp_path)}
    find_secret(None, environ)
    os.chmod(secrets_module.secret_path(environ), 0o644)

    def no_look(patch: pytest.MonkeyPatch) -> None:
        whole = os.fstat
        patch.setattr(
            os,
            "fstat",
            lambda fd: os.stat_result((whole(fd).st_mode & ~0o077, *whole(fd)[1:])),
        )

    fails_until(no_look, lambda: find_secret(None, environ), monkeypatch, Exception)


def test_the_kernel_is_asked_who_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = UnixTransport(["/tmp"]).listen(None, MAX_MESSAGE)
    monkeypatch.setattr(unix, "_checked_process", lambda sock, address: None)
    asked = unix._peer_credentials
    with monkeypatch.context() as patch:
        patch.setattr(unix, "_peer_credentials", lambda sock: (1, os.geteuid() + 1, 1))
        turned_away = UnixTransport(["/tmp"]).connect(listener.address, 10, MAX_MESSAGE)
        assert listener.accept() is None
    assert unix._peer_credentials is asked
    let_in = UnixTransport(["/tmp"]).connect(listener.address, 10, MAX_MESSAGE)
    accepted = listener.accept()
    assert accepted is not None
    for each in (turned_away, let_in, accepted, listener):
        each.close()


def test_names_are_asked_about_before_they_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    service_stage.ran.clear()
    payload, buffers = dumps_arguments("f", (service_stage.Bomb(),))

    def explode() -> None:
        loads_restricted_arguments(payload, buffers, AllowList([]))

    def no_questions(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(AllowList, "check_name", lambda *_: None)
        patch.setattr(AllowList, "check_found", lambda *_: None)

    with pytest.raises(NotAllowedError):
        explode()
    assert service_stage.ran == []
    fails_until(no_questions, explode, monkeypatch, NotAllowedError)
    assert service_stage.ran == ["bang"]


def test_what_was_found_is_asked_about_too(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = AllowList(["service_stage"])

    def reach_through() -> None:
        allowed.check_name("service_stage", "system")
        allowed.check_found("service_stage", "system", service_stage.system)

    fails_until(
        lambda patch: patch.setattr(AllowList, "check_found", lambda *_: None),
        reach_through,
        monkeypatch,
        NotAllowedError,
    )
