"""Hosting a store where a URL says, for a fixed and for an open group."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from farcall.errors import RendezvousError
from farcall.rendezvous.client import StoreClient, try_candidate
from farcall.rendezvous.hosted_store import HostedStore, host_fixed, host_open, store_candidates
from farcall.rendezvous.location_file import HostedElsewhereError, read_location
from farcall.rendezvous.urls import FilePlace, Plan, TcpPlace


def tcp(port: int, world_size: int | None = None) -> Plan:
    return Plan(0, world_size, TcpPlace("127.0.0.1", (port,), f"127.0.0.1:{port}"))


def ask(hosted: HostedStore, key: str) -> dict[str, bytes]:
    sock, welcome = try_candidate(hosted.reached_at[0], "w", -1, 10)
    client = StoreClient(sock, welcome)
    try:
        return dict(client.read(key))
    finally:
        client.close()


@pytest.mark.parametrize(("world_size", "end"), [(None, "open"), (4, "4 workers")])
def test_the_size_is_part_of_the_group(world_size: int | None, end: str) -> None:
    candidates, only_one = store_candidates(tcp(1, world_size))
    assert only_one
    assert candidates()[0].group == f"127.0.0.1:1, {end}"


def test_an_open_store_begins_with_what_it_is_given(free_port: int) -> None:
    hosted = host_open(tcp(free_port), "h", None, free_port, {"k": b"v"}, 1)
    assert [(found.host, found.port) for found in hosted.reached_at] == [("127.0.0.1", free_port)]
    assert ask(hosted, "k") == {"k": b"v"}
    assert hosted.server.linger == 0  # its end is not the end of the group
    hosted.close()


def test_a_port_that_is_taken_is_not_waited_for(free_port: int) -> None:
    hosted = host_fixed(tcp(free_port, 4), "h", None, 1)
    with pytest.raises(OSError, match="in use"):
        host_open(tcp(free_port), "h", None, free_port, {}, 1)
    hosted.close()


def test_a_file_leads_to_one_store_and_may_outlive_it(tmp_path: Path) -> None:
    path = str(tmp_path / "location")
    plan = Plan(-1, None, FilePlace(path))
    candidates, only_one = store_candidates(plan)
    assert (list(candidates()), only_one) == ([], False)
    first = host_open(plan, "h", "127.0.0.1", 0, {"k": b"1"}, 1)
    assert candidates() == first.reached_at
    for other in (plan, Plan(0, 4, FilePlace(path))):
        with pytest.raises(HostedElsewhereError):
            host_open(other, "h", "127.0.0.1", 0, {}, 1)
    first.close(keep_file=True)
    assert read_location(path) == first.location
    second = host_open(plan, "h", "127.0.0.1", 0, {"k": b"2"}, 1)
    first.close()  # the file is not its own any more
    assert candidates() == second.reached_at
    assert ask(second, "k") == {"k": b"2"}
    second.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("size", [None, 2])
def test_who_cannot_host_a_fixed_group_at_a_file_gets_an_error_that_is_public(tmp_path: Path, size: int | None) -> None:
    place = FilePlace(str(tmp_path / "location"))
    there = host_open(Plan(0, size, place), "h", "127.0.0.1", 0, {}, 1)
    with pytest.raises(
        RendezvousError, match=r"another worker with rank 0, or an open group\. .* no world_size$"
    ) as error:
        host_fixed(Plan(0, 2, place), "h", "127.0.0.1", 1)
    assert type(error.value) is RendezvousError
    there.close()


def test_a_file_that_cannot_be_used_leaves_no_store_behind(tmp_path: Path) -> None:
    with pytest.raises(RendezvousError, match="cannot be written"):
        host_open(Plan(-1, None, FilePlace(str(tmp_path / "no" / "file"))), "h", "127.0.0.1", 0, {}, 1)
