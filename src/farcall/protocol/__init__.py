"""What workers tell each other, as pure code: bytes and events in, messages and effects out.

Nothing here uses a socket, a thread, a clock, pickle or a log.
"""

from farcall.protocol.ids import WorkerInfo

__all__ = ["WorkerInfo"]
