"""Where the secret comes from, and which are refused."""

from __future__ import annotations

import os
import pickle
import stat
import threading
from pathlib import Path

import pytest

from farcall.errors import UsageError
from farcall.security.secret import Secret, find_secret, secret_path

GOOD = "a secret that is long enough"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path)}


def file_in(environ: dict[str, str]) -> Path:
    return Path(secret_path(environ))


def test_the_option_comes_first_then_the_environment(environ: dict[str, str]) -> None:
    environ["FARCALL_SECRET"] = "that of the environment"
    assert find_secret(GOOD, environ).key == GOOD.encode()
    assert find_secret(None, environ).key == b"that of the environment"
    assert find_secret(None, environ).source == "FARCALL_SECRET"
    assert not file_in(environ).exists()


@pytest.mark.parametrize("empty", ["", "  ", "\n"])
def test_a_variable_that_is_set_but_empty_is_a_mistake(environ: dict[str, str], empty: str) -> None:
    environ["FARCALL_SECRET"] = empty
    with pytest.raises(UsageError, match=r"FARCALL_SECRET is set, but empty.*unset it"):
        find_secret(None, environ)
    assert find_secret(GOOD, environ).key == GOOD.encode()
    assert not file_in(environ).exists()


def test_else_a_file_is_made_for_its_owner_alone_and_used_again(environ: dict[str, str]) -> None:
    first = find_secret(None, environ)
    path = file_in(environ)
    assert path == Path(environ["HOME"], ".local/state/farcall/secret")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == ["secret"]
    assert len(first.key) == 64
    assert find_secret(None, environ).key == first.key
    assert first.source == f"the file {path}"


@pytest.mark.parametrize(("state", "used"), [("state", False), ("", False), ("/", True)])
def test_the_directory_for_state_is_honoured_if_it_is_absolute(
    tmp_path: Path, environ: dict[str, str], state: str, used: bool
) -> None:
    environ["XDG_STATE_HOME"] = str(tmp_path / "xdg") if used else state
    expected = tmp_path / "xdg/farcall/secret" if used else tmp_path / ".local/state/farcall/secret"
    assert file_in(environ) == expected


def test_a_umask_does_not_open_it(environ: dict[str, str]) -> None:
    before = os.umask(0)
    try:
        find_secret(None, environ)
    finally:
        os.umask(before)
    assert stat.S_IMODE(file_in(environ).stat().st_mode) == 0o600


def test_many_that_make_it_at_once_have_the_same(environ: dict[str, str]) -> None:
    start = threading.Barrier(8)
    found = []

    def find() -> None:
        start.wait(10)
        found.append(find_secret(None, environ).key)

    threads = [threading.Thread(target=find) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert os.listdir(file_in(environ).parent) == ["secret"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_one_that_others_can_read_is_refused(environ: dict[str, str], mode: int) -> None:
    find_secret(None, environ)
    file_in(environ).chmod(mode)
    with pytest.raises(UsageError, match=rf"others can read it \(mode 0{mode:o}\).*chmod 600.*FARCALL_SECRET"):
        find_secret(None, environ)


def test_a_directory_that_others_can_write_to_is_refused(environ: dict[str, str]) -> None:
    find_secret(None, environ)
    file_in(environ).parent.chmod(0o777)
    with pytest.raises(UsageError, match=r"others can put another secret there.*chmod 700"):
        find_secret(None, environ)
    file_in(environ).unlink()
    with pytest.raises(UsageError, match="others can put another secret there"):
        find_secret(None, environ)


def test_one_of_another_user_is_refused(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    find_secret(None, environ)
    us = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: us + 1)
    with pytest.raises(UsageError, match=f"it belongs to user {us}, not to {us + 1}"):
        find_secret(None, environ)


def test_a_link_and_a_directory_in_its_place_are_refused(environ: dict[str, str], tmp_path: Path) -> None:
    path = file_in(environ)
    path.parent.mkdir(parents=True)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="symbolic link"):
        find_secret(None, environ)
    path.unlink()
    path.mkdir()
    with pytest.raises(UsageError, match="it is not a regular file"):
        find_secret(None, environ)


def test_a_pipe_in_its_place_does_not_hang(environ: dict[str, str]) -> None:
    path = file_in(environ)
    path.parent.mkdir(parents=True)
    os.mkfifo(path, 0o600)
    with pytest.raises(UsageError, match="it is not a regular file"):
        find_secret(None, environ)


def test_no_place_for_it_is_said_with_what_to_do(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / ".local").write_text("a file in the way")
    with pytest.raises(UsageError, match=r"cannot be read from or created in .*set FARCALL_SECRET on all workers"):
        find_secret(None, environ)


@pytest.mark.parametrize("text", ["", "short", " " * 40, 16 * "x" + "\n"])
def test_what_could_be_guessed_is_refused(text: str) -> None:
    if len(text.strip()) >= 16:
        assert Secret(text).key == text.strip().encode()
        return
    with pytest.raises(UsageError, match="too short for a secret: it needs at least 16 characters"):
        Secret(text)


def test_it_is_not_shown_and_does_not_travel() -> None:
    secret = Secret(GOOD)
    assert GOOD not in repr(secret)
    assert repr(secret) == "<Secret from the option secret>"
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(secret)


def test_a_secret_may_be_any_bytes_of_the_environment() -> None:
    assert find_secret(environ={"FARCALL_SECRET": b"\xff".decode(errors="surrogateescape") * 16}).key == b"\xff" * 16
