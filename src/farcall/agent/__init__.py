"""Who runs it: all threads but those of the store. `Agent` puts it all together; each other module does one thing."""

from farcall.agent.agent import Agent
from farcall.agent.book import ReferenceBook
from farcall.agent.inventory import Inventory

__all__ = ["Agent", "Inventory", "ReferenceBook"]
