"""Everybody brings something and gets what the others brought; or is told who is missing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from rendezvous_stage import GROUP, Stage

from eventually import eventually
from farcall.errors import AuthenticationError, PeerRefusedError, RendezvousError, RendezvousTimeoutError
from farcall.rendezvous import Rendezvous, join
from farcall.rendezvous import server as server_module
from farcall.rendezvous.client import Candidate, StoreClient, try_candidate
from farcall.security import Credentials, Secret


def arrive(stage: Stage, rank: int, name: str | None = None, world_size: int = 4) -> Rendezvous:
    return Rendezvous(stage.client(rank, name), rank, world_size, "127.0.0.1", GROUP)


def test_everybody_gets_what_all_brought(stage: Stage, background: ThreadPoolExecutor) -> None:
    joining = [
        background.submit(join, arrive(stage, rank), f"worker{rank}", bytes([rank]), 30) for rank in (3, 1, 0, 2)
    ]
    for future in joining:
        result = future.result(10)
        assert result == {0: b"\0", 1: b"\1", 2: b"\2", 3: b"\3"}
        assert list(result) == [0, 1, 2, 3]


def test_a_timeout_says_who_came_and_who_did_not(stage: Stage, background: ThreadPoolExecutor) -> None:
    joining = [background.submit(join, arrive(stage, rank), f"worker{rank}", b"", 0.5) for rank in (2, 0)]
    for future in joining:
        with pytest.raises(RendezvousTimeoutError) as caught:
            future.result(10)
        text = "only 2 of 4 workers joined in 0.5 s: worker0 (rank 0), worker2 (rank 2); missing: ranks 1, 3"
        assert str(caught.value) == text
        assert caught.value.present == ("join/0", "join/2")


def test_a_timeout_at_the_host_says_who_was_refused_meanwhile(stage: Stage) -> None:
    place = Candidate("127.0.0.1", stage.server.port, GROUP)
    wrong = Credentials(Secret("quite another secret"))
    for _ in range(2):
        with pytest.raises(AuthenticationError):
            try_candidate(place, "worker1", 1, 10, wrong)
    host = StoreClient(*try_candidate(place, "worker0", 0, 10, stage.credentials), hosted=stage.server)
    stage.clients.append(host)
    meeting = Rendezvous(host, 0, 4, "127.0.0.1", GROUP)
    with pytest.raises(RendezvousTimeoutError) as caught:
        join(meeting, "worker0", b"", 0.01)
    assert str(caught.value).startswith(
        "only 1 of 4 workers joined in 0.01 s: worker0 (rank 0); missing: ranks 1, 2, 3. Meanwhile the store refused "
        "2 connections from 127.0.0.1: it says that its name is 'worker1', but it does not know the secret of this "
        "group (this worker"
    )


def test_refusals_are_counted_in_bounds(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stage.server.refusals() == ""
    monkeypatch.setattr(server_module, "_MAX_REFUSAL_KINDS", 1)
    stage.client(1)
    with pytest.raises(PeerRefusedError, match="rank 1 is taken"):
        stage.hello(1, "other")
    with pytest.raises(AuthenticationError):
        try_candidate(Candidate("127.0.0.1", stage.server.port, GROUP), "w", 2, 10, Credentials(Secret("x" * 20)))
    assert stage.server.refusals().startswith("1 connection from 127.0.0.1: ")
    assert "rank 1 is taken" in stage.server.refusals()
    assert "secret" not in stage.server.refusals()


def test_a_single_missing_rank_is_said_in_the_singular(stages: Callable[..., Stage]) -> None:
    with pytest.raises(
        RendezvousTimeoutError, match=r"1 of 2 workers joined in 0.01 s: worker0 \(rank 0\); missing: rank 1$"
    ):
        join(arrive(stages(world_size=2), 0, world_size=2), "worker0", b"", 0.01)


def test_a_store_that_goes_after_the_timeout_leaves_the_timeout(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(self: object, prefix: str) -> dict[str, bytes]:
        raise RendezvousError("gone")

    monkeypatch.setattr(StoreClient, "read", gone)
    with pytest.raises(RendezvousTimeoutError, match="1 of 4 keys"):
        join(arrive(stage, 0), "worker0", b"", 0.01)


def test_two_workers_of_one_name_are_an_error_for_everybody(stage: Stage, background: ThreadPoolExecutor) -> None:
    # The names of the store's own greeting differ here, as with a store that does not look at names.
    joining = [
        background.submit(join, arrive(stage, rank), name, b"", 30) for rank, name in enumerate(["a", "b", "c", "b"])
    ]
    for future in joining:
        with pytest.raises(RendezvousError, match="the worker name 'b' is not unique: rank 1 and rank 3"):
            future.result(10)


def test_those_who_wait_hear_of_a_name_that_was_refused(stage: Stage, background: ThreadPoolExecutor) -> None:
    joining = [background.submit(join, arrive(stage, rank), f"worker{rank}", b"", 30) for rank in (0, 1)]
    eventually(lambda: len(stage.server._state._collects.get("join/", ())) == 2)
    with pytest.raises(ConnectionError):
        stage.hello(2, "worker1")
    late = background.submit(join, arrive(stage, 3), "worker3", b"", 30)
    for future in [*joining, late]:
        with pytest.raises(RendezvousError, match="the worker name 'worker1' is not unique: rank 1 and rank 2"):
            future.result(10)


def test_a_worker_that_is_lost_meanwhile_is_named(stage: Stage, background: ThreadPoolExecutor) -> None:
    lost = arrive(stage, 2)
    lost.store.set("join/2", b"")
    joining = background.submit(join, arrive(stage, 0), "worker0", b"", 30)
    eventually(lambda: stage.server._state._collects)
    stage.clients[0]._end("as if its process had been killed")
    with pytest.raises(RendezvousError, match=r"'worker2' \(rank 2\) disconnected without leaving the group"):
        joining.result(10)


def test_what_no_worker_brought_is_refused(stage: Stage) -> None:
    here = arrive(stage, 0)
    here.store.set("join/1", b"\xc1")
    with pytest.raises(RendezvousError, match="that is not from a worker"):
        join(Rendezvous(here.store, 0, 2, "127.0.0.1", GROUP), "worker0", b"", 10)
