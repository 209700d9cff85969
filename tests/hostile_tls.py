"""TLS 1.3 by hand, for tests that attack it: after an ordinary handshake, records of any kind can be sent.

The handshake is Python's own. The traffic secret comes out of its key log, and every record after the handshake is
encrypted here (RFC 8446, 5.2 and 7). Nothing of farcall is imported.
"""

from __future__ import annotations

import contextlib
import datetime
import hmac
import os
import socket
import ssl
import struct
import tempfile
from collections.abc import Iterator

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

ALERT, HANDSHAKE, DATA = 21, 22, 23


def hello_in_fragments(size: int) -> bytes:
    """A TLS ClientHello, cut into records that carry `size` bytes each."""
    outgoing = ssl.MemoryBIO()
    tls = _context(ssl.PROTOCOL_TLS_CLIENT).wrap_bio(ssl.MemoryBIO(), outgoing)
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    record = outgoing.read()
    body = record[5:]
    pieces = [body[begin : begin + size] for begin in range(0, len(body), size)]
    return b"".join(record[:3] + struct.pack(">H", len(piece)) + piece for piece in pieces)


class HostileTls:
    """One end of a connection over which the TLS handshake is done. `sock` must block, with a timeout."""

    def __init__(self, sock: socket.socket, is_server: bool = False) -> None:
        self.sock = sock
        context = _context(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        with tempfile.TemporaryDirectory() as directory:
            log = os.path.join(directory, "keys")
            context.keylog_filename = log
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            self.tls = context.wrap_bio(incoming, outgoing, server_side=is_server)
            self.incoming = incoming
            while True:
                try:
                    self.tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    sock.sendall(outgoing.read())
                    incoming.write(sock.recv(65536))
            sock.sendall(outgoing.read())
            with open(log, encoding="ascii") as file:
                keys = {line.split()[0]: bytes.fromhex(line.split()[2]) for line in file if not line.startswith("#")}
        cipher = self.tls.cipher()
        assert cipher is not None
        self._hash = "sha384" if cipher[0].endswith("SHA384") else "sha256"
        self._key_size = 32 if "256_GCM" in cipher[0] else 16
        self._use(keys["SERVER_TRAFFIC_SECRET_0" if is_server else "CLIENT_TRAFFIC_SECRET_0"])

    def record(self, kind: int, content: bytes) -> bytes:
        """The next record, encrypted."""
        inner = content + bytes([kind])
        header = struct.pack(">BHH", DATA, 0x0303, len(inner) + 16)
        nonce = (int.from_bytes(self._iv, "big") ^ self._sequence).to_bytes(12, "big")
        self._sequence += 1
        return header + self._cipher.encrypt(nonce, inner, header)

    def data(self, content: bytes) -> bytes:
        """A record with data."""
        return self.record(DATA, content)

    def key_update(self, wants_answer: bool = False) -> bytes:
        """A record that changes the key of all that this end sends after it."""
        record = self.record(HANDSHAKE, bytes([24, 0, 0, 1, wants_answer]))
        self._use(self._expand(self._secret, b"traffic upd", len(self._secret)))
        return record

    def key_updates(self, count: int, wants_answer: bool = False) -> bytes:
        """Many of those."""
        return b"".join(self.key_update(wants_answer) for _ in range(count))

    def read(self) -> bytes:
        """Data from the other end."""
        while True:
            try:
                return self.tls.read(65536)
            except ssl.SSLWantReadError:
                self.incoming.write(self.sock.recv(65536))

    def _use(self, secret: bytes) -> None:
        self._secret = secret
        self._cipher = AESGCM(self._expand(secret, b"key", self._key_size))
        self._iv = self._expand(secret, b"iv", 12)
        self._sequence = 0

    def _expand(self, secret: bytes, label: bytes, length: int) -> bytes:
        """HKDF-Expand-Label of RFC 8446, 7.1; a single block of it is enough here."""
        full = b"tls13 " + label
        info = struct.pack(">HB", length, len(full)) + full + b"\0"
        return hmac.digest(secret, info + b"\x01", self._hash)[:length]


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # they would be records of which this module knows nothing
        with _certificate() as path:
            context.load_cert_chain(path)
    return context


@contextlib.contextmanager
def _certificate() -> Iterator[str]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "anybody")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .sign(key, SHA256())
    )
    with tempfile.NamedTemporaryFile(suffix=".pem") as file:
        file.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        file.write(certificate.public_bytes(Encoding.PEM))
        file.flush()
        yield file.name
