"""Very many references: in one call, left over at the end, and their memory when they are gone."""

from __future__ import annotations

import _thread
import gc
import logging
import sys
import tracemalloc
from functools import partial
from typing import Any

import pytest

from eventually import eventually
from farcall import RRef
from farcall.errors import SerializationError
from farcall.testing import LocalGroup

pytestmark = pytest.mark.timeout(300)


def count(references: list[Any]) -> int:
    return len(references)


def test_a_call_with_very_many_references_leaves_the_threads_that_serve_to_others() -> None:
    """What follows from them is done by one thread, and not by each that could serve, one waiting for the other."""
    many = 30_000
    with LocalGroup(3) as group:
        own = [group.rref(0, number) for number in range(many)]
        assert group.agents[0].call("worker1", count, (own,), None, 0).wait() == many
        eventually(lambda: not group.references(1).held)
        theirs: list[RRef[Any]] = [group.remote(0, "worker1", list) for _ in range(many // 3)]
        assert group.agents[0].call("worker2", count, (theirs,), None, 0).wait() == many // 3
        own.clear()
        theirs.clear()
        eventually(lambda: not any(group.references(rank).held or group.references(rank).owned for rank in range(3)))
        assert max(agent.get_metrics()["threads"] for agent in group.agents) <= 10


def test_the_memory_of_very_many_references_is_given_back_when_they_are_gone() -> None:
    def memory() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    def make_and_drop(group: LocalGroup, number: int) -> None:
        references = [group.remote(0, "worker1", int) for _ in range(number)]
        references += [group.rref(0, each) for each in range(number)]
        assert references[number - 1].to_here() == 0
        references.clear()
        eventually(lambda: not any(group.references(rank).held or group.references(rank).owned for rank in (0, 1)))

    tracemalloc.start()
    try:
        with LocalGroup(2) as group:
            make_and_drop(group, 500)
            before = memory()
            make_and_drop(group, 15_000)
            eventually(lambda: memory() - before < 700_000)  # acknowledgements may still be under way
    finally:
        tracemalloc.stop()


def leave(group: LocalGroup, number: int) -> list[Any]:
    return [group.remote(0, "worker1", list) for _ in range(number)]


def leave_some_elsewhere(group: LocalGroup) -> list[Any]:
    kept: list[Any] = []
    for line in range(15):  # each from a place of its own
        source = "\n" * line + "kept.append(group.remote(0, 'worker1', list))"
        exec(compile(source, "elsewhere.py", "exec"), {"kept": kept, "group": group})
    return kept


def test_a_report_of_very_many_references_that_are_left_is_short(caplog: pytest.LogCaptureFixture) -> None:
    with LocalGroup(2) as group, caplog.at_level(logging.WARNING):
        left = leave(group, 3000) + leave_some_elsewhere(group)
        group.shutdown()
    (report,) = [message for message in caplog.messages if "'worker0' shuts down with references left" in message]
    lines = report.splitlines()
    assert lines[0].endswith("it owns 0, holds 3015")
    assert __file__ in lines[1]
    assert "3000 held, made at" in lines[1]
    assert len(lines) == 13
    assert "6 more, made at 6 other places" in lines[-2]
    assert "farcall.references()" in lines[-1]
    assert len(caplog.text) < 5000
    del left


def test_the_drop_of_a_reference_is_not_lost_when_ctrl_c_comes_in_its_finalizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # where Ctrl-C in a finalizer ends
    with LocalGroup(2) as group:
        for _ in range(20):
            references: list[RRef[Any]] = [group.remote(0, "worker1", list)]
            assert references[0].to_here() == []
            # Without a step of the interpreter in between, so that it finds the signal inside of the finalizer, if any.
            steps = [partial(_thread.interrupt_main), partial(references.clear)]
            try:
                list(map(partial.__call__, steps))
            except KeyboardInterrupt:
                pass
        eventually(lambda: not group.references(1).owned)
        assert not group.references(0).held


def test_a_call_with_too_many_references_is_refused_with_advice_that_helps() -> None:
    """No option lets more through, so none is to be advised."""
    with LocalGroup(2) as group:
        references = [group.rref(0, None) for _ in range(96_000)]
        with pytest.raises(
            SerializationError, match=r"96000 references cannot be sent; at most 65535.*in parts"
        ) as found:
            group.agents[0].call("worker1", count, (references,), None, 0).wait()
        assert "limit" not in str(found.value)
        half = references[:48_000]
        assert group.agents[0].call("worker1", count, (half,), None, 0).wait() == 48_000
