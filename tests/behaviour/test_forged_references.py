"""A member of the group that names references by their ids, which can be guessed, gets nothing and breaks nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from tampering import Tampering, ids_of_fork, ids_of_reference

import farcall
from eventually import eventually
from farcall import ReferenceRefusedError, RpcBackendOptions
from farcall.testing import LocalGroup

OWNER, HOLDER, THIEF = 0, 1, 2
SECRET = "the value that the thief wants"


@farcall.exposed
def make() -> list[str]:
    return [SECRET]


@farcall.exposed
def make_for_the_thief() -> list[str]:
    return ["the thief's own"]


@farcall.exposed
def keep(reference: Any) -> None:
    kept.append(reference)


@farcall.exposed
def fetch(reference: Any) -> Any:
    return reference.to_here()


@farcall.exposed
def nothing() -> None:
    pass


kept: list[Any] = []


@pytest.fixture
def tampering(monkeypatch: pytest.MonkeyPatch) -> Tampering:
    return Tampering(monkeypatch)


@pytest.fixture(params=[None, []], ids=["anything allowed", "allow=[]"])
def group(request: pytest.FixtureRequest, tampering: Tampering) -> Iterator[LocalGroup]:
    # Without shared memory: else small messages may go through it, and are not tampered with.
    with LocalGroup(3, RpcBackendOptions(allow=request.param, shared_memory=0)) as group:
        yield group
        kept.clear()


class Theft:
    """The thief's own reference, and the holder's, which it will be altered into."""

    def __init__(self, group: LocalGroup, tampering: Tampering) -> None:
        self.group = group
        self.tampering = tampering
        self.wanted = group.remote(HOLDER, "worker0", make)
        self.own = group.remote(THIEF, "worker0", make_for_the_thief)
        assert (self.wanted.to_here(), self.own.to_here()) == ([SECRET], ["the thief's own"])
        self.to_wanted = ids_of_reference(OWNER, THIEF, 1), ids_of_reference(OWNER, HOLDER, 1)

    def refused(self) -> int:
        metrics: Any = self.group.agents[OWNER].get_metrics()
        assert metrics["references_refused"] == sum(peer["references_refused"] for peer in metrics["peers"].values())
        refused: int = metrics["peers"]["worker2"]["references_refused"]
        return refused

    def check(self) -> None:
        """Something was altered, and everybody has what they had."""
        assert self.tampering.times, "nothing was altered: is the layout of a reference another one?"
        assert self.wanted.to_here() == [SECRET]
        assert self.own.to_here() == ["the thief's own"]
        assert sorted(owned.holders for owned in self.group.references(OWNER).owned) == [("worker1",), ("worker2",)]


@pytest.fixture
def theft(group: LocalGroup, tampering: Tampering) -> Theft:
    return Theft(group, tampering)


def test_a_value_cannot_be_fetched_by_its_ids(theft: Theft) -> None:
    with theft.tampering.replacing(theft.to_wanted):
        for _ in range(3):
            with pytest.raises(
                ReferenceRefusedError, match=r"'worker0' has no reference 1:1 .* does not have its token"
            ):
                theft.own.to_here()
        with pytest.raises(ReferenceRefusedError):
            theft.own._get_type()
    assert theft.refused() == 4
    theft.check()


@pytest.mark.parametrize("way", ["rpc_sync", "remote"])
def test_a_method_cannot_be_called_by_the_ids_of_its_value(theft: Theft, way: str) -> None:
    clear = theft.own.rpc_sync().clear if way == "rpc_sync" else lambda: theft.own.remote().clear().to_here()
    with theft.tampering.replacing(theft.to_wanted), pytest.raises(ReferenceRefusedError):
        clear()
    assert theft.refused() >= 1
    assert theft.tampering.times
    assert theft.wanted.to_here() == [SECRET]


def test_a_reference_that_is_passed_on_by_its_ids_leads_nowhere(theft: Theft) -> None:
    """At the owner, and at a third worker."""
    thief = theft.group.agents[THIEF]
    for to in ("worker0", "worker1"):
        with theft.tampering.replacing(theft.to_wanted), pytest.raises(ReferenceRefusedError):
            thief.call(to, fetch, (theft.own,), None, 0).wait()
    assert theft.refused() >= 1
    eventually(lambda: len(theft.group.references(OWNER).owned) == 2)
    theft.check()


def test_who_keeps_what_was_passed_on_by_its_ids_is_refused_by_its_owner(theft: Theft) -> None:
    with theft.tampering.replacing(theft.to_wanted):
        theft.group.agents[THIEF].call("worker1", keep, (theft.own,), None, 0).wait()
        eventually(lambda: theft.group.agents[OWNER].get_metrics()["references_refused"])
    with pytest.raises(ReferenceRefusedError):
        kept[0].to_here()
    assert "worker1" in str(theft.group.agents[OWNER].get_metrics()["peers"])
    theft.check()


def test_the_reference_of_another_cannot_be_given_up(theft: Theft) -> None:
    """Nor is the connection closed on which somebody tries: the other calls on it go on."""
    second = theft.group.remote(THIEF, "worker0", make)
    assert second.to_here() == [SECRET]
    altered = ids_of_reference(OWNER, THIEF, 2), ids_of_reference(OWNER, HOLDER, 1)
    forks = [(ids_of_fork(THIEF, number), ids_of_fork(HOLDER, 1)) for number in (2,)]
    with theft.tampering.replacing(altered, *forks):
        del second
        eventually(lambda: theft.refused())
    assert theft.tampering.times >= 2
    assert theft.group.agents[THIEF].call("worker0", nothing, None, None, 0).wait() is None
    assert theft.wanted.to_here() == [SECRET]
    owned = theft.group.references(OWNER).owned
    assert sorted(each.holders for each in owned) == [("worker1",), ("worker2",), ("worker2",)], "one of them for ever"


def test_the_fork_of_another_cannot_be_settled(tampering: Tampering) -> None:
    """The holder passes one reference to a friend, another to the thief, who says that the friend's is settled."""
    with LocalGroup(4, RpcBackendOptions(shared_memory=0)) as group:
        wanted, other = group.remote(HOLDER, "worker0", make), group.remote(HOLDER, "worker0", make)
        assert wanted.to_here() == other.to_here()
        group.agents[HOLDER].call("worker3", keep, (wanted,), None, 0).wait()
        group.agents[HOLDER].call("worker2", keep, (other,), None, 0).wait()
        friends, _ = kept
        kept.clear()
        with tampering.replacing((ids_of_fork(HOLDER, 4), ids_of_fork(HOLDER, 3))):
            del wanted
            eventually(lambda: tampering.times)
        assert friends.to_here() == [SECRET]
        assert len(group.references(OWNER).owned) >= 1
        del friends


def test_what_is_refused_is_logged_once_for_each_worker(theft: Theft, caplog: pytest.LogCaptureFixture) -> None:
    with theft.tampering.replacing(theft.to_wanted):
        for _ in range(20):
            with pytest.raises(ReferenceRefusedError):
                theft.own.to_here()
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1, caplog.text
    assert "'worker0' refused what worker 'worker2' said or asked about a reference" in told[0].getMessage()
    assert theft.refused() == 20
    theft.check()


def test_what_is_claimed_before_it_is_created_is_refused_when_it_is(theft: Theft) -> None:
    """The thief names what the holder will create next, waits for it, and gets nothing."""
    next_one = ids_of_reference(OWNER, THIEF, 1), ids_of_reference(OWNER, HOLDER, 2)
    with theft.tampering.replacing(next_one):
        waiting = theft.own._get_future()
        eventually(lambda: theft.tampering.times)
        assert not waiting.done()
    created = theft.group.remote(HOLDER, "worker0", make)
    with pytest.raises(ReferenceRefusedError):
        waiting.wait()
    assert created.to_here() == [SECRET]
    del created
    eventually(lambda: len(theft.group.references(OWNER).owned) == 2)
    theft.check()


def test_no_token_is_shown_anywhere(theft: Theft, caplog: pytest.LogCaptureFixture) -> None:
    texts = [str(theft.wanted), repr(theft.wanted), repr(theft.wanted.rpc_sync()), str(theft.group.references(OWNER))]
    assert repr(theft.wanted) == "<RRef 1:1 owned by 'worker0'>"
    with theft.tampering.replacing(theft.to_wanted), pytest.raises(ReferenceRefusedError) as refused:
        theft.own.to_here()
    for text in [*texts, caplog.text, str(refused.value), str(theft.group.agents[OWNER].get_metrics())]:
        assert "\\x" not in text
        assert "b'" not in text


def test_honest_workers_use_what_they_were_given_before_the_owner_has_heard_of_it(group: LocalGroup) -> None:
    for _ in range(50):
        reference = group.remote(HOLDER, "worker0", make)
        assert group.agents[HOLDER].call("worker2", fetch, (reference,), None, 0).wait() == [SECRET]
        mine = group.rref(HOLDER, [SECRET])
        assert group.agents[HOLDER].call("worker2", fetch, (mine,), None, 0).wait() == [SECRET]
    assert all(agent.get_metrics()["references_refused"] == 0 for agent in group.agents)
