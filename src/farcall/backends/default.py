"""farcall's own agent as a backend: `BackendType.FARCALL`, which also answers to torch's name, `TENSORPIPE`.

What runs the agent is imported when one is made: a process that only looks at the package's names does not need it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from farcall.backends.interface import RpcAgent
from farcall.errors import RendezvousTimeoutError
from farcall.options import RpcBackendOptions

if TYPE_CHECKING:
    from farcall.agent import Agent
    from farcall.rendezvous import Rendezvous
    from farcall.security import Credentials

NAME: Final = "FARCALL"
ALIAS: Final = "TENSORPIPE"


def construct_options(
    rpc_timeout: float, init_method: str, _transports: object = None, _channels: object = None, **chosen: Any
) -> RpcBackendOptions:
    """Its options. torch's transports and channels have no meaning here, and are passed over.

    Raises `UsageError` for values that cannot be, `BackendError`, a `TypeError`, for names that are none.
    """
    return RpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **chosen)


def init_agent(
    store: None, name: str, rank: int, world_size: int | None, rpc_backend_options: RpcBackendOptions
) -> RpcAgent:
    """A new agent, when all workers are there. Raises as `init_rpc`; then nothing is left running."""
    from farcall.agent import Agent

    return join_group(Agent, name, rank, world_size, rpc_backend_options)


def join_group(
    make_agent: Callable[..., Agent], name: str, rank: int, world_size: int | None, options: RpcBackendOptions
) -> Agent:
    """A new agent of that kind, in its group. `make_agent` takes what `Agent` does. Raises as `init_agent`."""
    from farcall.rendezvous import rendezvous

    return join_at(
        make_agent,
        name,
        options,
        lambda credentials: rendezvous(
            options.init_method, name, rank, world_size, options.init_timeout, options.interface, credentials
        ),
    )


def join_at(
    make_agent: Callable[..., Agent],
    name: str,
    options: RpcBackendOptions,
    meet: Callable[[Credentials], Rendezvous],
) -> Agent:
    """The same, with the others met in another way. Raises as `init_agent`."""
    from farcall.protocol.watching import check_heartbeat
    from farcall.rendezvous import PATIENCE
    from farcall.security import credentials_of
    from farcall.transports import TcpTransport, transport

    check_heartbeat(options.heartbeat_interval, options.heartbeat_patience)  # before anybody has met this worker
    credentials = credentials_of(options)
    transports = {scheme: transport(scheme) for scheme in options.transports}
    for each in transports.values():
        if isinstance(each, TcpTransport):
            each.encryption = credentials.encryption
    meeting = meet(credentials)
    try:
        return make_agent(name, meeting, options, transports, credentials)
    except BaseException as error:
        # If somebody did not come, the others that still wait for them shall hear who came and who did not, too.
        waited = isinstance(error, RendezvousTimeoutError)
        meeting.store.close(early=not waited, patience=PATIENCE if waited else 0.0)
        raise
