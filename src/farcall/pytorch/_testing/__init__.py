"""The faulty agent under torch's names: `FAULTY_TENSORPIPE` is registered when this is imported."""

from farcall.pytorch._testing import faulty_agent_backend_registry
from farcall.pytorch._testing.faulty_agent import FaultyTensorPipeAgent, FaultyTensorPipeRpcBackendOptions


def is_available() -> bool:
    """True."""
    return True


__all__ = [
    "FaultyTensorPipeAgent",
    "FaultyTensorPipeRpcBackendOptions",
    "faulty_agent_backend_registry",
    "is_available",
]
