"""Where the store of an open group is hosted, by whom, and what a worker does that is not let in."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest
from fork_stage import expect_a_forked_child_lets_go
from open_stage import OpenStage

from farcall.errors import RendezvousError, RendezvousTimeoutError
from farcall.rendezvous import client as client_module
from farcall.rendezvous import hosted_store, join_open, open_group_store, rendezvous
from farcall.rendezvous.client import StoreClient
from farcall.rendezvous.location_file import Location, publish_location, read_location
from farcall.rendezvous.open_group_store import OpenStore
from interruption import At, Interrupt, interrupt


@pytest.fixture
def stages() -> Iterator[Callable[[str], OpenStage]]:
    with ExitStack() as made:
        yield lambda url: made.enter_context(closing(OpenStage(url)))


@pytest.fixture
def stage(stages: Callable[[str], OpenStage], free_port: int) -> OpenStage:
    return stages(f"tcp://127.0.0.1:{free_port}")


@pytest.fixture
def file_stage(stages: Callable[[str], OpenStage], path: str) -> OpenStage:
    return stages(f"file://{path}")


def not_this_machine(*args: object) -> socket.socket:
    raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))


# -- where


def test_an_open_group_meets_through_the_environment(free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port))
    monkeypatch.setenv("RANK", "7")
    found = rendezvous("env://", "w", -1, None, 30)
    assert (found.rank, found.world_size, found.host) == (7, None, "127.0.0.1")
    assert join_open(found, "w", lambda number: b"", 5) == (1, {1: b""})
    found.store.close()


def test_who_is_elsewhere_looks_until_somebody_hosts_the_store(
    stage: OpenStage, background: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = threading.Semaphore(0)

    def elsewhere(*args: object) -> socket.socket:
        tried.release()
        return not_this_machine()

    with monkeypatch.context() as patch:
        patch.setattr(hosted_store, "listen_at_once", elsewhere)
        early = background.submit(stage.join, "early")
        for _ in range(3):
            assert tried.acquire(timeout=10)
    # What it does now is what a worker on the right machine would do.
    assert early.result(10).number == 1


def test_who_cannot_host_the_store_says_so_in_the_end(stage: OpenStage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosted_store, "listen_at_once", not_this_machine)
    with pytest.raises(
        RendezvousTimeoutError,
        match=r"worker 'w' found no store at tcp://127.0.0.1:\d+ in 0.3 s: no worker hosts it, and this worker cannot "
        r"host it either: it cannot listen there .*Cannot assign.*Start a worker that can host it",
    ):
        stage.meet("w", timeout=0.3)


def test_who_has_no_time_to_host_it_is_not_told_of_ranks(
    stage: OpenStage, occupied: Callable[..., socket.socket], free_port: int
) -> None:
    occupied(free_port)
    with pytest.raises(
        RendezvousTimeoutError, match="this worker cannot host it either: there was no time left for it"
    ):
        stage.meet("w", timeout=0.05)


def test_a_stranger_that_says_nothing_is_no_store_and_no_free_place(
    stage: OpenStage, occupied: Callable[..., socket.socket], free_port: int
) -> None:
    occupied(free_port)
    with pytest.raises(RendezvousTimeoutError, match="another program listens there but does not answer"):
        stage.meet("w", timeout=0.6)


def test_a_member_elsewhere_cannot_host_the_store_again(stage: OpenStage, monkeypatch: pytest.MonkeyPatch) -> None:
    host, member = stage.join("host"), stage.join("member")
    host.crash()
    with monkeypatch.context() as patch:
        patch.setattr("farcall.rendezvous.open_group_store._SEARCH_TIMEOUT_S", 0.1)
        patch.setattr(hosted_store, "listen_at_once", not_this_machine)
        assert not member.ensure_store()
    assert member.ensure_store()


def test_a_member_hosts_again_what_many_addresses_lead_to_where_nobody_answers(
    file_stage: OpenStage, path: str, occupied: Callable[..., socket.socket]
) -> None:
    """The host is frozen: each of its addresses takes connections, and is given up after a while."""
    host, member = file_stage.join("host"), file_stage.join("member")
    host.crash()
    frozen = Location("frozen", occupied().getsockname()[1], ("127.0.0.1",) * 8)
    Path(path).write_bytes(msgspec.json.encode(frozen))
    assert member.ensure_store()
    assert read_location(path) != frozen


def test_who_finds_a_store_that_dies_at_once_looks_again(stage: OpenStage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.join("host")
    read, asked = StoreClient.read, 0

    def gone_at_first(self: StoreClient, prefix: str) -> Mapping[str, bytes]:
        nonlocal asked
        asked += 1
        if asked == 1:
            always_gone()
        return read(self, prefix)

    monkeypatch.setattr(StoreClient, "read", gone_at_first)
    found = rendezvous(stage.url, "late", -1, None, 20)
    assert join_open(found, "late", lambda number: b"", 5)[0] == 2
    found.store.close()
    monkeypatch.setattr(StoreClient, "read", lambda self, prefix: always_gone())
    with pytest.raises(RendezvousError, match="it closed the connection"):
        rendezvous(stage.url, "too late", -1, None, 0.2)


def always_gone() -> NoReturn:
    raise RendezvousError("the store is gone: it closed the connection")


def test_that_another_group_is_at_the_place_is_said_once(
    stage: OpenStage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, member = stage.join("host"), stage.join("member")
    host.crash()
    monkeypatch.setattr("farcall.rendezvous.open_group_store.PRESENCE_WAIT_S", 0.0)
    stage.join("stranger")
    for _ in range(2):
        assert not member.ensure_store()
    assert [record.levelname for record in caplog.records if "another open group" in record.message] == ["WARNING"]


def test_of_the_ports_of_a_run_the_first_that_nobody_listens_on_is_taken(
    stages: Callable[[str], OpenStage], occupied: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_FIRST_ATTEMPT_S", 0.1)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "r")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    silent, free = occupied().getsockname()[1], occupied()
    free_one = free.getsockname()[1]
    monkeypatch.setattr("farcall.rendezvous.urls.candidate_ports", lambda *args: (silent, free_one))
    free.close()
    stage = stages("env://")
    host, member = stage.join("host"), stage.join("member")
    assert host.store._hosted is not None
    assert host.store._hosted.server.port == free_one
    assert list(member.there) == [1, 2]


# -- open groups and others


def test_an_open_and_a_fixed_group_do_not_mix(stage: OpenStage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "REFUSAL_RETRY_S", 0.05)
    stage.join("w")
    with pytest.raises(
        RendezvousError, match=r"open', not .*4 workers'; start all workers with the same world_size, or all"
    ):
        rendezvous(stage.url, "x", 1, 4, 30)
    with pytest.raises(RendezvousError, match="is taken by another process"):
        rendezvous(stage.url, "x", 0, 4, 30)


def test_a_fixed_and_an_open_group_do_not_mix(stage: OpenStage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "REFUSAL_RETRY_S", 0.05)
    fixed = rendezvous(stage.url, "x", 0, 4, 30)
    with pytest.raises(RendezvousError, match=r"worker 'w' cannot join .*4 workers', not .*open'; start all workers"):
        stage.meet("w")
    fixed.store.close()


def test_they_do_not_mix_at_a_file_either(file_stage: OpenStage, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "REFUSAL_RETRY_S", 0.05)
    file_stage.join("w")
    before = read_location(path)
    with pytest.raises(RendezvousError, match=r"open', not .*4 workers'"):
        rendezvous(file_stage.url, "x", 1, 4, 30, "127.0.0.1")
    with pytest.raises(RendezvousError, match="hosts a store for the file"):
        rendezvous(file_stage.url, "x", 0, 4, 30, "127.0.0.1")
    assert read_location(path) == before
    file_stage.close()
    fixed = rendezvous(file_stage.url, "x", 0, 4, 30, "127.0.0.1")
    before = read_location(path)
    with pytest.raises(RendezvousError, match=r"4 workers', not .*open'"):
        file_stage.meet("w")
    assert read_location(path) == before
    fixed.store.close()


# -- the file


def test_the_file_stays_while_others_are_there_and_goes_with_the_last(file_stage: OpenStage, path: str) -> None:
    host, member = file_stage.join("host"), file_stage.join("member")
    first = read_location(path)
    host.leave()
    assert read_location(path) == first is not None
    assert member.ensure_store()
    assert read_location(path) not in (first, None)
    member.leave()
    assert not os.path.exists(path)


def test_a_store_that_is_closed_without_a_good_bye_leaves_no_file_either(file_stage: OpenStage, path: str) -> None:
    file_stage.join("alone").store.close()
    assert not os.path.exists(path)


def test_who_begins_just_after_another_joins_that_one_however_slow_it_is(
    file_stage: OpenStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has seen no file, and then there is one, whose store does not answer in time."""
    first = file_stage.meet("first")
    looks = itertools.count()

    def read_late(path: str) -> Location | None:
        return None if next(looks) < 3 else read_location(path)  # twice in a look, once to see whether to begin

    for module in (open_group_store, hosted_store):
        monkeypatch.setattr(module, "read_location", read_late)
    monkeypatch.setattr(hosted_store, "_is_any_alive", lambda *_: False)
    assert file_stage.meet("second").group == first.group


def test_a_file_that_leads_nowhere_is_replaced_after_a_while(
    file_stage: OpenStage, path: str, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_location(path, Location("earlier", free_port, ("127.0.0.1",)), lambda earlier: False, 1)
    with pytest.raises(
        RendezvousTimeoutError, match="the file leads to a store that a worker of its group may host again soon"
    ):
        file_stage.meet("w", timeout=0.3)
    monkeypatch.setattr("farcall.rendezvous.open_group_store.FILE_WAIT_S", 0.05)
    assert file_stage.join("w").number == 1


def test_a_file_of_somebody_else_is_refused_at_once(file_stage: OpenStage, path: str) -> None:
    Path(path).write_text("precious")
    with pytest.raises(RendezvousError, match="was not written by farcall"):
        file_stage.meet("w")
    assert Path(path).read_text() == "precious"


# -- its life


def test_a_store_that_was_closed_is_not_looked_for_any_more(stage: OpenStage, background: ThreadPoolExecutor) -> None:
    host, member = stage.join("host"), stage.join("member")
    host.crash()
    newcomer = OpenStore(member.store._plan, "newcomer", None)
    entering = background.submit(newcomer.enter, 30)
    newcomer.close()
    with pytest.raises(RendezvousError, match="closed by this worker, 'newcomer'"):
        entering.result(10)
    member.store.close()
    assert not member.store.reconnect(1)
    with pytest.raises(RendezvousError, match="is gone and has not been found again yet"):
        member.store.set("k", b"v")


CLOSING = tuple(
    f"rendezvous/{name}.py" for name in ("client", "server", "hosted_store", "open_group_store", "presence_lock")
)


def test_a_store_that_is_closed_again_after_an_interrupt_anywhere_is_gone(file_stage: OpenStage, path: str) -> None:
    for point in itertools.count():
        store = file_stage.join("host").store
        with suppress(Interrupt), At(CLOSING, (point,)) as at:
            store.close()
        store.close()
        assert not store.hosts, at.places
        assert not os.path.exists(path), at.places
        assert [thread.name for thread in threading.enumerate() if "farcall store" in thread.name] == [], at.places
        if not at.has_acted:
            break
    assert point > 30


def test_the_file_stays_for_those_who_are_there_though_the_close_was_interrupted(
    file_stage: OpenStage, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, member = file_stage.join("host"), file_stage.join("member")
    assert host.store._client is not None
    with monkeypatch.context() as patch:
        patch.setattr(host.store._client, "_hang_up", interrupt)
        with pytest.raises(Interrupt):
            host.store.close()
    host.store.close()
    assert os.path.exists(path)
    assert member.ensure_store(gone=[host])


def test_it_is_a_store_like_others(stage: OpenStage) -> None:
    store = stage.meet("w").store
    store.set("k/1", b"v")
    assert store.set_new("k/2", b"w") == b"w"
    assert (store.get("k/1", 1), store.add("n", 2), dict(store.read("k/2"))) == (b"v", 2, {"k/2": b"w"})
    assert dict(store.collect("k/", 2, 1)) == {"k/1": b"v", "k/2": b"w"}
    assert store.delete("k/1")
    store.close()
    store.close()


def test_a_forked_child_lets_go_and_the_parent_goes_on(free_port: int) -> None:
    meeting = """
host, guest = rendezvous(url, "host", -1, None, 30), rendezvous(url, "guest", -1, None, 30)
join_open(host, "host", lambda number: b"", 5)
join_open(guest, "guest", lambda number: b"", 5)
assert any(".open" in one for one in held())
"""
    expect_a_forked_child_lets_go(free_port, meeting)
