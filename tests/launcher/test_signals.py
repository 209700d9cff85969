from __future__ import annotations

import fcntl
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from farcall.launcher.signals import END_SIGNALS, FORWARDED_SIGNALS, KEYBOARD_SIGNALS, signals_as_bytes


@pytest.mark.parametrize("number", [*FORWARDED_SIGNALS, signal.SIGCHLD])
def test_a_signal_arrives_as_its_number(number: signal.Signals) -> None:
    with signals_as_bytes() as end:
        signal.raise_signal(number)
        assert os.read(end, 10) == bytes([number])


def test_afterwards_all_is_as_it_was_before() -> None:
    numbers = [*FORWARDED_SIGNALS, signal.SIGCHLD]
    before = [signal.getsignal(number) for number in numbers]
    with signals_as_bytes():
        assert [signal.getsignal(number) for number in numbers] != before
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_another_thread_leaves_no_pipe_behind(background: ThreadPoolExecutor) -> None:
    def use() -> None:
        with signals_as_bytes():
            pass

    background.submit(os.getpid).result(60)  # so that the thread exists
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ValueError, match="main thread"):
        background.submit(use).result(60)
    assert os.listdir("/proc/self/fd") == before


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_as_bytes() as end:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGUSR1)
            assert os.read(end, 10) == bytes([signal.SIGUSR1])
    finally:
        signal.signal(signal.SIGHUP, before)


def test_more_signals_than_the_pipe_holds_are_no_matter() -> None:
    with signals_as_bytes() as end:
        size = fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, 4096)
        for _ in range(size + 1):
            signal.raise_signal(signal.SIGUSR1)
        assert set(os.read(end, 1 << 20)) == {signal.SIGUSR1}


def test_the_kinds_of_signals_are_each_within_the_next() -> None:
    assert set(KEYBOARD_SIGNALS) < set(END_SIGNALS) < set(FORWARDED_SIGNALS)
