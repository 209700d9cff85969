"""RPyC used the way its documentation shows: a service, a threaded server, `async_` for many calls at once.

Over a Unix socket it does not pipeline here: its sender does not read while it sends, so both ends block once the
replies to some hundred calls fill the socket's buffer. TCP's larger buffers take all of them, so TCP speaks for it.
"""

from __future__ import annotations

import threading
import time
from types import MappingProxyType
from typing import Any

from farcall.bench import payloads
from farcall.bench.reference_uses import check, number
from farcall.bench.system import SHARED, START_LIMIT_S, Address, Caller, FutureCalls, Server, System


class Thing:
    """What a reference is to."""

    def exposed_number(self) -> int:
        """The one use of it."""
        return number()


class _RpycServer:
    def __init__(self, **where: object) -> None:
        import rpyc
        from rpyc.utils.server import ThreadedServer

        class NoopService(rpyc.Service):  # type: ignore[misc]  # rpyc has no types
            def exposed_noop(self) -> None:
                """The callee."""

            def exposed_echo(self, payload: bytes) -> bytes:
                return payload

            def exposed_make(self) -> Thing:
                return Thing()

        self._server: Any = ThreadedServer(NoopService, **where)
        self._thread = threading.Thread(target=self._server.start, name="rpyc-server", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + START_LIMIT_S
        while not self._server.active:  # set once it listens
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise RuntimeError("the RPyC server did not begin to listen")
            time.sleep(0.01)

    def close(self) -> None:
        self._server.close()
        self._thread.join(5.0)


class _RpycCaller(FutureCalls):
    def __init__(self, connection: Any) -> None:
        import rpyc

        self._connection = connection
        # Fetched once: `root.noop` by itself is a round trip.
        self._noop: Any = connection.root.noop
        self._noop_async: Any = rpyc.async_(self._noop)
        self._echo: Any = connection.root.echo
        self._make: Any = connection.root.make

    def noop(self) -> None:
        self._noop()

    def payload(self, size: int) -> Any:
        return payloads.plain(size)  # an array would go by reference

    def echo(self, payload: Any) -> Any:
        return self._echo(payload)

    def start(self) -> Any:
        return self._noop_async()

    def finish(self, future: Any) -> None:
        future.wait()

    def remote_to_here(self) -> None:
        check(self._make().number())

    def close(self) -> None:
        self._connection.close()


class Rpyc(System):
    """RPyC between two processes of one host: over one kind of socket, or TCP, as its documentation has it."""

    package = "rpyc"
    cannot = MappingProxyType({SHARED: "a reference of RPyC cannot be passed on to a third process"})
    usage = "a service, `async_`; bytes, as arrays go by reference; it compresses what is large, by default"

    def __init__(self, kind: str | None = None) -> None:
        self._unix = kind == "unix"
        self.name = f"rpyc-{kind}" if kind else "rpyc"
        self.label = f"RPyC, {kind}" if kind else "RPyC"
        self.pipelines = not self._unix

    def serve(self, address: Address) -> Server:
        if self._unix:
            return _RpycServer(socket_path=address.socket_path)
        return _RpycServer(hostname="127.0.0.1", port=address.port)

    def connect(self, address: Address) -> Caller:
        from rpyc.utils import factory

        if self._unix:
            return _RpycCaller(factory.unix_connect(address.socket_path))
        # Its limit for a reply is 30 seconds; how long a point may take is the bench's to say.
        options = {"sync_request_timeout": None}
        return _RpycCaller(factory.connect("127.0.0.1", address.port, config=options))
