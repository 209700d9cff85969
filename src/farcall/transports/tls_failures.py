"""Converts failures of TLS to errors that say what went wrong and what to do.

- A certificate that is not valid, or an alert of the other end: `EncryptionError`. Trying again does not help.
- Bytes that are not TLS: `ProtocolError`. The other end is not a worker.
- A connection that ends early: `ConnectionError`. The other end may be a worker that is starting or ending.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from farcall.errors import EncryptionError, ProtocolError

if TYPE_CHECKING:
    import ssl

PLAIN: Final = b"farcall\0"
"""The first bytes of an unencrypted connection of farcall: the `MAGIC` of `protocol.handshake`."""

ENCRYPTED_ONLY: Final = bytes((21, 3, 3, 0, 2, 2, 10))
"""The answer to such a connection: a TLS record with the fatal alert "unexpected message" (RFC 8446, 6)."""

_ALIKE: Final = "encrypt_between_hosts must be the same at all workers"
_ONE_AUTHORITY: Final = (
    "Either all workers have certificates that are signed by one tls_authority, the same at all, or none has any of "
    "its own"
)
_IN_TIME: Final = "Renew it where that worker runs, and see that the clocks of both hosts are right"
_OUT_OF_TIME: Final = (9, 10)  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED of openssl/x509_vfy.h


def explained(error: ssl.SSLError, has_begun: bool) -> OSError:
    """Returns the error to raise for a failure that OpenSSL has reported.

    Args:
        error: The failure.
        has_begun: Whether encrypted data was received on the connection before the failure.

    Returns:
        A `ConnectionError` if `has_begun` is True. Otherwise an `EncryptionError` if one end refuses the certificate or
        the encryption of the other, or a `ProtocolError` if the received bytes were not TLS 1.3.
    """
    reason = error.reason or str(error)
    if has_begun:
        return ConnectionError(f"the encrypted connection broke: {reason}")
    code, message = getattr(error, "verify_code", 0), getattr(error, "verify_message", "")
    if message:
        advice = _IN_TIME if code in _OUT_OF_TIME else _ONE_AUTHORITY
        return EncryptionError(
            f"the encrypted connection failed: this worker refuses the certificate of the other side: {message} "
            f"({reason}). {advice}"
        )
    _, is_alert, alert = reason.partition("_ALERT_")
    if not is_alert:
        return ProtocolError(f"the encrypted connection failed: what came is no TLS 1.3 as it should be ({reason})")
    if alert == "CERTIFICATE_EXPIRED":
        refused, advice = "this worker's certificate, or its authority's: it has expired", _IN_TIME
    elif "CERTIFICATE" in alert or alert == "UNKNOWN_CA":
        refused, advice = "this worker's certificate", _ONE_AUTHORITY
    else:
        refused, advice = "it", f"{_ONE_AUTHORITY}; {_ALIKE}"
    return EncryptionError(f"the encrypted connection failed: the other side refuses {refused} ({reason}). {advice}")


def not_tls(beginning: bytes) -> ProtocolError:
    """Returns the error to raise for a connection whose first bytes are not TLS.

    Args:
        beginning: The first bytes that were received. If there are none, the other end is taken for a worker that does
            not encrypt.

    Returns:
        An `EncryptionError` if `beginning` is from a worker that does not encrypt; otherwise another `ProtocolError`.
    """
    if is_plain(beginning):
        return EncryptionError(f"the other side does not encrypt, and this worker does: {_ALIKE}")
    return ProtocolError(f"the other side speaks neither TLS nor farcall: its first bytes were {beginning[:8]!r}")


def is_plain(beginning: bytes) -> bool:
    """Returns whether these can be the first bytes of an unencrypted connection of farcall; True if there are none."""
    return PLAIN.startswith(beginning[: len(PLAIN)])


def ended_early() -> ConnectionResetError:
    """Returns the error to raise for a connection that the other end has closed before it was encrypted."""
    return ConnectionResetError(
        "the other side closed the connection before it was encrypted: it may be starting or ending just now; if not, "
        f"its log says why ({_ALIKE})"
    )
