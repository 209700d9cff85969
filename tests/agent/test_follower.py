"""One thread of the pool: what it is told reaches it, once. What it does then is tested in `test_serving*.py`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from time import monotonic

from eventually import PATIENCE
from farcall.agent.follower import EXIT, LEAD, Follower


def test_what_it_was_told_before_it_listens_is_heard_once() -> None:
    follower = Follower()
    follower.tell(LEAD)
    assert follower.listen(monotonic() + PATIENCE) is LEAD
    assert follower.listen(monotonic()) is None


def test_it_sleeps_until_it_is_told_something() -> None:
    follower = Follower()
    with ThreadPoolExecutor(1) as pool:
        heard = pool.submit(follower.listen, monotonic() + PATIENCE)
        follower.tell(EXIT)
        assert heard.result(PATIENCE) is EXIT


def test_a_new_one_runs_nothing_and_counts_for_nothing() -> None:
    follower = Follower()
    assert not follower.lead.is_running()
    assert (follower.counted, follower.depth) == (False, 0)
