"""What is said: pure. No socket, no thread, no clock; bytes and events in, messages and effects out."""

from farcall.protocol.ids import WorkerInfo

__all__ = ["WorkerInfo"]
