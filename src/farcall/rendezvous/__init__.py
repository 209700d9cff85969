"""How workers find each other: a store that they share, found through a URL.

`rendezvous` finds the store (and hosts it at rank 0), `join` waits for everybody. Nothing here is on the path of a
call, and nothing is unpickled.
"""

from __future__ import annotations

from farcall.rendezvous.joining import join
from farcall.rendezvous.meeting import Rendezvous, rendezvous
from farcall.rendezvous.store import PATIENCE, Store

__all__ = ["PATIENCE", "Rendezvous", "Store", "join", "rendezvous"]
