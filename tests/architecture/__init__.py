"""Checks of the source tree itself: who imports whom, which words are used, and what may only shrink."""
