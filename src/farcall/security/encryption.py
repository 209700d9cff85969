"""How connections between hosts are encrypted: TLS 1.3, with a certificate that this worker makes for itself.

Nobody signs that certificate, and nobody has to: the secret proves both ends, and the fingerprint of the certificate is
part of that proof (`security.proof`). So whoever stands in between, with another certificate, is found out. The key is
made anew by each process, is never written to a disk, and goes with the process.

Who has certificates of their own may use them: then each side also checks that the other's is signed by the `ca`. That
is on top of the secret, not in its place.

Files that are given are looked at when they are given, and each worker asks itself first whether the others would
accept its certificate. A certificate of its own is made on the first connection that needs it: `ssl` and `cryptography`
are not imported before.
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
"""Of a certificate that a worker makes. Nobody checks it, as the key does not outlive the process."""


class Encryption:
    """The certificate of one worker, and what it asks of the other side's."""

    def __init__(self, certificate: str | None = None, key: str | None = None, authority: str | None = None) -> None:
        """Paths of PEM files: own certificate and key, and the authority that has signed everybody's.

        Raises `UsageError` if some are given and others not, a file cannot be used, or the certificate is not one that
        the others would accept.
        """
        given = [path for path in (certificate, key, authority) if path is not None]
        if len(given) not in (0, 3):
            raise UsageError("own certificates need all three: tls_certificate, tls_key and tls_authority")
        for path in given:
            if not os.access(path, os.R_OK):
                raise UsageError(f"the file {path} for the encryption between hosts cannot be read")
        self._files = (certificate, key, authority)
        self._lock = threading.Lock()
        self._made: tuple[ssl.SSLContext, ssl.SSLContext, bytes] | None = None
        if given:
            check_own_certificate(certificate, authority, *self._contexts()[:2])

    def listening(self) -> ssl.SSLContext:
        """For the side that listens."""
        return self._contexts()[0]

    def connecting(self) -> ssl.SSLContext:
        """For the side that connects."""
        return self._contexts()[1]

    def fingerprint(self) -> bytes:
        """Of this worker's certificate."""
        return self._contexts()[2]

    def _contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext, bytes]:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    def _make(self) -> tuple[ssl.SSLContext, ssl.SSLContext, bytes]:
        import ssl

        contexts = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for context in contexts:
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False  # who it is, is proved by the secret
            context.verify_mode = ssl.CERT_NONE
        contexts[0].num_tickets = 0  # nothing comes from the other side unasked
        certificate, key, authority = self._files
        if certificate is None or key is None or authority is None:
            pem, der = _self_signed()
            for context in contexts:
                _load(context, pem)
            return *contexts, hashlib.sha256(der).digest()
        for context in contexts:
            _load_files(context, certificate, key, authority)
            context.verify_mode = ssl.CERT_REQUIRED
        with open(certificate, encoding="ascii", errors="replace") as file:
            text = file.read()
        begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
        own = begin + text.partition(begin)[2].partition(end)[0] + end  # the first; the chain may follow
        return *contexts, hashlib.sha256(ssl.PEM_cert_to_DER_cert(own)).digest()


def check_own_certificate(
    certificate: str | None, authority: str | None, listening: ssl.SSLContext, connecting: ssl.SSLContext
) -> None:
    """Has this worker greet itself: what it refuses, the others would. Raises `UsageError`."""
    import ssl

    to, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [connecting.wrap_bio(back, to), listening.wrap_bio(to, back, server_side=True)]
    for _ in range(2):  # each hears the other twice: TLS 1.3 is through by then
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                reason = getattr(error, "verify_message", "") or error.reason or error
                raise UsageError(
                    f"the other workers would refuse the certificate {certificate}: {reason}. It must not be out of "
                    f"date, must be good for servers and clients, and be signed by the tls_authority ({authority}), "
                    "which must be the same at all workers"
                ) from None


def _load_files(context: ssl.SSLContext, certificate: str, key: str, authority: str) -> None:
    """Raises `UsageError` that names the file that cannot be used."""

    def passphrase() -> NoReturn:
        # Without it, OpenSSL would ask whoever sits at the terminal, and wait.
        raise UsageError(
            f"the key {key} (tls_key) is encrypted, and nobody is asked for its passphrase: give a file without one, "
            f"which its owner alone can read (`openssl pkey -in {key} -out plain.key` makes one)"
        )

    try:
        context.load_cert_chain(certificate, key, passphrase)
    except (OSError, ValueError) as error:
        raise UsageError(f"the certificate {certificate} and its key {key} cannot be used: {error}") from error
    try:
        context.load_verify_locations(authority)
    except (OSError, ValueError) as error:
        raise UsageError(f"there is no certificate in {authority} (tls_authority) that can be used: {error}") from error


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """Python can load a key from a file only: it gets one that is in memory, and in no directory."""
    descriptor = os.memfd_create("farcall-certificate", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _self_signed() -> tuple[bytes, bytes]:
    """A new key and its certificate, as PEM; the certificate alone, as DER."""
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
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + LIFETIME)
        .sign(key, SHA256())
    )
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + certificate.public_bytes(Encoding.PEM)
    return pem, certificate.public_bytes(Encoding.DER)
