"""The shortcut of a connection: a pair of rings in shared memory, through which small messages go while somebody looks.

Who calls a lot offers one to the worker that it calls, if the two share memory; there is no answer. It is used from the
moment on when the other side polls it, which is seen in the ring itself. Everything else goes on the channel, as it
does where there is no shortcut, at any moment (`transports.rings` says how the order is kept).

What the two ends count of the channel is what follows the greeting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from farcall.agent.lanes import Lane
from farcall.agent.reading import CHUNK, receive_large
from farcall.agent.sending import Sender
from farcall.errors import ProtocolError
from farcall.protocol.wire import RING, Bytes, Decoder, Message, encode_shared
from farcall.transports.base import Channel
from farcall.transports.rings import PAIR_SIZE, RING_SIZE, RingReader, RingWriter, is_possible

AFTER: Final = 256
"""Calls, remote calls, and values that are asked for: on a connection with less of them it is not worth its memory."""


def offer(lane: Lane, sender: Sender) -> tuple[RingReader, ...]:
    """Offers one, and has it used: where replies may come from now on. Nothing if there is to be none.

    Raises as `Sender.send`.
    """
    kept = lane.keep_rings(PAIR_SIZE) if is_possible() else None
    if kept is None:
        return ()
    place, memory = kept
    sender.ring = RingWriter(memory[:RING_SIZE], -lane.told)
    sender.send(encode_shared(RING, 0, b"", b"", [PAIR_SIZE], *place))
    return (RingReader(memory[RING_SIZE:]),)


def accept(buffers: Sequence[Bytes], sender: Sender, greeting: int, event: Any) -> RingReader:
    """Takes one that is offered: where calls may come from now on. `greeting`: what of `Sender.sent` the greeting was.

    Raises `ProtocolError` if it is none.
    """
    sizes = [len(buffer) for buffer in buffers]
    if sizes != [PAIR_SIZE] or sender.ring is not None:
        raise ProtocolError(f"rings in shared memory of {sizes} bytes were offered, where {PAIR_SIZE} may be, once")
    memory = memoryview(buffers[0])
    sender.ring = RingWriter(memory[RING_SIZE:], greeting)
    return RingReader(memory[:RING_SIZE], event)


def receive_beside(ring: RingReader, channel: Channel, decoder: Decoder) -> list[Message] | None:
    """What has come in the ring, or else on the channel. None if the other side has closed the connection.

    Raises as `receive_large`.
    """
    if decoder.space is not None:
        if ring.has_some():
            raise ProtocolError("something came in shared memory in the midst of a message")
        messages = receive_large(channel, decoder)
    else:
        data = ring.take()
        if data:
            return decoder.feed(data)
        try:
            data = channel.receive(CHUNK)
        except BlockingIOError:
            raise
        except OSError:
            data = ring.take()
            if not data:
                raise
            return decoder.feed(data)
        if ring.has_some():
            data = ring.take() + data  # it was sent before
        messages = decoder.feed(data) if data else None
    ring.had(decoder.received)
    return messages


def abandon(rings: Sequence[RingReader], sender: Sender) -> None:
    """In a forked child, for both ends that a connection has here: neither touches the parent's memory any more.

    The child may have been made by a signal handler, in the midst of reading or sending, which goes on in it as well.
    """
    for ring in rings:
        ring.abandon()
    writer, sender.ring = sender.ring, None
    if writer is not None:
        writer.abandon()
