"""The raw copy: bytes there and back between a thread that serves and the caller."""

from __future__ import annotations

import pytest

from farcall.bench import endpoint
from farcall.bench.processes import free_port
from farcall.bench.system import Address, EchoCaller, ReferenceCaller, StreamingCaller
from systems import COPY, find


def test_what_is_sent_comes_back_whatever_its_size(tmp_path: object) -> None:
    address = Address(free_port(), f"{tmp_path}/s")
    server = COPY.serve(address)
    caller = COPY.connect(address)
    try:
        assert isinstance(caller, EchoCaller)
        assert not isinstance(caller, (StreamingCaller, ReferenceCaller))
        caller.noop()
        for size in (1, 100_000, 3 << 20, 100_000):
            payload = caller.payload(size)
            back = caller.echo(payload)
            assert back == payload
            assert back is not payload
        times = endpoint.echoes(caller, size=1 << 16, calls=3, warmup=1, seconds=10.0)
        assert 0 < times["p50_us"] <= times["p99_us"]
        with pytest.raises(NotImplementedError):
            caller.in_flight(1, 1)
    finally:
        caller.close()
        server.close()


def test_it_is_found_by_its_name() -> None:
    assert find("raw-copy-tcp") is COPY
    assert (COPY.family, COPY.threads, COPY.pipelines) == ("raw", False, False)
