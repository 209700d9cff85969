"""Finds the secret that authenticates the workers of a group.

The first of these that exists is used: the option `secret`; the environment variable `FARCALL_SECRET`, which
`farcall run` sets to a fresh secret for its workers; a file of this user, which is created on first use. If several
hosts share a home directory, they share the file as well.

Rules
- Directories below the home directory are created. The home directory itself is not: if it is missing, the environment
  is wrong (in a service or container, say), and a secret written to that place would not be the group's.
- The file is readable by its owner only, from the moment it exists. A file that others can read or that belongs to
  another user is refused, because its secret may be known.
- If several processes create the file at once, one of them wins and all read its secret: each writes a temporary file
  and links it to the final name in one step, which fails if the name exists.
- The bytes of the file are the secret. They are not decoded, so two different files are two different secrets.
- A secret is never shown, neither by `repr` nor in a message nor in a pickle. Messages say where it came from.
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
"""The name of the environment variable."""
MIN_CHARACTERS: Final = 16
"""The shortest secret that is accepted. A recorded handshake of a shorter one could be brute-forced."""

_MAX_FILE_BYTES: Final = 64 * 1024
_ADVICE: Final = f"Make one with `python -c 'import secrets; print(secrets.token_hex(32))'` and set {VARIABLE}"


class Secret:
    """The secret of a group. Its `repr` does not show it, and it cannot be pickled or copied.

    Args:
        text: The secret, as text or as bytes. White space around it is removed.
        source: Where the secret came from, for messages, such as "the option secret".

    Attributes:
        key: The secret as bytes.
        source: Where the secret came from.

    Raises:
        UsageError: The secret has less than `MIN_CHARACTERS` characters, or characters that cannot be encoded, or is
            neither text nor bytes.
    """

    __slots__ = ("key", "source")

    def __init__(self, text: str | bytes, source: str = "the option secret") -> None:
        if isinstance(text, str):
            try:
                text = text.encode(errors="surrogateescape")  # restores bytes of the environment that are not UTF-8
            except UnicodeEncodeError:
                raise UsageError(f"{source} has characters that cannot be encoded. {_ADVICE}") from None
        key = text.strip() if isinstance(text, bytes) else b""
        if _length(key) < MIN_CHARACTERS:
            raise UsageError(
                f"{source} is too short for a secret: it needs at least {MIN_CHARACTERS} characters. {_ADVICE}"
            )
        self.key: Final = key
        self.source: Final = source

    def __repr__(self) -> str:
        return f"<Secret from {self.source}>"

    def __reduce__(self) -> NoReturn:
        """Raises `TypeError`, always: a secret must not be in a pickle, nor be copied."""
        raise TypeError("a secret cannot be pickled or copied")


def _length(key: bytes) -> int:
    """Returns the number of characters if `key` is valid UTF-8, else the number of bytes; 0 for an empty key."""
    try:
        return len(key.decode())
    except UnicodeDecodeError:
        return len(key)


def find_secret(chosen: str | None = None, environ: Mapping[str, str] = os.environ) -> Secret:
    """Returns the secret of this worker: the chosen one, else that of the environment, else that of this user's file.

    The file, whose path is `secret_path()`, is created with a random secret if it does not exist.

    Args:
        chosen: The option `secret`; None if it is not set. An empty one is too short.
        environ: The environment variables: `FARCALL_SECRET`, and those that say where the file is.

    Raises:
        UsageError: The secret is too short; `FARCALL_SECRET` is set but empty; or the file cannot be read or created,
            or others could have read or replaced it.
    """
    if chosen is not None:
        return Secret(chosen)
    if VARIABLE in environ:
        if not environ[VARIABLE].strip():
            # Most likely a shell script exported a variable that it never set. Using the file instead would give this
            # worker another secret than the rest of its group has.
            raise UsageError(f"{VARIABLE} is set, but empty. {_ADVICE}, or unset it to use this user's file")
        return Secret(environ[VARIABLE], VARIABLE)
    path = secret_path(environ)
    try:
        content = _read(path)
        if content is None:
            _check_home(path, environ)
            _create(path)
            content = _read(path)
    except OSError as error:
        raise UsageError(
            f"the secret of this user cannot be read from or created in {path}: {error.strerror or error}. "
            f"{_ADVICE} on all workers"
        ) from error
    if content is None:
        raise UsageError(
            f"the file {path} with the secret was deleted while it was being created. {_ADVICE} on all workers"
        )
    return Secret(content, f"the file {path}")


def secret_path(environ: Mapping[str, str] = os.environ) -> str:
    """Returns the path of this user's secret file, whether it exists or not. Never raises.

    The path is `farcall/secret` in the directory `XDG_STATE_HOME`, or in `~/.local/state` if that variable is not set
    or not an absolute path.

    Args:
        environ: The environment variables. `HOME` says what `~` is; without it, the user database does.
    """
    state = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # the XDG specification says to ignore a relative path
        state = os.path.join(_home(environ), ".local", "state")
    return os.path.join(state, "farcall", "secret")


def _home(environ: Mapping[str, str]) -> str:
    """Returns the home directory: `HOME`, or that of the user database if `HOME` is not set or empty.

    Whether the directory exists is not checked.
    """
    return environ.get("HOME") or os.path.expanduser("~")


def _check_home(path: str, environ: Mapping[str, str]) -> None:
    """Raises `FileNotFoundError` if `path` is below the home directory and the home directory does not exist.

    Returns None otherwise. `environ` has the environment variables, of which `HOME` is used.
    """
    home = os.path.abspath(_home(environ))
    if os.path.abspath(path).startswith(os.path.join(home, "")) and not os.path.isdir(home):
        raise FileNotFoundError(errno.ENOENT, f"the home directory {home} does not exist")


def _read(path: str) -> bytes | None:
    """Returns the content of the secret file, which may be empty, or None if the file does not exist.

    Raises `UsageError` if the file is not a regular file of this user that only this user can read and replace, or has
    more than `_MAX_FILE_BYTES`; `OSError` if it cannot be opened or read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _unusable_error(path, "it is a symbolic link", "replace it with a file") from error
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _unusable_error(path, "it is not a regular file", "remove it")
        if found.st_uid != os.geteuid():
            raise _unusable_error(path, f"it belongs to user {found.st_uid}, not to {os.geteuid()}", "remove it")
        if found.st_mode & 0o077:
            mode = stat.S_IMODE(found.st_mode)
            # The secret may have been read already, so a new file is better than a new mode.
            advice = f"remove it, or at least `chmod 600 {path}`"
            raise _unusable_error(path, f"others can read it (mode {mode:04o})", advice)
        _check_directory(os.path.dirname(path))
        if found.st_size > _MAX_FILE_BYTES:
            what = f"it has {found.st_size} bytes, more than {_MAX_FILE_BYTES}"
            raise _unusable_error(path, what, "make it shorter")
        return os.read(descriptor, _MAX_FILE_BYTES)
    finally:
        os.close(descriptor)


def _check_directory(directory: str) -> None:
    """Raises `UsageError` if another user owns the directory of the secret file or may write to it.

    Raises `FileNotFoundError` if the directory does not exist.
    """
    found = os.stat(directory)
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        advice = f"make this user its owner and `chmod 700 {directory}`"
        raise _unusable_error(directory, "others can put another secret there", advice)


def _unusable_error(path: str, what: str, advice: str) -> UsageError:
    """Returns the error for a secret file or directory that must not be used. Does not raise it.

    Args:
        path: The file or directory.
        what: What is wrong with it, as a sentence without a period.
        advice: What to do about it, as an imperative.
    """
    return UsageError(f"the secret in {path} cannot be used: {what}. To continue, {advice}, or set {VARIABLE}")


def _create(path: str) -> None:
    """Creates the secret file with a random secret; does nothing if it exists or another process creates it first.

    Creates missing directories, too. Raises `OSError` if the file cannot be created, and `UsageError` if another user
    owns its directory or may write to it.
    """
    directory = os.path.dirname(path)
    os.makedirs(os.path.dirname(directory), exist_ok=True)
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        pass
    _check_directory(directory)
    temporary = f"{path}.{secrets.token_hex(8)}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32) + "\n")
        os.link(temporary, path)
    except FileExistsError:
        pass  # another process has created it, and all processes use that one
    finally:
        os.unlink(temporary)
