"""The lock that says whether workers of an open group are on this machine."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from farcall.rendezvous import presence
from farcall.rendezvous.presence import Presence, is_anybody_here
from farcall.rendezvous.urls import FilePlace, TcpPlace

PLACE = TcpPlace("h", (1,), "h:1")


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_who_is_here_is_here_until_its_end(directory: Path) -> None:
    assert not is_anybody_here(PLACE)
    one, two = Presence(PLACE), Presence(PLACE)
    assert is_anybody_here(PLACE)
    one.end()
    assert is_anybody_here(PLACE)
    two.end()
    two.end()
    assert not is_anybody_here(PLACE)
    assert os.listdir(directory) == []


def test_places_are_told_apart(directory: Path) -> None:
    one = Presence(PLACE)
    assert not is_anybody_here(TcpPlace("h", (2,), "h:2"))
    assert not is_anybody_here(FilePlace("h:1"))
    one.end()
    (directory / "link").symlink_to(directory)
    other = Presence(FilePlace(str(directory / "link" / "f")))
    assert is_anybody_here(FilePlace(str(directory / "f")))
    other.end()


def test_a_file_that_was_left_behind_means_nothing(directory: Path) -> None:
    dead = Presence(PLACE)
    dead.abandon()
    assert len(os.listdir(directory)) == 1
    assert not is_anybody_here(PLACE)
    alive = Presence(PLACE)
    assert is_anybody_here(PLACE)
    alive.end()
    assert os.listdir(directory) == []


def test_files_that_others_left_behind_are_swept_away(directory: Path) -> None:
    living = Presence(TcpPlace("h", (2,), "h:2"))
    Presence(TcpPlace("h", (3,), "h:3")).abandon()
    (directory / "other.open").touch()
    assert len(os.listdir(directory)) == 3
    one = Presence(PLACE)
    assert len(os.listdir(directory)) == 3
    assert is_anybody_here(TcpPlace("h", (2,), "h:2"))
    one.end()
    living.end()
    assert os.listdir(directory) == ["other.open"]


def test_where_no_file_can_be_made_there_is_no_presence(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(directory / "missing"))
    one = Presence(PLACE)
    assert not is_anybody_here(PLACE)
    one.end()


def test_of_two_that_end_at_once_the_last_removes_the_file(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Presence(PLACE), Presence(PLACE)
    lock = fcntl.flock

    def lock_late(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        two.end()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    one.end()
    assert os.listdir(directory) == []


def test_a_lock_that_somebody_keeps_to_himself_is_not_waited_for(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "_SHARE_PATIENCE", 0.02)
    Presence(PLACE).abandon()
    [name] = os.listdir(directory)
    with open(directory / name) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        one = Presence(PLACE)
    one.end()
    assert os.listdir(directory) == [name]


def test_a_file_that_is_removed_in_the_same_moment_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Presence(PLACE)
    lock = fcntl.flock

    def lock_late(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        first.end()  # after the second one has opened the file, before it has the lock
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    second = Presence(PLACE)
    assert is_anybody_here(PLACE)
    second.end()
    assert not is_anybody_here(PLACE)


def test_a_link_that_somebody_else_has_laid_is_not_followed(directory: Path) -> None:
    Presence(PLACE).abandon()
    [name] = os.listdir(directory)
    os.unlink(directory / name)
    (directory / name).symlink_to(directory / "target")
    one = Presence(PLACE)
    assert not (directory / "target").exists()
    one.end()
