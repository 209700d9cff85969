"""The secret that the workers of a group know each other by, and where it comes from when nobody says.

In this order: the option `secret`; `FARCALL_SECRET` in the environment, which `farcall run` sets to a fresh one for its
workers; a file of this user, made on first use. A home directory that hosts share makes the file do across hosts, too.

Rules
- The file is readable by its owner alone, from the moment it is there. One that others can read, or that belongs to
  somebody else, is refused: a secret that is known is none.
- Of several processes that make the file at once one wins, and all read the winner's: it is written aside, and linked
  to its place in one step.
- A secret is never shown: not by `repr`, not in a message, not in a pickle. Messages say where it came from.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Mapping
from typing import Final, NoReturn

from farcall.errors import UsageError

VARIABLE: Final = "FARCALL_SECRET"
SHORTEST: Final = 16
"""Characters. Who listens in on a greeting may try words at home, as many as they like."""

_LONGEST: Final = 64 * 1024
_ADVICE: Final = f"Make one with `python -c 'import secrets; print(secrets.token_hex(32))'` and set {VARIABLE}"


class Secret:
    """What is known to the group alone, and where this worker has it from."""

    __slots__ = ("key", "source")

    def __init__(self, text: str, source: str = "the option secret") -> None:
        """Raises `UsageError` for a text that could be guessed."""
        if not isinstance(text, str) or len(text.strip()) < SHORTEST:
            raise UsageError(f"{source} is too short for a secret: it needs at least {SHORTEST} characters. {_ADVICE}")
        self.key: Final = text.strip().encode(errors="surrogateescape")  # an environment may hold any bytes
        self.source: Final = source

    def __repr__(self) -> str:
        return f"<Secret from {self.source}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret does not travel")


def find_secret(chosen: str | None = None, environ: Mapping[str, str] = os.environ) -> Secret:
    """The secret of this worker: the chosen one, else that of the environment, else that of this user's file.

    Raises `UsageError` if it is too short, if the variable is set but empty, or the file cannot be used.
    """
    if chosen is not None:
        return Secret(chosen)
    if VARIABLE in environ:
        if not environ[VARIABLE].strip():
            # A shell's variable that was never set, most likely: another secret in its place would not be the group's.
            raise UsageError(f"{VARIABLE} is set, but empty. {_ADVICE}, or unset it: then this user's file is used")
        return Secret(environ[VARIABLE], VARIABLE)
    path = secret_path(environ)
    try:
        text = _read(path)
        if text is None:
            _create(path)
            text = _read(path)
    except OSError as error:
        raise UsageError(
            f"the secret of this user cannot be kept in {path}: {error.strerror or error}. {_ADVICE} on all workers"
        ) from error
    if text is None:
        raise UsageError(f"the secret in {path} vanished as soon as it was made. {_ADVICE} on all workers")
    return Secret(text, f"the file {path}")


def secret_path(environ: Mapping[str, str] = os.environ) -> str:
    """Where the file of this user is, or would be."""
    state = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # what is not absolute is to be passed over, says the XDG specification
        home = environ.get("HOME") or os.path.expanduser("~")
        state = os.path.join(home, ".local", "state")
    return os.path.join(state, "farcall", "secret")


def _read(path: str) -> str | None:
    """The text of the file; None if there is none. Raises `UsageError` if it is not ours alone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _refusal(path, "it is a symbolic link", f"remove it, and put the secret itself to {path}") from error
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _refusal(path, "it is no file", "remove it")
        if found.st_uid != os.geteuid():
            raise _refusal(path, f"it belongs to user {found.st_uid}, not to {os.geteuid()}", "remove it")
        if found.st_mode & 0o077:
            mode = stat.S_IMODE(found.st_mode)
            raise _refusal(path, f"others can read it (mode {mode:04o})", f"remove it, or `chmod 600 {path}` at least")
        _check_directory(os.path.dirname(path))
        return os.read(descriptor, _LONGEST).decode(errors="replace")
    finally:
        os.close(descriptor)


def _check_directory(directory: str) -> None:
    found = os.stat(directory)
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise _refusal(directory, "others can put another secret there", f"make it yours: `chmod 700 {directory}`")


def _refusal(path: str, what: str, advice: str) -> UsageError:
    return UsageError(f"the secret in {path} is not used: {what}. To go on, {advice}, or set {VARIABLE}")


def _create(path: str) -> None:
    """Makes the file, unless another process is quicker. Raises `OSError`."""
    directory = os.path.dirname(path)
    os.makedirs(os.path.dirname(directory), exist_ok=True)
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        pass
    _check_directory(directory)
    aside = f"{path}.{secrets.token_hex(8)}"
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32) + "\n")
        os.link(aside, path)
    except FileExistsError:
        pass  # another process was quicker
    finally:
        os.unlink(aside)
