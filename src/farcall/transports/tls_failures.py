"""What a failure of TLS means, in words: whose fault it is, and what to do about it.

What came over the connection decides. A certificate that is no good and an alert of the other side are a refusal, which
trying again does not change (`EncryptionError`); bytes that are no TLS at all come from something else than a worker
(`ProtocolError`); a connection that just ends may be a worker that is starting or ending (`ConnectionError`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from farcall.errors import EncryptionError, ProtocolError

if TYPE_CHECKING:
    import ssl

PLAIN: Final = b"farcall\0"
"""How a connection of farcall's begins that is not encrypted: the `MAGIC` of `protocol.handshake`."""

ENCRYPTED_ONLY: Final = bytes((21, 3, 3, 0, 2, 2, 10))
"""The answer to it: a record of TLS that is an alert, fatal, "unexpected message" (RFC 8446, 6)."""

_ALIKE: Final = "encrypt_between_hosts must be the same at all workers"
_ONE_AUTHORITY: Final = (
    "Either all workers have certificates that are signed by one tls_authority, the same at all, or none has any of "
    "its own"
)
_IN_TIME: Final = "Renew it where that worker runs, and see that the clocks of both hosts are right"
_OUT_OF_TIME: Final = (9, 10)  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED of openssl/x509_vfy.h


def explained(error: ssl.SSLError, has_begun: bool) -> OSError:
    """What OpenSSL ran into. `has_begun`: something was received over the encrypted connection before."""
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
    """What began where TLS was expected."""
    if is_plain(beginning):
        return EncryptionError(f"the other side does not encrypt, and this worker does: {_ALIKE}")
    return ProtocolError(f"the other side speaks neither TLS nor farcall: its first bytes were {beginning[:8]!r}")


def is_plain(beginning: bytes) -> bool:
    """Whether that is farcall without encryption, as far as it goes."""
    return PLAIN.startswith(beginning[: len(PLAIN)])


def ended_early() -> ConnectionResetError:
    """It ended before it was encrypted, without a word."""
    return ConnectionResetError(
        "the other side closed the connection before it was encrypted: it may be starting or ending just now; if not, "
        f"its log says why ({_ALIKE})"
    )
