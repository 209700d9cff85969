"""The TLS certificates and contexts with which connections between hosts are encrypted.

By default each worker creates a key and a certificate for itself. The certificate is signed by nobody. The handshake
takes the place of a signature: both ends prove that they know the secret, and the fingerprint of the certificate is
part of the proof (`security.proof`). So an attacker between two workers, who has another certificate, is detected. The
key is new for each process, is never written to a disk, and is gone when the process ends.

Users who have certificates may use them. Each end then also checks that the other's certificate is signed by
`tls_authority`, in addition to the secret.

Rules
- TLS 1.3 only.
- Given files are read and checked in the constructor. A worker also checks its own certificate as the others will.
- A certificate of the worker's own is created for the first connection that needs it, because importing `ssl` and
  `cryptography` takes time that most workers can save.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import threading
from typing import TYPE_CHECKING, Final, NoReturn

from farcall.errors import UsageError

if TYPE_CHECKING:
    import ssl

LIFETIME: Final = datetime.timedelta(days=30)
"""How long a certificate that a worker creates for itself is valid. X.509 requires an end; no worker checks it."""


class Encryption:
    """The TLS certificate and contexts of one worker. Its methods may be called by any thread.

    Give all three files or none. Files are read and checked at once. Without files, the worker creates a key and a
    certificate for itself when a method is called for the first time.

    Args:
        certificate: The path of a PEM file with this worker's certificate; None to create one.
        key: The path of a PEM file with the certificate's private key, without a passphrase; None to create one.
        authority: The path of a PEM file with the certificate of the authority that has signed the certificates of all
            workers; None if the worker creates its own certificate.

    Raises:
        UsageError: Only one or two of the files are given; a file cannot be read or used; or other workers would refuse
            the certificate.
    """

    def __init__(self, certificate: str | None = None, key: str | None = None, authority: str | None = None) -> None:
        given = [path for path in (certificate, key, authority) if path is not None]
        if len(given) not in (0, 3):
            raise UsageError("certificates of your own need all three: tls_certificate, tls_key and tls_authority")
        for path in given:
            if not os.access(path, os.R_OK):
                raise UsageError(f"the TLS file {path} cannot be read; check its path and its permissions")
        self._files = (certificate, key, authority)
        self._lock = threading.Lock()
        self._made: tuple[ssl.SSLContext, ssl.SSLContext, bytes] | None = None
        if given:
            check_own_certificate(certificate, authority, *self._contexts()[:2])

    def listening(self) -> ssl.SSLContext:
        """Returns the TLS context for connections that this worker accepts; the same one in each call."""
        return self._contexts()[0]

    def connecting(self) -> ssl.SSLContext:
        """Returns the TLS context for connections that this worker makes; the same one in each call."""
        return self._contexts()[1]

    def fingerprint(self) -> bytes:
        """Returns the SHA-256 of this worker's certificate in DER form, 32 bytes; the same in each call."""
        return self._contexts()[2]

    def _contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext, bytes]:
        """Returns the context for accepted connections, the one for made connections, and the fingerprint, 32 bytes.

        Creates them in the first call, which raises `UsageError` if a given file cannot be used.
        """
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    def _make(self) -> tuple[ssl.SSLContext, ssl.SSLContext, bytes]:
        """Creates the context for accepted connections, the one for made connections, and the fingerprint, 32 bytes.

        The fingerprint is the SHA-256 of the certificate. Raises `UsageError` if a given file cannot be used.
        """
        import ssl

        contexts = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for context in contexts:
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False  # the secret proves the identity of the other end, not its host name
            context.verify_mode = ssl.CERT_NONE
        contexts[0].num_tickets = 0  # no session resumption: a client would receive bytes that it did not ask for
        certificate, key, authority = self._files
        if certificate is None or key is None or authority is None:
            pem, der = self_signed()
            for context in contexts:
                _load_pem(context, pem)
            return *contexts, hashlib.sha256(der).digest()
        for context in contexts:
            _load_files(context, certificate, key, authority)
            context.verify_mode = ssl.CERT_REQUIRED
        with open(certificate, encoding="ascii", errors="replace") as file:
            text = file.read()
        begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
        own = (
            begin + text.partition(begin)[2].partition(end)[0] + end
        )  # the first certificate of the file; its chain may follow
        return *contexts, hashlib.sha256(ssl.PEM_cert_to_DER_cert(own)).digest()


def check_own_certificate(
    certificate: str | None, authority: str | None, listening: ssl.SSLContext, connecting: ssl.SSLContext
) -> None:
    """Checks a worker's certificate as the other workers will, by a TLS handshake of the worker with itself.

    Returns None if the certificate is accepted.

    Args:
        certificate: The path of the certificate, for the error message only.
        authority: The path of the authority's certificate, for the error message only.
        listening: The context for connections that the worker accepts.
        connecting: The context for connections that the worker makes.

    Raises:
        UsageError: One end of the handshake refuses the certificate. The message gives OpenSSL's reason.
    """
    import ssl

    to, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [connecting.wrap_bio(back, to), listening.wrap_bio(to, back, server_side=True)]
    for _ in range(2):  # a TLS 1.3 handshake is complete after two turns of each end
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                reason = getattr(error, "verify_message", "") or error.reason or error
                raise UsageError(
                    f"the other workers would refuse the certificate {certificate}: {reason}. It must not have "
                    f"expired, must be valid for servers and clients, and must be signed by the tls_authority "
                    f"({authority}), which must be the same for all workers"
                ) from None


def _load_files(context: ssl.SSLContext, certificate: str, key: str, authority: str) -> None:
    """Loads a certificate, its key and the authority, all paths of PEM files, into a context.

    Raises `UsageError`, which names the file, if one cannot be read or used, or if the key has a passphrase.
    """

    def refuse_passphrase() -> NoReturn:
        # Without this callback OpenSSL would ask for the passphrase at the terminal, and block.
        raise UsageError(
            f"the key {key} (tls_key) is encrypted, and farcall does not ask for passphrases: use a file without one "
            f"that only its owner can read (`openssl pkey -in {key} -out plain.key` creates one)"
        )

    try:
        context.load_cert_chain(certificate, key, refuse_passphrase)
    except (OSError, ValueError) as error:
        raise UsageError(f"the certificate {certificate} and its key {key} cannot be used: {error}") from error
    try:
        context.load_verify_locations(authority)
    except (OSError, ValueError) as error:
        raise UsageError(f"there is no usable certificate in {authority} (tls_authority): {error}") from error


def _load_pem(context: ssl.SSLContext, pem: bytes) -> None:
    """Loads a certificate and its key, as PEM, into a context. Raises `ssl.SSLError` if `pem` is empty or not valid.

    Python can load a key only from a file. This file is in memory and has no name, so the key is not written to a disk.
    """
    descriptor = os.memfd_create("farcall-certificate", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def self_signed() -> tuple[bytes, bytes]:
    """Returns a new key with its certificate as PEM, and the certificate alone as DER, both as bytes.

    Each call creates another key. The certificate is valid for `LIFETIME` from now on.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "farcall")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # the clock of the other host may be behind
        .not_valid_after(now + LIFETIME)
        .sign(key, SHA256())
    )
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + certificate.public_bytes(Encoding.PEM)
    return pem, certificate.public_bytes(Encoding.DER)
