"""From a URL to a shared store: env://, tcp://, file:// and torchrun, with all workers as threads of this process."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from fork_stage import expect_a_forked_child_lets_go

from farcall.errors import RendezvousError, RendezvousTimeoutError, UsageError
from farcall.rendezvous import Rendezvous, addresses, group_entry, hosted_store, join, rendezvous
from farcall.rendezvous import client as client_module
from farcall.rendezvous.location_file import Location, publish_location, read_location
from farcall.rendezvous.urls import candidate_ports
from farcall.transports.network import is_loopback
from interruption import At, Interrupt


class Workers:
    """Starts workers as threads and closes them all at once."""

    def __init__(self, pool: ThreadPoolExecutor, url: str, world_size: int) -> None:
        self.pool, self.url, self.world_size = pool, url, world_size

    def meet(self, rank: int, timeout: float = 30, interface: str | None = None) -> Rendezvous:
        return rendezvous(self.url, f"worker{rank}", rank, self.world_size, timeout, interface)

    def run(self, ranks: list[int], interface: str | None = None) -> list[Rendezvous]:
        """All meet, started in this order; everybody must see everybody."""

        def one(rank: int) -> Rendezvous:
            found = self.meet(rank, interface=interface)
            assert join(found, f"worker{rank}", b"%d" % rank, 30) == {n: b"%d" % n for n in range(self.world_size)}
            return found

        futures = [self.pool.submit(one, rank) for rank in ranks]
        return sorted((future.result(30) for future in futures), key=lambda found: found.rank)

    def close(self, found: list[Rendezvous]) -> None:
        list(self.pool.map(lambda one: one.store.close(), found))


@pytest.fixture
def workers(background: ThreadPoolExecutor, free_port: int) -> Workers:
    return Workers(background, f"tcp://127.0.0.1:{free_port}", 3)


@pytest.fixture
def file_workers(background: ThreadPoolExecutor, path: str) -> Iterator[Workers]:
    yield Workers(background, f"file://{path}", 3)
    assert os.listdir(os.path.dirname(path)) in ([], ["location"])  # no drafts


# -- tcp


@pytest.mark.parametrize("ranks", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_the_order_of_starting_does_not_matter(workers: Workers, ranks: list[int]) -> None:
    found = workers.run(ranks)
    assert [(one.rank, one.world_size, one.host) for one in found] == [(rank, 3, "127.0.0.1") for rank in range(3)]
    assert len({one.group for one in found}) == 1
    workers.close(found)


def test_rank_0_may_come_last(
    workers: Workers, background: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = threading.Semaphore(0)
    connect = addresses.connect

    def counted(*args: object) -> socket.socket:
        tried.release()
        return connect(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(client_module, "connect", counted)
    early = [background.submit(workers.meet, rank) for rank in (1, 2)]
    for _ in range(6):
        assert tried.acquire(timeout=10)
    found = [workers.meet(0), *(future.result(10) for future in early)]
    workers.close(found)


@pytest.mark.parametrize("host", ["[::1]", "127.0.0.2", "localhost"])
def test_other_ways_to_write_loopback(workers: Workers, host: str, free_port: int) -> None:
    workers.url = f"tcp://{host}:{free_port}"
    found = workers.run([1, 0, 2])
    assert len({one.host for one in found}) == 1
    assert is_loopback(found[0].host)
    if host != "localhost":
        assert found[0].host == host.strip("[]")
    workers.close(found)


def test_a_store_on_all_addresses_is_reached_at_one_that_others_can_use(
    workers: Workers, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosted_store, "reachable_addresses", lambda: ["127.0.0.5", "127.0.0.1"])
    workers.url, workers.world_size = f"tcp://0.0.0.0:{free_port}", 1
    found = workers.run([0])
    assert found[0].host == "127.0.0.5"
    workers.close(found)


def test_a_named_interface_is_where_to_listen(workers: Workers) -> None:
    found = workers.run([0, 1, 2], interface="127.0.0.9")
    assert {one.host for one in found} == {"127.0.0.9"}
    workers.close(found)


def test_an_interface_that_is_not_there_is_refused_before_anything_is_opened(workers: Workers) -> None:
    with pytest.raises(UsageError, match="nosuch0"):
        workers.meet(0, interface="nosuch0")


def test_the_same_port_serves_run_after_run(workers: Workers) -> None:
    groups = set()
    for _ in range(8):
        found = workers.run([1, 2, 0])
        groups.add(found[0].group)
        workers.close(found)
    assert len(groups) == 8


def test_a_quick_worker_waits_for_the_next_store_while_the_old_one_goes(
    workers: Workers, background: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = threading.Semaphore(0)
    first = workers.run([0, 1, 2])
    first[1].store.close()
    attempt = client_module.try_candidate

    def counted(*args: object) -> object:
        tried.release()
        return attempt(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(client_module, "try_candidate", counted)
    early = background.submit(workers.meet, 1)
    for _ in range(4):  # the old store is alive and well, and does not take it
        assert tried.acquire(timeout=10)
    assert not early.done()
    workers.close([first[2], first[0]])
    second = [workers.meet(0), early.result(10), workers.meet(2)]
    assert second[1].group == second[0].group != first[0].group
    workers.close(second)


def test_stragglers_of_an_earlier_and_larger_run_do_no_harm(
    workers: Workers, background: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "REFUSAL_RETRY_S", 0.1)
    earlier = Workers(background, workers.url, 5)
    begun = earlier.meet(0)
    begun.store.close()
    knocking = threading.Event()
    attempt = client_module.try_candidate

    def noted(*args: object) -> object:
        if args[2] == 4:
            knocking.set()
        return attempt(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(client_module, "try_candidate", noted)
    straggler = background.submit(earlier.meet, 4)
    assert knocking.wait(10)
    found = workers.run([0, 1, 2])
    with pytest.raises(
        RendezvousError,
        match=r"serves the group .*3 workers', not .*5 workers'; start all workers with the same world_size",
    ):
        straggler.result(10)
    workers.close(found)


def test_a_second_worker_of_a_rank_is_refused_and_both_are_named(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "REFUSAL_RETRY_S", 0.05)
    found = [workers.meet(0), workers.meet(1)]
    with pytest.raises(RendezvousError, match=r"'worker1' \(rank 1\); start 'twin' with a rank of its own"):
        rendezvous(workers.url, "twin", 1, 3, 30)
    workers.close(found)


def test_a_second_rank_0_finds_the_port_taken(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "BIND_TIMEOUT_S", 0.0)
    found = workers.meet(0)
    with pytest.raises(RendezvousError, match="is taken by another process"):
        workers.meet(0)
    found.store.close()


def test_without_rank_0_the_others_give_up_in_time(workers: Workers) -> None:
    with pytest.raises(
        RendezvousTimeoutError, match=r"found no store at tcp://127.0.0.1:\d+ in 0.\d+ s: rank 0, which"
    ):
        workers.meet(1, timeout=0.05)


def test_rank_0_that_is_refused_by_its_own_store_closes_it(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **_: object) -> None:
        raise RendezvousError("no")

    with monkeypatch.context() as patch:
        patch.setattr(group_entry, "find_store", refuse)
        with pytest.raises(RendezvousError, match="no"):
            workers.meet(0)
    workers.world_size = 1
    workers.close(workers.run([0]))


def test_a_store_that_goes_between_hello_and_the_first_request_is_an_error(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(self: object, key: str, value: bytes) -> bytes:
        raise RendezvousError("gone")

    monkeypatch.setattr(client_module.StoreClient, "set_new", gone)
    with pytest.raises(RendezvousError, match="gone"):
        workers.meet(0)


def test_a_forked_child_lets_go_and_the_parent_goes_on(free_port: int) -> None:
    meeting = 'host, guest = rendezvous(url, "host", 0, 2, 30), rendezvous(url, "guest", 1, 2, 30)'
    expect_a_forked_child_lets_go(free_port, meeting)


# -- env


def test_env_takes_its_place_from_the_environment(
    workers: Workers, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port))
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    found = rendezvous("env://", "worker0", -1, None, 30)
    assert (found.rank, found.world_size, found.host) == (0, 1, "127.0.0.1")
    found.store.close()


def test_under_torchrun_others_may_have_the_first_ports(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, occupied: Callable[..., socket.socket]
) -> None:
    master_port = occupied().getsockname()[1]
    for run_id in map(str, range(100)):  # a run whose first candidate is free for us to take
        first = candidate_ports(master_port, run_id, "0")[0]
        try:
            occupied(first)
            break
        except OSError:
            continue
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(master_port))
    workers.url = "env://"
    found = workers.run([2, 1, 0])
    peer = found[1].store._sock.getpeername()[1]  # type: ignore[attr-defined]
    assert peer in candidate_ports(master_port, run_id, "0")[1:]
    workers.close(found)


# -- file


@pytest.mark.parametrize("ranks", [[0, 1, 2], [2, 1, 0]])
def test_a_file_leads_to_the_store_and_goes_with_it(file_workers: Workers, path: str, ranks: list[int]) -> None:
    found = file_workers.run(ranks, interface="127.0.0.1")
    assert read_location(path) is not None
    assert {one.host for one in found} == {"127.0.0.1"}
    file_workers.close(found)
    assert os.listdir(os.path.dirname(path)) == []


def test_a_file_serves_run_after_run(file_workers: Workers) -> None:
    for _ in range(5):
        file_workers.close(file_workers.run([1, 0, 2], interface="127.0.0.1"))


def test_the_file_names_the_addresses_that_others_can_use_first(
    file_workers: Workers, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosted_store, "reachable_addresses", lambda: ["127.0.0.5", "127.0.0.1"])
    found = file_workers.run([0, 1, 2])
    location = read_location(path)
    assert location is not None
    assert location.addresses == ("127.0.0.5", "127.0.0.1")
    assert {one.host for one in found} == {"127.0.0.5"}
    file_workers.close(found)


def test_a_stale_file_is_replaced_and_read_again(
    file_workers: Workers, background: ThreadPoolExecutor, path: str, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_location(path, Location("earlier", free_port, ("127.0.0.1",)), lambda earlier: False, 1)
    tried = threading.Event()
    attempt = client_module.try_candidate

    def noted(*args: object) -> object:
        tried.set()
        return attempt(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(client_module, "try_candidate", noted)
    early = [background.submit(file_workers.meet, rank, 30, "127.0.0.1") for rank in (1, 2)]
    assert tried.wait(10)
    found = [file_workers.meet(0, interface="127.0.0.1"), *(future.result(10) for future in early)]
    file_workers.close(found)
    assert not os.path.exists(path)


def test_a_stale_file_whose_port_has_another_store_is_replaced(
    file_workers: Workers, background: ThreadPoolExecutor, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "REFUSAL_RETRY_S", 0.0)
    other = Workers(background, f"file://{tmp_path / 'location'}", 1)
    stranger = other.meet(0, interface="127.0.0.1")
    location = read_location(path)
    assert location is not None
    stale = Location("earlier", location.port, location.addresses)
    publish_location(path, stale, lambda earlier: False, 1)
    early = background.submit(file_workers.meet, 1)
    found = [file_workers.meet(0, interface="127.0.0.1"), early.result(10)]
    stranger.store.close()
    assert read_location(path) is not None  # the stranger has not removed what was no longer its own
    file_workers.close(found)


def test_a_second_rank_0_leaves_the_file_alone(file_workers: Workers, path: str) -> None:
    found = file_workers.run([0, 1, 2], interface="127.0.0.1")
    before = read_location(path)
    with pytest.raises(RendezvousError, match="another process already hosts a store for the file"):
        file_workers.meet(0, interface="127.0.0.1")
    assert read_location(path) == before
    file_workers.close(found)


def test_without_rank_0_the_file_is_named(file_workers: Workers, path: str) -> None:
    with pytest.raises(
        RendezvousTimeoutError, match=f"at the file {path} in 0.05 s: .*there was nothing to connect to"
    ):
        file_workers.meet(1, timeout=0.05)


# -- Ctrl-C


def test_a_store_that_is_closed_again_after_an_interrupt_anywhere_is_gone(path: str) -> None:
    files = tuple(f"rendezvous/{name}.py" for name in ("client", "server", "hosted_store"))
    for point in itertools.count():
        store = rendezvous(f"file://{path}", "alone", 0, 1, 30, "127.0.0.1").store
        with suppress(Interrupt), At(files, (point,)) as at:
            store.close()
        store.close(timeout=0.0)
        assert not os.path.exists(path), at.places
        assert [thread.name for thread in threading.enumerate() if "farcall store" in thread.name] == [], at.places
        if not at.has_acted:
            break
    assert point > 10
