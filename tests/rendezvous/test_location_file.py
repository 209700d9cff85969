"""The file that says where the store is: written whole, replaced when stale, removed by its owner only."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from farcall.errors import RendezvousError, RendezvousTimeoutError
from farcall.rendezvous import location_file
from farcall.rendezvous.location_file import Location, publish_location, read_location, remove_location

HERE = Location("run1", 4000, ("127.0.0.1", "::1"))
THERE = Location("run2", 5000, ("127.0.0.1",))


def alive(location: Location) -> bool:
    return True


def dead(location: Location) -> bool:
    return False


def test_what_is_published_is_read_and_removed(path: str) -> None:
    publish_location(path, HERE, alive, 1)
    assert read_location(path) == HERE
    remove_location(path, HERE)
    assert os.listdir(os.path.dirname(path)) == []


def test_what_is_not_there_or_empty_is_no_location(path: str) -> None:
    assert read_location(path) is None
    Path(path).touch()
    assert read_location(path) is None
    publish_location(path, HERE, alive, 1)
    assert read_location(path) == HERE


@pytest.mark.parametrize("text", ["127.0.0.1 localhost", "{}", '{"run": 1, "port": 2, "addresses": []}', "\xff"])
def test_a_file_of_somebody_else_is_no_location_and_never_overwritten(path: str, text: str) -> None:
    Path(path).write_text(text)
    assert read_location(path) is None
    with pytest.raises(RendezvousError, match="was not written by farcall"):
        publish_location(path, HERE, dead, 1)
    remove_location(path, HERE)
    assert Path(path).read_text() == text


def test_a_stale_location_is_replaced(path: str) -> None:
    publish_location(path, HERE, dead, 1)
    publish_location(path, THERE, dead, 1)
    assert read_location(path) == THERE
    assert os.listdir(os.path.dirname(path)) == ["location"]


def test_a_living_location_is_left_alone(path: str) -> None:
    publish_location(path, HERE, dead, 1)
    with pytest.raises(RendezvousError, match="another process already hosts a store"):
        publish_location(path, THERE, alive, 1)
    assert read_location(path) == HERE


def test_only_ones_own_location_is_removed(path: str) -> None:
    publish_location(path, THERE, dead, 1)
    remove_location(path, HERE)
    assert read_location(path) == THERE
    os.unlink(path)
    remove_location(path, HERE)
    assert not os.path.exists(path)


def test_a_lock_that_is_not_given_up_is_a_clear_error(path: str) -> None:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RendezvousTimeoutError, match="is locked by another process"):
            publish_location(path, HERE, dead, 0)
    publish_location(path, HERE, dead, 0)


def test_a_lock_on_a_file_that_was_replaced_meanwhile_does_not_count(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(path).touch()
    real = location_file._try_lock
    locked: list[int] = []

    def lock_late(descriptor: int) -> bool:
        if not locked:
            location_file._replace(path, THERE)  # by another rank 0, between our opening and our locking
        locked.append(descriptor)
        return real(descriptor)

    monkeypatch.setattr(location_file, "_try_lock", lock_late)
    with pytest.raises(RendezvousError, match="another worker with rank 0"):
        publish_location(path, HERE, alive, 10)
    assert len(locked) == 2


def test_a_lock_on_a_file_that_was_removed_meanwhile_does_not_count(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(path).touch()
    real = location_file._try_lock
    locked: list[int] = []

    def lock_late(descriptor: int) -> bool:
        if not locked:
            os.unlink(path)
        locked.append(descriptor)
        return real(descriptor)

    monkeypatch.setattr(location_file, "_try_lock", lock_late)
    publish_location(path, HERE, dead, 10)
    assert read_location(path) == HERE
    assert len(locked) == 2


def test_a_directory_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(RendezvousError, match="cannot be written"):
        publish_location(str(tmp_path / "no" / "file"), HERE, dead, 1)


def test_a_failed_write_leaves_nothing_behind(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: str, target: str) -> None:
        raise OSError("disk on fire")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(RendezvousError, match="disk on fire"):
            publish_location(path, HERE, dead, 1)
    assert os.listdir(os.path.dirname(path)) == ["location"]
    assert read_location(path) is None
