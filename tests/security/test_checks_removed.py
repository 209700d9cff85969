"""Each check removed in turn, and the attack it is there for succeeds: so the attacks of the other tests are real.

With the check in place the same attack fails: every test does both.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

import service_stage
from farcall.agent.doorstep import Doorstep
from farcall.errors import AuthenticationError, NotAllowedError, ProtocolError
from farcall.protocol.handshake import MAX_MESSAGE, Challenge, Hello, Proof, Purpose, encode, take
from farcall.protocol.wire import MAX_MESSAGE as LARGEST
from farcall.protocol.wire import Decoder, Sizes
from farcall.security import Applicant, Credentials, Doorkeeper, Limits, Secret, credentials, proof
from farcall.security import secret as secrets_module
from farcall.security.allowed import Allowed
from farcall.security.secret import find_secret
from farcall.serialization import dumps_arguments, loads_arguments_guarded
from farcall.transports import unix
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
    patch.setattr(proof.hmac, "compare_digest", lambda ours, theirs: True)


def without(argument: int) -> Patch:
    """Proofs that leave that part out."""

    def remove(patch: pytest.MonkeyPatch) -> None:
        whole = proof.proof_of

        def partial(*args: Any) -> bytes:
            arguments = list(args)
            arguments[argument] = Purpose.CALLS if argument == 2 else b""
            return whole(*arguments)

        patch.setattr(proof, "proof_of", partial)

    return remove


SIDE, PURPOSE, BINDING = 1, 2, 5


def get_in(us: Applicant, them: Doorkeeper, hello: Hello = HELLO, seen: Hello = HELLO) -> None:
    """`seen` is the hello that arrives."""
    answer = us.take(them.take(seen, encode(seen)))
    assert answer is not None
    us.take(them.take(answer, encode(answer)))
    assert them.is_proven
    assert us.is_proven


def applicant(secret: Secret = OURS, hello: Hello = HELLO, **more: Any) -> Applicant:
    return Applicant(secret, more.pop("purpose", Purpose.CALLS), hello, "it", **more)


def doorkeeper(secret: Secret = OURS, nonce: bytes = b"n" * 32, address: str = "tcp:b", **more: Any) -> Doorkeeper:
    return Doorkeeper(secret, more.pop("purpose", Purpose.CALLS), nonce, address, **more)


def test_the_comparison_keeps_out_who_does_not_know_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_until(no_comparison, lambda: get_in(applicant(THEIRS), doorkeeper()), monkeypatch)


def test_the_comparison_keeps_a_worker_from_a_false_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def lie() -> None:
        us = applicant()
        us.take(Challenge(b"n" * 32))
        us.take(Proof(b"x" * 32))
        assert us.is_proven

    fails_until(no_comparison, lie, monkeypatch)


def test_fresh_nonces_make_a_recording_useless(monkeypatch: pytest.MonkeyPatch) -> None:
    def replay() -> None:
        ours = Credentials(OURS)
        us, hello = ours.applicant(Purpose.CALLS, HELLO, "it", b"")
        recorded = us.take(ours.doorkeeper(Purpose.CALLS, "tcp:b", b"").take(hello, encode(hello)))
        assert recorded is not None
        later = ours.doorkeeper(Purpose.CALLS, "tcp:b", b"")
        later.take(hello, encode(hello))
        later.take(recorded, encode(recorded))
        assert later.is_proven

    def same_nonces(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(credentials.secrets, "token_bytes", bytes)

    fails_until(same_nonces, replay, monkeypatch)


def test_the_side_in_the_proof_makes_a_reflection_useless(monkeypatch: pytest.MonkeyPatch) -> None:
    def reflect() -> None:
        us = applicant()
        own = us.take(Challenge(b"n" * 32))
        assert own is not None
        us.take(own)
        assert us.is_proven

    fails_until(without(SIDE), reflect, monkeypatch)


def test_the_fingerprint_in_the_proof_finds_who_stands_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_until(
        without(BINDING),
        lambda: get_in(applicant(binding=b"of the one between"), doorkeeper(binding=b"of b")),
        monkeypatch,
    )


def test_the_purpose_in_the_proof_keeps_the_doors_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_until(
        without(PURPOSE), lambda: get_in(applicant(purpose=Purpose.STORE), doorkeeper(address="tcp:b")), monkeypatch
    )


def test_the_hello_in_the_proof_keeps_it_from_being_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = msgspec.structs.replace(HELLO, name="somebody else")
    fails_until(without(3), lambda: get_in(applicant(), doorkeeper(), seen=changed), monkeypatch)


def test_the_address_keeps_a_worker_from_being_led_elsewhere() -> None:
    elsewhere = msgspec.structs.replace(HELLO, dialed="tcp:evil")
    with pytest.raises(AuthenticationError, match="stands in between"):
        get_in(applicant(hello=elsewhere), doorkeeper(), seen=elsewhere)
    get_in(applicant(hello=elsewhere), doorkeeper(address=""), seen=elsewhere)


def test_the_limit_of_a_greeting_keeps_a_stranger_from_filling_the_memory() -> None:
    announced = bytearray(b"farcall\0\1\0\1\0" + (1 << 30).to_bytes(4, "little"))
    with pytest.raises(ProtocolError, match="at most"):
        take(announced, Purpose.CALLS, "it", MAX_MESSAGE)
    assert take(announced, Purpose.CALLS, "it", 1 << 31) is None, "it would wait for a gigabyte"


def test_the_limits_of_strangers_keep_them_from_piling_up() -> None:
    class Silent:
        def has_greeted(self) -> bool:
            return False

        def dismiss(self, kind: str, why: str) -> None: ...

    def crowd(limits: Limits) -> int:
        doorstep = Doorstep(limits)
        for second in range(1000):
            doorstep.came(Silent(), float(second))  # type: ignore[arg-type]
        return len(doorstep)

    assert crowd(Limits(most=10, patience=1e9)) == 10
    assert crowd(Limits(most=10**9, patience=5)) == 5
    assert crowd(Limits(most=10**9, patience=1e9)) == 1000


def test_the_limit_of_a_message_keeps_a_peer_from_taking_all_memory() -> None:
    announced = bytes([1, 0, 0, 0]) + bytes(4) + (LARGEST + 1).to_bytes(8, "little") + bytes(8)
    with pytest.raises(ProtocolError, match="was announced"):
        Decoder().feed(announced)
    free = Decoder()
    free.limits = Sizes(message=1 << 63)
    with pytest.raises(MemoryError):
        free.feed(announced[:8] + (1 << 50).to_bytes(8, "little") + bytes(8))


def test_the_mode_of_the_secrets_file_is_looked_at(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"HOME": str(tmp_path)}
    find_secret(None, environ)
    os.chmod(secrets_module.secret_path(environ), 0o644)

    def no_look(patch: pytest.MonkeyPatch) -> None:
        whole = os.fstat
        patch.setattr(
            secrets_module.os,
            "fstat",
            lambda fd: os.stat_result((whole(fd).st_mode & ~0o077, *whole(fd)[1:])),
        )

    fails_until(no_look, lambda: find_secret(None, environ), monkeypatch, Exception)


def test_the_kernel_is_asked_who_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = UnixTransport(["/tmp"]).listen()
    monkeypatch.setattr(unix, "_checked_process", lambda sock, address: None)
    asked = unix._peer_credentials
    with monkeypatch.context() as patch:
        patch.setattr(unix, "_peer_credentials", lambda sock: (1, os.geteuid() + 1, 1))
        turned_away = UnixTransport(["/tmp"]).connect(listener.address, 10)
        assert listener.accept() is None
    assert unix._peer_credentials is asked
    let_in = UnixTransport(["/tmp"]).connect(listener.address, 10)
    accepted = listener.accept()
    assert accepted is not None
    for each in (turned_away, let_in, accepted, listener):
        each.close()


def test_names_are_asked_about_before_they_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    service_stage.ran.clear()
    payload, buffers = dumps_arguments("f", (service_stage.Bomb(),))

    def explode() -> None:
        loads_arguments_guarded(payload, buffers, Allowed([]))

    def no_questions(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Allowed, "check_name", lambda *_: None)
        patch.setattr(Allowed, "check_found", lambda *_: None)

    with pytest.raises(NotAllowedError):
        explode()
    assert service_stage.ran == []
    fails_until(no_questions, explode, monkeypatch, NotAllowedError)
    assert service_stage.ran == ["bang"]


def test_what_was_found_is_asked_about_too(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = Allowed(["service_stage"])

    def reach_through() -> None:
        allowed.check_name("service_stage", "system")
        allowed.check_found("service_stage", "system", service_stage.system)

    fails_until(
        lambda patch: patch.setattr(Allowed, "check_found", lambda *_: None),
        reach_through,
        monkeypatch,
        NotAllowedError,
    )
