"""The lock that says whether workers of an open group are on this machine."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from farcall.rendezvous import presence_lock
from farcall.rendezvous.presence_lock import PresenceLock, is_group_on_this_machine
from farcall.rendezvous.urls import FilePlace, TcpPlace

PLACE = TcpPlace("h", (1,), "h:1")


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    private = tmp_path / f"farcall-{os.geteuid()}"
    private.mkdir(0o700)
    return private


def test_who_is_here_is_here_until_its_end(directory: Path) -> None:
    assert not is_group_on_this_machine(PLACE)
    one, two = PresenceLock(PLACE), PresenceLock(PLACE)
    assert is_group_on_this_machine(PLACE)
    one.release()
    assert is_group_on_this_machine(PLACE)
    two.release()
    two.release()
    assert not is_group_on_this_machine(PLACE)
    assert os.listdir(directory) == []


def test_places_are_told_apart(directory: Path) -> None:
    one = PresenceLock(PLACE)
    assert not is_group_on_this_machine(TcpPlace("h", (2,), "h:2"))
    assert not is_group_on_this_machine(FilePlace("h:1"))
    one.release()
    (directory / "link").symlink_to(directory)
    other = PresenceLock(FilePlace(str(directory / "link" / "f")))
    assert is_group_on_this_machine(FilePlace(str(directory / "f")))
    other.release()


def test_a_file_that_was_left_behind_means_nothing(directory: Path) -> None:
    dead = PresenceLock(PLACE)
    dead.abandon()
    assert len(os.listdir(directory)) == 1
    assert not is_group_on_this_machine(PLACE)
    alive = PresenceLock(PLACE)
    assert is_group_on_this_machine(PLACE)
    alive.release()
    assert os.listdir(directory) == []


def test_files_that_others_left_behind_are_swept_away(directory: Path) -> None:
    living = PresenceLock(TcpPlace("h", (2,), "h:2"))
    PresenceLock(TcpPlace("h", (3,), "h:3")).abandon()
    (directory / "other.sock").touch()
    assert len(os.listdir(directory)) == 3
    one = PresenceLock(PLACE)
    assert len(os.listdir(directory)) == 3
    assert is_group_on_this_machine(TcpPlace("h", (2,), "h:2"))
    one.release()
    living.release()
    assert os.listdir(directory) == ["other.sock"]


def test_where_no_file_can_be_made_there_is_no_presence(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(directory / "missing"))
    one = PresenceLock(PLACE)
    assert not is_group_on_this_machine(PLACE)
    one.release()


def test_a_directory_that_others_may_enter_is_not_used(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory.chmod(0o755)
    one = PresenceLock(PLACE)
    assert "other users can write to it" in caplog.text
    assert os.listdir(directory) == []
    assert not is_group_on_this_machine(PLACE)
    one.release()


def test_of_two_that_end_at_once_the_last_removes_the_file(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = PresenceLock(PLACE), PresenceLock(PLACE)
    lock = fcntl.flock

    def lock_late(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        two.release()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    one.release()
    assert os.listdir(directory) == []


def test_a_lock_that_somebody_keeps_to_himself_is_not_waited_for(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence_lock, "_SHARE_TIMEOUT_S", 0.02)
    PresenceLock(PLACE).abandon()
    [name] = os.listdir(directory)
    with open(directory / name) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        one = PresenceLock(PLACE)
    one.release()
    assert os.listdir(directory) == [name]


def test_a_file_that_is_removed_in_the_same_moment_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = PresenceLock(PLACE)
    lock = fcntl.flock

    def lock_late(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        first.release()  # after the second one has opened the file, before it has the lock
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    second = PresenceLock(PLACE)
    assert is_group_on_this_machine(PLACE)
    second.release()
    assert not is_group_on_this_machine(PLACE)


def test_a_link_that_somebody_else_has_laid_is_not_followed(directory: Path) -> None:
    PresenceLock(PLACE).abandon()
    [name] = os.listdir(directory)
    os.unlink(directory / name)
    (directory / name).symlink_to(directory / "target")
    one = PresenceLock(PLACE)
    assert not (directory / "target").exists()
    one.release()
