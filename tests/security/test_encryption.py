"""Certificates: one that a worker makes for itself, and those of the user's own."""

from __future__ import annotations

import datetime
import hashlib
import os
import select
import ssl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography import x509

from certificate_stage import make, own
from farcall.errors import UsageError
from farcall.options import RpcBackendOptions
from farcall.security import credentials_from_options
from farcall.security.encryption import LIFETIME, Encryption, self_signed
from farcall.transports.base import Link
from farcall.transports.tcp import TcpTransport

PATIENCE_S = 20.0
LIMIT = 1 << 16


def receive(link: Link) -> bytes:
    """The next frame of the link, which is awaited."""
    while not (frames := link.receive()):
        assert link.wait(PATIENCE_S)
    ((frame, _),) = frames
    return bytes(frame)


def connect(ours: Encryption, theirs: Encryption) -> None:
    """Connects the one to the other, and says a word. Raises what went wrong."""
    listener = TcpTransport(theirs, even_on_loopback=True).listen(None, LIMIT)

    def answer() -> None:
        poll = select.poll()
        poll.register(listener.fileno(), select.POLLIN)
        assert poll.poll(PATIENCE_S * 1000)
        link = listener.accept()
        assert link is not None
        try:
            link.send(receive(link))
        finally:
            link.close()

    try:
        with ThreadPoolExecutor(1) as pool:
            answered = pool.submit(answer)
            link = TcpTransport(ours, even_on_loopback=True).connect(listener.address, PATIENCE_S, LIMIT)
            link.send(b"?")
            assert receive(link) == b"?"
            link.close()
            answered.result()
    finally:
        listener.close()


def test_a_worker_makes_one_for_itself_that_lives_shortly() -> None:
    pem, der = self_signed()
    certificate = x509.load_der_x509_certificate(der)
    assert certificate.not_valid_after_utc - certificate.not_valid_before_utc <= LIFETIME + datetime.timedelta(hours=1)
    assert pem.count(b"BEGIN") == 2


def test_only_the_newest_tls_is_spoken_and_nothing_is_left_open() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    encryption = Encryption()
    for context in (encryption.listening(), encryption.connecting()):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3
        assert not context.check_hostname
    assert encryption.listening() is encryption.listening()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_own_certificates_are_used_and_bound(tmp_path: Path) -> None:
    authority = make(tmp_path, "ca")
    make(tmp_path, "a", authority)
    der = ssl.PEM_cert_to_DER_cert((tmp_path / "a.pem").read_text())
    assert own(tmp_path, "a").fingerprint() == hashlib.sha256(der).digest()
    connect(own(tmp_path, "a"), own(tmp_path, "a"))


@pytest.mark.parametrize("left_out", ["tls_certificate", "tls_key", "tls_authority"])
def test_own_certificates_need_all_three(tmp_path: Path, left_out: str) -> None:
    make(tmp_path, "ca")
    files = {
        "tls_certificate": str(tmp_path / "ca.pem"),
        "tls_key": str(tmp_path / "ca.key"),
        "tls_authority": str(tmp_path / "ca.pem"),
    }
    del files[left_out]
    with pytest.raises(UsageError, match="need all three: tls_certificate, tls_key and tls_authority"):
        credentials_from_options(RpcBackendOptions(**files))  # type: ignore[arg-type]


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    make(tmp_path, "ca")
    with pytest.raises(UsageError, match=r"the TLS file .*nowhere.pem cannot be read"):
        own(tmp_path, "nowhere")
    (tmp_path / "bad.pem").write_text("no certificate")
    (tmp_path / "bad.key").write_text("no key")
    with pytest.raises(UsageError, match=r"the certificate .*bad.pem and its key .* cannot be used"):
        own(tmp_path, "bad")
    (tmp_path / "request.pem").write_text(
        "-----BEGIN CERTIFICATE REQUEST-----\nAA==\n-----END CERTIFICATE REQUEST-----\n"
    )
    with pytest.raises(UsageError, match=r"no usable certificate in .*request.pem \(tls_authority\)"):
        own(tmp_path, "ca", "request")


@pytest.mark.parametrize("encrypts", [True, False])
def test_files_are_looked_at_when_the_options_are_taken(tmp_path: Path, encrypts: bool) -> None:
    make(tmp_path, "ca")
    (tmp_path / "bad.pem").write_text("no certificate")
    options = RpcBackendOptions(
        tls_certificate=str(tmp_path / "ca.pem"),
        tls_key=str(tmp_path / "ca.key"),
        tls_authority=str(tmp_path / "bad.pem"),
        encrypt_between_hosts=encrypts,
    )
    with pytest.raises(UsageError, match=r"no usable certificate in .*bad.pem"):
        credentials_from_options(options)


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked(tmp_path: Path) -> None:
    authority = make(tmp_path, "ca")
    make(tmp_path, "a", authority, password=b"sesame")
    with pytest.raises(UsageError, match=r"the key .*a.key \(tls_key\) is encrypted"):
        own(tmp_path, "a")


def test_a_certificate_that_the_others_would_refuse_is_refused_here(tmp_path: Path) -> None:
    authority, other = make(tmp_path, "ca"), make(tmp_path, "other")
    make(tmp_path, "old", authority, hours=-1)
    with pytest.raises(UsageError, match=r"would refuse the certificate .*old.pem: certificate has expired"):
        own(tmp_path, "old")
    make(tmp_path, "b", other)
    with pytest.raises(UsageError, match=r"would refuse the certificate .*b.pem: .* signed by the tls_authority"):
        own(tmp_path, "b", "ca")


def test_the_option_turns_it_off() -> None:
    assert credentials_from_options(RpcBackendOptions(encrypt_between_hosts=False)).encryption is None
    assert credentials_from_options(RpcBackendOptions()).encryption is not None
