"""`RemoteModule`: a torch module that lives on another worker."""

from farcall.pytorch.nn.remote_module import RemoteModule

__all__ = ["RemoteModule"]
