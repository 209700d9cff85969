"""Certificates for tests: authorities, and what they have signed."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat

from farcall.security.encryption import Encryption


class Issuer(NamedTuple):
    """Who signs."""

    name: x509.Name
    key: ec.EllipticCurvePrivateKey


def make(path: Path, name: str, issuer: Issuer | None = None, hours: float = 1.0, password: bytes = b"") -> Issuer:
    """Writes `name.pem`, which is good for so many hours, and `name.key`; signed by the issuer or by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    signer = issuer or Issuer(subject, key)
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(signer.name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=3))
        .not_valid_after(now + datetime.timedelta(hours=hours))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .sign(signer.key, SHA256())
    )
    (path / f"{name}.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    locked = BestAvailableEncryption(password) if password else NoEncryption()
    (path / f"{name}.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, locked))
    return Issuer(subject, key)


def own(path: Path, name: str, authority: str = "ca") -> Encryption:
    """With the certificate and the key of that name."""
    return Encryption(str(path / f"{name}.pem"), str(path / f"{name}.key"), str(path / f"{authority}.pem"))


def not_looked_at(path: Path, name: str, authority: str = "ca") -> Encryption:
    """The same of a certificate that was good when it was given, and is not any more."""
    with mock.patch("farcall.security.encryption.check_own_certificate"):
        return own(path, name, authority)


ODDITIES = {
    "own certificates here only": ("a", "none", "refuses the certificate of the other side: self.signed certificate"),
    "own certificates there only": (
        "none",
        "a",
        r"the other side refuses this worker's certificate \(\w+_UNKNOWN_CA\)",
    ),
    "another authority there": ("a", "b by other", "refuses the certificate of the other side: (self|unable)"),
    "another authority here": ("b by ca", "a", r"the other side refuses this worker's certificate \(\w+_UNKNOWN_CA\)"),
    "expired there": ("a", "old", r"refuses the certificate of the other side: certificate has expired .*Renew it"),
    "expired here": ("old", "a", r"this worker's certificate, or its authority's: it has expired .*Renew it"),
    "encrypted here only": ("none", "off", "the other side does not encrypt, and this worker does: encrypt_between_"),
    "encrypted there only": ("off", "none", r"encrypts \(it speaks TLS\), and this worker does not: encrypt_between_"),
}
"""What may be set wrong: at the side that connects, at the side that listens, and what the first is to hear."""


def both_sides(path: Path, oddity: str) -> tuple[Encryption | None, Encryption | None, str]:
    """The encryption of the side that connects and of the side that listens; a pattern for what the first hears."""
    authority, other = make(path, "ca"), make(path, "other")
    make(path, "a", authority)
    make(path, "b", other)
    make(path, "old", authority, hours=-1)
    made = {
        "none": Encryption,
        "a": lambda: own(path, "a"),
        "old": lambda: not_looked_at(path, "old"),
        "b by other": lambda: own(path, "b", "other"),
        "b by ca": lambda: not_looked_at(path, "b", "ca"),
        "off": lambda: None,
    }
    ours, theirs, heard = ODDITIES[oddity]
    return made[ours](), made[theirs](), heard
