"""The mutual proof: it lets in who knows the secret, and every attack on it fails. Both sides without a connection."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall.errors import AuthenticationError, PeerRefusedError, ProtocolError
from farcall.protocol.handshake import Challenge, Greeting, Hello, Proof, Purpose, Refused, Welcome, encode
from farcall.security import ClientHandshake, Credentials, EncryptionRequired, Secret, ServerHandshake, refusal_for

OURS, THEIRS = Secret("the secret of the group"), Secret("a secret of somebody else")
ADDRESS = "tcp:10.0.0.2:4000"
HELLO = Hello("group", "a", 0, "b", 0, wanted_number=1, dialed=ADDRESS, nonce=b"a" * 32)
NONCE = b"b" * 32


def client_handshake(
    secret: Secret = OURS, hello: Hello = HELLO, purpose: Purpose = Purpose.CALLS, binding: bytes = b""
) -> ClientHandshake:
    return ClientHandshake(secret, purpose, hello, "worker 'b'", binding)


def server_handshake(
    secret: Secret = OURS, nonce: bytes = NONCE, purpose: Purpose = Purpose.CALLS, binding: bytes = b""
) -> ServerHandshake:
    return ServerHandshake(secret, purpose, nonce, ADDRESS, binding)


def meet(us: ClientHandshake, them: ServerHandshake, hello: Hello = HELLO) -> list[Greeting]:
    """The whole greeting; what was said, in order."""
    challenge = them.take(hello, encode(hello))
    proof = us.take(challenge)
    assert proof is not None
    theirs = them.take(proof, encode(proof))
    us.take(theirs)
    return [challenge, proof, theirs]


def test_who_knows_the_secret_is_let_in_and_so_is_the_other_side() -> None:
    us, them = client_handshake(), server_handshake()
    meet(us, them)
    assert us.is_proven
    assert them.is_proven
    assert them.hello == HELLO
    us.take(Welcome("b", 1, 1))
    assert us.welcome() == Welcome("b", 1, 1)


def test_credentials_make_both_sides_with_nonces_that_are_never_the_same() -> None:
    both = Credentials(OURS)
    seen = set()
    for _ in range(3):
        us, hello = both.client_handshake(Purpose.STORE, Hello("g", "a", 0, ""), "it", b"x")
        them = both.server_handshake(Purpose.STORE, "", b"x")
        challenge, *_ = meet(us, them, hello)
        assert them.is_proven
        seen |= {hello.nonce, challenge.nonce}  # type: ignore[union-attr]
    assert len(seen) == 6
    assert {len(nonce) for nonce in seen} == {32}


def test_who_does_not_know_it_is_not_let_in() -> None:
    us, them = client_handshake(THEIRS), server_handshake()
    with pytest.raises(AuthenticationError, match="says that its name is 'a', but it does not know the secret"):
        meet(us, them)
    assert not them.is_proven


def test_the_one_who_connects_hears_where_its_secret_is_from_and_what_to_do() -> None:
    with pytest.raises(AuthenticationError, match=r"\(from the option secret\) is not the group's.*farcall run"):
        client_handshake().take(Refused("go away", stranger=True))


def test_who_listens_must_know_it_too() -> None:
    us = client_handshake()
    us.take(Challenge(NONCE))
    with pytest.raises(AuthenticationError, match="worker 'b' does not know this group's secret"):
        us.take(Proof(b"x" * 32))
    assert not us.is_proven


def test_a_recorded_proof_is_of_no_use() -> None:
    _, recorded, _ = meet(client_handshake(), server_handshake())
    again = server_handshake(nonce=b"c" * 32)
    again.take(HELLO, encode(HELLO))
    with pytest.raises(AuthenticationError):
        again.take(recorded, encode(recorded))


def test_a_recorded_answer_is_of_no_use() -> None:
    challenge, _, answer = meet(client_handshake(), server_handshake())
    us = client_handshake(hello=msgspec.structs.replace(HELLO, nonce=b"d" * 32))
    us.take(challenge)
    with pytest.raises(AuthenticationError):
        us.take(answer)


def test_a_proof_that_is_sent_back_is_none() -> None:
    us = client_handshake()
    own = us.take(Challenge(NONCE))
    assert own is not None
    with pytest.raises(AuthenticationError):
        us.take(own)


def test_who_stands_between_with_a_certificate_of_its_own_is_found() -> None:
    with pytest.raises(AuthenticationError):
        meet(client_handshake(binding=b"fingerprint of the one between"), server_handshake(binding=b"fingerprint of b"))


def test_who_leads_a_worker_elsewhere_is_found() -> None:
    hello = msgspec.structs.replace(HELLO, dialed="tcp:10.6.6.6:1")
    with pytest.raises(AuthenticationError, match=r"connected to tcp:10.6.6.6:1, but arrived at tcp:10.0.0.2:4000"):
        meet(client_handshake(hello=hello), server_handshake(), hello)


@pytest.mark.parametrize(
    "change", [{"group": "x"}, {"name": "x"}, {"wanted": "x"}, {"number": 9}, {"dialed": "tcp:10.0.0.2:4001"}]
)
def test_a_hello_that_was_changed_on_its_way_is_found(change: dict[str, object]) -> None:
    changed = msgspec.structs.replace(HELLO, **change)
    with pytest.raises(AuthenticationError):
        meet(client_handshake(), server_handshake(), changed)


def test_a_proof_for_one_purpose_is_none_for_another() -> None:
    with pytest.raises(AuthenticationError):
        meet(client_handshake(purpose=Purpose.STORE), server_handshake())


def test_nothing_is_believed_before_the_proof() -> None:
    for early in (Welcome("b", 1), Proof(b"x" * 32), HELLO):
        with pytest.raises(ProtocolError, match="worker 'b' answered a hello with a "):
            client_handshake().take(early)
    us = client_handshake()
    us.take(Challenge(NONCE))
    with pytest.raises(ProtocolError, match="answered the proof of the secret with a Welcome"):
        us.take(Welcome("b", 1))


def test_a_refusal_before_the_proof_is_a_text_only() -> None:
    us = client_handshake()
    us.take(Refused("no", gone=True))
    assert not us.is_proven
    with pytest.raises(PeerRefusedError, match="worker 'b' refused the connection: no"):
        us.welcome()


@pytest.mark.parametrize("nonce", [b"", b"short", b"x" * 33])
def test_a_nonce_of_another_size_is_refused(nonce: bytes) -> None:
    with pytest.raises(ProtocolError, match="a Hello where a hello was expected"):
        server_handshake().take(msgspec.structs.replace(HELLO, nonce=nonce), b"")
    with pytest.raises(ProtocolError, match="with a Challenge"):
        client_handshake().take(Challenge(nonce))


greetings = st.one_of(
    st.just(HELLO),
    st.builds(Challenge, st.binary(min_size=32, max_size=32)),
    st.builds(Proof, st.binary(max_size=40)),
    st.builds(Welcome, st.text(max_size=3), st.integers(0, 3)),
    st.builds(Refused, st.text(max_size=3), gone=st.booleans()),
)


@given(st.lists(greetings, max_size=8))
def test_no_order_of_messages_gets_a_stranger_in(messages: list[Greeting]) -> None:
    us, them = client_handshake(), server_handshake()
    for message in messages:
        for side in (lambda m: us.take(m), lambda m: them.take(m, encode(m))):
            try:
                side(message)
            except ProtocolError:
                pass
    assert not us.is_proven
    assert not them.is_proven
    assert not isinstance(us.outcome, Welcome)


def test_a_stranger_is_not_told_where_the_secret_is_from_nor_fills_the_log() -> None:
    hello = msgspec.structs.replace(HELLO, name="a" * 60_000)
    with pytest.raises(AuthenticationError, match="this worker has it from") as wrong:
        meet(client_handshake(THEIRS, hello=hello), server_handshake(), hello)
    assert len(str(wrong.value)) < 1000
    refusal = refusal_for(wrong.value)
    assert refusal.stranger
    assert "from" not in refusal.reason


def test_a_refusal_before_the_proof_is_quoted() -> None:
    us = client_handshake()
    us.take(Refused("no\nTraceback: \x1b[2J"))
    with pytest.raises(PeerRefusedError) as refused:
        us.welcome()
    assert str(refused.value).isprintable()


HERE, ELSEWHERE = "boot/cookie 1", "boot/cookie 2"


def test_another_network_namespace_is_refused_without_encryption_and_asked_for_it() -> None:
    hello = msgspec.structs.replace(HELLO, network=ELSEWHERE)
    them = ServerHandshake(OURS, Purpose.CALLS, NONCE, ADDRESS, network=HERE)
    with pytest.raises(EncryptionRequired, match="different network namespaces") as caught:
        them.take(hello, encode(hello))
    refusal = refusal_for(caught.value)
    assert refusal.encrypt
    with pytest.raises(EncryptionRequired):
        client_handshake(hello=hello).take(refusal)


def test_a_relay_between_two_loopbacks_cannot_change_what_the_hello_says() -> None:
    hello = msgspec.structs.replace(HELLO, network=ELSEWHERE)
    changed = msgspec.structs.replace(hello, network=HERE)
    them = ServerHandshake(OURS, Purpose.CALLS, NONCE, ADDRESS, network=HERE)
    with pytest.raises(AuthenticationError):
        meet(client_handshake(hello=hello), them, changed)
    assert not them.is_proven


def test_the_same_network_namespace_is_let_in() -> None:
    hello = msgspec.structs.replace(HELLO, network=HERE)
    them = ServerHandshake(OURS, Purpose.CALLS, NONCE, ADDRESS, network=HERE)
    meet(client_handshake(hello=hello), them, hello)
    assert them.is_proven


def test_who_encrypts_already_is_not_led_in_circles() -> None:
    us = client_handshake(binding=b"certificate")
    us.take(Refused("encrypt", encrypt=True))
    with pytest.raises(PeerRefusedError):
        us.welcome()
