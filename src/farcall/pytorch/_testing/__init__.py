"""The faulty agent under torch's names. Importing this package registers the backend `FAULTY_TENSORPIPE`."""

from farcall.pytorch._testing import faulty_agent, faulty_agent_backend_registry
from farcall.pytorch._testing.faulty_agent import FaultyTensorPipeAgent, FaultyTensorPipeRpcBackendOptions
from farcall.pytorch.installation import replace_if_installed


def is_available() -> bool:
    """Returns True: the faulty agent is always available."""
    return True


__all__ = [
    "FaultyTensorPipeAgent",
    "FaultyTensorPipeRpcBackendOptions",
    "faulty_agent_backend_registry",
    "is_available",
]

replace_if_installed("torch._C._distributed_rpc_testing", faulty_agent)
