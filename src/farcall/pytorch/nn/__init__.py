"""`RemoteModule`: a module of torch's that lives on another worker, used as if it were here."""

from farcall.pytorch.nn.remote_module import RemoteModule

__all__ = ["RemoteModule"]
