"""The thread of a faulty agent: what it does at which time, and that nothing of it is left."""

from __future__ import annotations

import logging
import threading
from time import monotonic

import pytest

from farcall.testing import Faults, faulty_relay
from farcall.testing.faulty_relay import Relay
from gates import SOON


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "farcall-faults"]


def test_functions_are_called_in_the_order_of_their_times(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    relay = faults.relay
    called: list[str] = []
    done = threading.Event()
    now = monotonic()
    with relay.lock, monkeypatch.context() as patch:
        patch.setattr(faulty_relay, "monotonic", lambda: now)  # all are set at one time, on a slow machine too
        relay.call_later(0.02, done.set)
        relay.call_later(0.01, lambda: called.append("second"))
        relay.call_later(0.0, lambda: called.append("first"))
        relay.call_later(0.01, lambda: called.append("third"))
    assert done.wait(SOON)
    assert called == ["first", "second", "third"]


def test_a_function_that_fails_does_not_end_the_thread(faults: Faults, caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    faults.relay.call_later(0.0, lambda: 1 // 0)  # type: ignore[arg-type,return-value]
    with caplog.at_level(logging.ERROR):
        faults.relay.call_later(0.01, done.set)
        assert done.wait(SOON)
    assert "the relay of a faulty agent failed, and goes on" in caplog.text


class EndlessLink:
    """A link that never gets rid of its frames."""

    is_disconnected = False

    def finish(self) -> None: ...

    def disconnect(self) -> None:
        self.is_disconnected = True


def test_closing_drops_what_was_to_be_called_and_waits_for_links_only_so_long(
    faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faulty_relay, "CLOSE_TIMEOUT_S", 0.2)
    relay, link = faults.relay, EndlessLink()
    called: list[int] = []
    with relay.lock:
        assert relay.add(link)  # type: ignore[arg-type]
    relay.call_later(0.05, lambda: called.append(1))
    assert threads()
    relay.close()
    assert link.is_disconnected
    relay.close()
    relay.call_later(0.0, lambda: called.append(2))
    assert relay.is_closing
    assert not threads()
    assert not called


def test_a_relay_without_links_has_no_thread() -> None:
    relay = Relay()
    assert not threads()
    relay.close()
