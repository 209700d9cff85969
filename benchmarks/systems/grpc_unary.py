"""gRPC for Python: a generic handler of unary calls with bytes, and pickle around them for arrays.

Without protocol buffers, which would be one more copy. Its limit of 4 MiB for a message is taken away by its own
option.
"""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, Final

from farcall.bench import payloads
from farcall.bench.system import (
    FETCHED,
    SHARED,
    START_LIMIT_S,
    Address,
    EchoCaller,
    FutureCalls,
    Server,
    System,
)

_SERVICE: Final = "bench.Echo"
_NO_LIMITS: Final = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
_THREADS: Final = 10
"""Of the server, as in gRPC's own examples."""


def _dump(value: Any) -> bytes:
    return pickle.dumps(value, 5)


class _GrpcServer:
    def __init__(self, port: int) -> None:
        import grpc

        handlers = {
            "noop": grpc.unary_unary_rpc_method_handler(lambda request, context: b""),
            "echo": grpc.unary_unary_rpc_method_handler(
                lambda request, context: request, request_deserializer=pickle.loads, response_serializer=_dump
            ),
        }
        self._server: Any = grpc.server(ThreadPoolExecutor(_THREADS), options=_NO_LIMITS)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
        if self._server.add_insecure_port(f"127.0.0.1:{port}") != port:
            raise RuntimeError(f"gRPC cannot listen at port {port}")
        self._server.start()

    def close(self) -> None:
        self._server.stop(grace=1.0).wait(5.0)


class _GrpcCaller(FutureCalls):
    def __init__(self, port: int) -> None:
        import grpc

        self._channel: Any = grpc.insecure_channel(f"127.0.0.1:{port}", options=_NO_LIMITS)
        grpc.channel_ready_future(self._channel).result(START_LIMIT_S)
        self._noop: Any = self._channel.unary_unary(f"/{_SERVICE}/noop")
        self._echo: Any = self._channel.unary_unary(
            f"/{_SERVICE}/echo", request_serializer=_dump, response_deserializer=pickle.loads
        )

    def noop(self) -> None:
        self._noop(b"")

    def payload(self, size: int) -> Any:
        return payloads.array(size)

    def echo(self, payload: Any) -> Any:
        return self._echo(payload)

    def start(self) -> Any:
        return self._noop.future(b"")

    def finish(self, future: Any) -> None:
        future.result()

    def close(self) -> None:
        self._channel.close()


class Grpc(System):
    """gRPC between two processes of one host."""

    name = "grpc"
    label = "gRPC"
    package = "grpc"
    distribution = "grpcio"
    usage = "a generic unary handler, futures; pickled arrays"
    cannot = MappingProxyType(dict.fromkeys((FETCHED, SHARED), "gRPC has no references"))

    def serve(self, address: Address) -> Server:
        return _GrpcServer(address.port)

    def connect(self, address: Address) -> EchoCaller:
        return _GrpcCaller(address.port)
