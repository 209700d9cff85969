"""Ctrl-C while farcall's code runs: deferred, raised once, and never lost."""

from __future__ import annotations

import signal
from types import FrameType

import pytest

from farcall.runtime import interrupts


@pytest.fixture(autouse=True)
def schedule(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns what happened: signals are noted here, and not sent."""
    happened: list[str] = []
    monkeypatch.setattr(interrupts, "_schedule", lambda at, function: happened.append("scheduled"))
    monkeypatch.setattr(signal, "pthread_kill", lambda thread, number: happened.append("sent"))
    return happened


def inside(monkeypatch: pytest.MonkeyPatch, is_inside: bool) -> None:
    def answer(frame: FrameType | None) -> bool:
        return is_inside

    monkeypatch.setattr(interrupts, "_is_inside", answer)


def test_an_interrupt_inside_is_deferred_and_sent_again(monkeypatch: pytest.MonkeyPatch, schedule: list[str]) -> None:
    inside(monkeypatch, True)
    interrupts.handle(signal.SIGINT, None)
    interrupts.send_again()
    assert schedule == ["scheduled", "sent"]
    inside(monkeypatch, False)
    with pytest.raises(KeyboardInterrupt):
        interrupts.handle(signal.SIGINT, None)
    interrupts.raise_deferred()  # it was raised, and is not raised twice


def test_a_signal_that_was_sent_again_too_late_is_not_a_second_interrupt(
    monkeypatch: pytest.MonkeyPatch, schedule: list[str]
) -> None:
    inside(monkeypatch, True)
    interrupts.handle(signal.SIGINT, None)
    interrupts.send_again()
    with pytest.raises(KeyboardInterrupt):
        interrupts.raise_deferred()
    inside(monkeypatch, False)
    interrupts.handle(signal.SIGINT, None)  # the one that was sent again
    with pytest.raises(KeyboardInterrupt):
        interrupts.handle(signal.SIGINT, None)  # the user's next


def test_nothing_is_sent_again_when_nothing_is_deferred(schedule: list[str]) -> None:
    interrupts.send_again()
    assert schedule == []
