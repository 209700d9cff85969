"""The functions of the package where they need a process of their own: imports, signals, forks and more."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(30)


def run(script: str, *arguments: str) -> str:
    """Runs a script in a process of its own; what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments], capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_signal_handler_may_shut_down_while_a_shutdown_waits(free_port: int) -> None:
    script = """
    import signal, sys, threading, farcall as rpc
    def leave(*_):
        rpc.shutdown(graceful=False)
        print("left", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGALRM, leave)
    options = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{sys.argv[1]}")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    busy = threading.Event()
    rpc.rpc_async("alone", lambda: __import__("time").sleep(3)).then(lambda future: future.exception())
    rpc.rpc_sync("alone", int)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    rpc.shutdown()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(free_port)], capture_output=True, text=True, timeout=40
    )
    assert "left" in done.stdout


def test_a_signal_handler_may_shut_down_while_init_rpc_waits(free_port: int) -> None:
    """There is nothing to shut down yet; it must not wait for the one that it interrupts."""
    script = """
    import os, signal, socket, sys, threading, time, farcall as rpc
    import farcall.runtime.agent  # Python changes the type of what a handler raises in some places of an import
    def leave(*_):
        rpc.shutdown()
        print("left", flush=True)
        sys.exit(0)
    def interrupt_wait():
        while socket.socket().connect_ex(("127.0.0.1", int(sys.argv[1]))):  # until rank 0 hosts the store
            time.sleep(0.01)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGALRM)
    signal.signal(signal.SIGALRM, leave)
    threading.Thread(target=interrupt_wait, daemon=True).start()
    options = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{sys.argv[1]}")
    rpc.init_rpc("early", rank=0, world_size=2, rpc_backend_options=options)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(free_port)], capture_output=True, text=True, timeout=40
    )
    assert "left" in done.stdout
    assert done.returncode == 0, done.stderr


def test_importing_brings_nothing_heavy() -> None:
    """How long it takes is measured by the benchmark; here, that what would make it slow is not imported."""
    script = """
    import sys
    import farcall
    heavy = {"torch", "numpy", "asyncio", "cloudpickle", "rich", "farcall.rendezvous.server"}
    print(*sorted(heavy & set(sys.modules)))
    """
    assert run(script) == ""


def test_a_forked_child_gets_a_clear_error(free_port: int) -> None:
    script = """
    import os, sys, farcall as rpc
    options = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{sys.argv[1]}")
    rpc.init_rpc("parent", rank=0, world_size=1, rpc_backend_options=options)
    rpc.rpc_sync("parent", int)
    child = os.fork()
    if child == 0:
        try:
            rpc.rpc_sync("parent", int)
        except rpc.ForkedProcessError as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    print(rpc.rpc_sync("parent", int, args=(5,)))
    rpc.shutdown()
    """
    error, parent = run(script, str(free_port)).splitlines()
    assert "forked from worker 'parent'" in error
    assert "init_rpc" in error
    assert parent == "5"


def test_a_forked_child_has_no_references(free_port: int) -> None:
    """The tables are its parent's, and their lock may have been held by another thread at the fork."""
    script = """
    import os, sys, farcall as rpc
    options = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{sys.argv[1]}")
    rpc.init_rpc("parent", rank=0, world_size=1, rpc_backend_options=options)
    rref = rpc.remote("parent", list)
    rref.to_here()
    with rpc.api.current_agent().reference_store._lock:
        child = os.fork()
    if child == 0:
        for use in (
            lambda: rpc.RRef(5),
            rpc.references,
            rpc._rref_context_get_debug_info,
            rpc._delete_all_user_and_unforked_owner_rrefs,
            lambda: rpc._destroy_rref_context(True),
            rref.rpc_sync().copy,
        ):
            try:
                use()
            except rpc.ForkedProcessError:
                print("refused", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    print(rref.to_here(), len(rpc.references().owned))
    rpc.shutdown()
    """
    assert run(script, str(free_port)).splitlines() == 6 * ["refused"] + ["[] 1"]


def test_a_function_that_runs_for_others_may_fork_a_worker_of_its_own(free_port: int, tmp_path: Path) -> None:
    script = """
    import os, sys, farcall as rpc
    def start(name, url):
        rpc.init_rpc(name, rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions(init_method=url))
    def nested(): return rpc.rpc_sync("child", int, args=(7,))
    def fork():
        child = os.fork()
        if child == 0:
            # As in a thread of the user's: what the parent's pool knew of this thread is of no use here.
            start("child", sys.argv[2])
            result = rpc.rpc_sync("child", nested, timeout=5)
            rpc.shutdown()
            os._exit(result)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    start("parent", f"tcp://127.0.0.1:{sys.argv[1]}")
    print(rpc.rpc_sync("parent", fork, timeout=20))
    rpc.shutdown()
    """
    assert run(script, str(free_port), f"file://{tmp_path}/child") == "7"


def test_no_thread_for_a_worker_leaves_none(free_port: int) -> None:
    script = """
    import sys, threading, farcall as rpc
    options = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{sys.argv[1]}")
    real = threading.Thread.start
    def start(self):
        if self.name == "farcall-lonely-1":
            raise RuntimeError("can't start new thread")
        real(self)
    threading.Thread.start = start
    try:
        rpc.init_rpc("lonely", rank=0, world_size=1, rpc_backend_options=options)
    except RuntimeError as error:
        print(error)
    threading.Thread.start = real
    rpc.init_rpc("lonely", rank=0, world_size=1, rpc_backend_options=options)
    print(rpc.rpc_sync("lonely", int, args=(5,)))
    rpc.shutdown()
    """
    assert run(script, str(free_port)).splitlines() == ["can't start new thread", "5"]


def test_lambdas_and_functions_of_an_interactive_session(free_port: int) -> None:
    script = """
    import sys, farcall as rpc
    options = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{sys.argv[1]}")
    rpc.init_rpc("notebook", rank=0, world_size=1, rpc_backend_options=options)
    factor = 3
    def triple(x): return factor * x
    class Point:
        def __init__(self, x): self.x = x
    print(rpc.rpc_sync("notebook", triple, args=(2,)), rpc.rpc_sync("notebook", lambda x: x + factor, args=(2,)),
          rpc.rpc_sync("notebook", Point, args=(9,)).x)
    rpc.shutdown()
    """
    assert run(script, str(free_port)) == "6 5 9"
