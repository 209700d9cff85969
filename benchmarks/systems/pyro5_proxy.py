"""Pyro5 used the way its documentation shows: an exposed object in a daemon, and a proxy for it.

Its serializer is `marshal`, which carries bytes as they are; the default one writes them as text.
"""

from __future__ import annotations

import threading
from types import MappingProxyType
from typing import Any, Final

from farcall.bench import payloads
from farcall.bench.system import FETCHED, IN_FLIGHT, SHARED, Address, EchoCaller, Server, System

_NAME: Final = "bench.echo"
_SERIALIZER: Final = "marshal"


class _Pyro5Server:
    def __init__(self, port: int) -> None:
        import Pyro5.api

        Pyro5.api.config.SERIALIZER = _SERIALIZER

        @Pyro5.api.expose  # type: ignore[untyped-decorator,unused-ignore]
        class Echo:
            def noop(self) -> None:
                """The callee."""

            def echo(self, payload: bytes) -> bytes:
                return payload

        self._daemon: Any = Pyro5.api.Daemon(host="127.0.0.1", port=port)
        self._daemon.register(Echo(), _NAME)
        self._thread = threading.Thread(target=self._daemon.requestLoop, name="pyro5-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._daemon.shutdown()
        self._thread.join(5.0)


class _Pyro5Caller:
    def __init__(self, port: int) -> None:
        import Pyro5.api

        Pyro5.api.config.SERIALIZER = _SERIALIZER
        self._proxy: Any = Pyro5.api.Proxy(f"PYRO:{_NAME}@127.0.0.1:{port}")
        self._proxy.noop()

    def noop(self) -> None:
        self._proxy.noop()

    def payload(self, size: int) -> Any:
        return payloads.plain(size)

    def echo(self, payload: Any) -> Any:
        return self._proxy.echo(payload)

    def in_flight(self, calls: int, window: int) -> None:
        raise NotImplementedError("a proxy of Pyro5 has one call under way at a time")

    def pipelined(self, calls: int) -> None:
        raise NotImplementedError("a proxy of Pyro5 has one call under way at a time")

    def close(self) -> None:
        self._proxy._pyroRelease()


class Pyro5(System):
    """Pyro5 between two processes of one host."""

    name = "pyro5"
    label = "Pyro5"
    package = "Pyro5"
    pipelines = False
    usage = "a proxy, serializer `marshal`; bytes"
    cannot = MappingProxyType(
        {
            IN_FLIGHT: "a proxy of Pyro5 has one call under way at a time",
            FETCHED: "Pyro5 has proxies for registered objects, no references to results",
            SHARED: "Pyro5 has proxies for registered objects, no references to results",
        }
    )

    def serve(self, address: Address) -> Server:
        return _Pyro5Server(address.port)

    def connect(self, address: Address) -> EchoCaller:
        return _Pyro5Caller(address.port)
