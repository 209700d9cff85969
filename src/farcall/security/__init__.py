"""Who may talk to a worker, and what it may ask: the secret, the proof of it, encryption, what may be called.

`secret` finds the group's secret, `proof` is the greeting in which both sides prove that they know it, `limits` what
is allowed before that, `encryption` makes certificates, `credentials` is all of it for one worker; `allowed` is the
list of what others may call. The layer opens no connection and has no thread.
"""

from farcall.security.credentials import Credentials, credentials_of
from farcall.security.limits import Limits, Notebook, kind_of, limits_of
from farcall.security.proof import NONCE_SIZE, Applicant, Doorkeeper, refusal_of
from farcall.security.secret import Secret, find_secret, secret_path

__all__ = [
    "NONCE_SIZE",
    "Applicant",
    "Credentials",
    "Doorkeeper",
    "Limits",
    "Notebook",
    "Secret",
    "credentials_of",
    "find_secret",
    "kind_of",
    "limits_of",
    "refusal_of",
    "secret_path",
]
