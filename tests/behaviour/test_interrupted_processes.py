"""Ctrl-C in a worker process: every wait ends with KeyboardInterrupt, and the worker can call afterwards."""

from __future__ import annotations

import signal

import pytest

from worker_processes import StartWorkers

pytestmark = pytest.mark.timeout(60)

WAITS = {
    "rpc_sync": "rpc.rpc_sync('w1', hang, args=(number,))",
    "rpc_sync without a timeout": "rpc.rpc_sync('w1', hang, args=(number,), timeout=0)",
    "wait": "rpc.rpc_async('w1', hang, args=(number,)).wait()",
    "result": "rpc.rpc_async('w1', hang, args=(number,)).result(30)",
    "then": "rpc.rpc_async('w1', hang, args=(number,)).then(lambda done: done.value()).wait()",
    "collect_all": "rpc.collect_all([rpc.rpc_async('w1', hang, args=(number,))]).wait()",
    "wait_all": "rpc.wait_all([rpc.rpc_async('w1', hang, args=(number,))])",
    "to_here": "rpc.remote('w1', hang, args=(number,)).to_here()",
    "to_here here": "rpc.remote('w0', hang, args=(number,)).to_here()",
    "method": "rpc.remote('w1', hang, args=(number,)).rpc_sync().bit_length()",
    "behind another thread that waits": "behind_another_thread(number)",
    "a future made by hand": "wait_by_hand(number)",
}


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_ctrl_c_ends_every_wait_and_leaves_a_worker_that_can_call(workers: StartWorkers, transport: str) -> None:
    """The signal is sent when the function runs. After each, calls in every direction work."""
    waits = ", ".join(f"lambda number: {wait}" for wait in WAITS.values())
    script = f"""
    def hang(number):
        rpc.rpc_sync("w0", tell, args=(number,))
        assert wait_for(lambda: os.path.exists(f"go{{number}}"), 30)
        return number
    def tell(number): report(hangs=number)
    def behind_another_thread(number):
        reader = threading.Thread(target=lambda: rpc.rpc_sync("w1", wait_for_file, args=(f"go{{number}}",)))
        reader.start()
        others.append(reader)
        rpc.rpc_sync("w1", hang, args=(number,))
    def wait_for_file(name): return wait_for(lambda: os.path.exists(name), 30)
    def wait_by_hand(number):
        rpc.rpc_async("w1", hang, args=(number,))
        rpc.Future().wait()
    def call_back(n): return rpc.rpc_sync("w0", int, args=(n,))
    others = []
    start(transports=({transport!r},))
    if RANK == 0:
        rpc.rpc_sync("w1", int)
        for number, wait in enumerate([{waits}]):
            try:
                wait(number)
                report(**{{f"outcome{{number}}": "it ended"}})
            except KeyboardInterrupt:
                report(**{{f"outcome{{number}}": "KeyboardInterrupt"}})
            report(**{{f"after{{number}}": [
                [rpc.rpc_sync("w1", int, args=(n,)) for n in range(20)] == list(range(20)),
                rpc.rpc_sync("w1", call_back, args=(7,)),
                rpc.rpc_async("w1", int, args=(7,)).then(lambda done: done.value() + 1).wait(),
                rpc.remote("w1", int, args=(9,)).to_here()]}})
            open(f"go{{number}}", "w").close()
        for thread in others:
            thread.join()
    rpc.shutdown()
    """
    group = workers(script, limit=50)
    for number in range(len(WAITS)):
        group.wait_until(0, "hangs", number)
        group.send_signal(0, signal.SIGINT)
        group.wait_for(0, f"after{number}")
    facts = group.finish()[0]
    outcomes = {way: facts[f"outcome{number}"] for number, way in enumerate(WAITS)}
    assert outcomes == dict.fromkeys(WAITS, "KeyboardInterrupt")
    after = [facts[f"after{number}"] for number in range(len(WAITS))]
    assert after == [[True, 7, 8, 9]] * len(WAITS)


def test_ctrl_c_in_a_graceful_shutdown_frees_the_worker(workers: StartWorkers) -> None:
    """The worker is closed, and becomes a worker again at another place. The other worker is told that it has left."""
    script = """
    start(heartbeat_patience=600)
    if RANK == 0:
        rpc.rpc_sync("w1", int)
        threading.Thread(target=report_shutdown).start()
        try:
            rpc.shutdown()
        except KeyboardInterrupt:
            report(shutdown="KeyboardInterrupt", after=outcome(rpc.rpc_sync, "w1", int)["error"],
                   threads=[one.name for one in threading.enumerate() if one.name.startswith("farcall")],
                   sockets=[name for name in os.listdir("/proc/self/fd") if is_socket(name)])
        rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=options(init_method=f"file://{os.getcwd()}/again"))
        report(again=rpc.rpc_sync("w0", int, args=(5,)))
        rpc.shutdown()
    else:
        assert wait_for(lambda: "error" in outcome(rpc.rpc_sync, "w0", int), 30)
        report(other=outcome(rpc.rpc_sync, "w0", int)["error"])
        rpc.shutdown(graceful=False)
    """
    helpers = """
    def is_socket(name):
        try:
            return os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except OSError:
            return False
    def is_in_shutdown():
        frame = sys._current_frames()[threading.main_thread().ident]
        while frame is not None and frame.f_code.co_name != "shutdown":
            frame = frame.f_back
        return frame is not None
    def report_shutdown():
        assert wait_for(is_in_shutdown, 30)
        report(leaves=True)
    """
    group = workers(helpers + script)
    group.wait_for(0, "leaves")
    group.send_signal(0, signal.SIGINT)
    caller, other = group.finish(quiet=False)
    assert (caller["shutdown"], caller["after"]) == ("KeyboardInterrupt", "NotInitializedError")
    assert caller["threads"] == []
    assert caller["sockets"] == []
    assert caller["again"] == 5
    assert other["other"] == "WorkerLostError"


def test_ctrl_c_at_any_moment_of_many_calls_leaves_a_worker_that_can_call_and_no_reference(
    workers: StartWorkers,
) -> None:
    script = """
    import random, signal
    def interrupt(seconds):
        time.sleep(seconds)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    start(heartbeat_patience=600)
    if RANK == 0:
        rpc.rpc_sync("w1", int)
        random.seed(1)
        interrupted, wrong = 0, []
        for n in range(80):
            timer = threading.Thread(target=interrupt, args=(random.uniform(0, 1e-3),))
            try:
                timer.start()
                while True:
                    rpc.rpc_sync("w1", int, args=(n,))
                    rpc.remote("w1", int, args=(n,)).to_here()
            except KeyboardInterrupt:
                interrupted += 1
            timer.join()
            after = outcome(rpc.rpc_sync, "w1", int, args=(n,), timeout=20)
            if after.get("result") != n:
                wrong.append(after)
                break
        report(interrupted=interrupted, wrong=wrong, failed=rpc.get_metrics()["calls_failed"])
        report(left=wait_for(lambda: not rpc.references().held, 20))
    rpc.shutdown()
    """
    facts = workers(script, limit=50).finish()[0]
    assert facts.pop("failed") <= 80, "only the calls that were interrupted, and so cancelled"
    assert facts == {"interrupted": 80, "wrong": [], "left": True}


def test_handlers_that_raise_at_any_moment_of_many_calls_leave_a_worker_that_can_call(workers: StartWorkers) -> None:
    """Unlike Ctrl-C, what a program's own handler raises cannot be put off. It costs the connection, and no more."""
    script = """
    import gc, random, signal
    class Interrupt(KeyboardInterrupt): pass
    def interrupt(*_): raise Interrupt
    start(heartbeat_patience=600)
    if RANK == 0:
        rpc.rpc_sync("w1", int)
        signal.signal(signal.SIGALRM, interrupt)
        random.seed(1)
        interrupted, wrong = 0, []
        for n in range(3_000):
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(20e-6, 300e-6))
                try:
                    for _ in range(30):
                        rpc.rpc_sync("w1", int, args=(n,))
                        rpc.remote("w1", int, args=(n,)).to_here()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt:
                interrupted += 1
            except rpc.WorkerLostError:
                pass  # the connection was closed in the middle of a reply
            signal.setitimer(signal.ITIMER_REAL, 0)
            after = outcome(rpc.rpc_sync, "w1", int, args=(n,), timeout=20)
            if after.get("result") != n:
                wrong.append(after)
                break
            if interrupted == 300:
                break
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        gc.collect()  # the tracebacks of the interrupts
        report(interrupted=interrupted, wrong=wrong, dropped=wait_for(lambda: not rpc.references().held, 20))
        open("done", "w").close()
    assert wait_for(lambda: os.path.exists("done"), 40)
    rpc.shutdown(timeout=20)  # gracefully: no call and no message about references is left
    """
    facts = workers(script, limit=50).finish(quiet=False)[0]
    assert facts["wrong"] == []
    assert facts["interrupted"] > 100
    assert facts["dropped"]


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_signal_handler_may_make_calls_while_its_thread_waits(workers: StartWorkers, transport: str) -> None:
    script = f"""
    import signal
    def hang(): return wait_for(lambda: os.path.exists("go"), 30)
    def handle(*_):
        futures.append(rpc.rpc_async("w1", int, args=(5,)))
        report(handled=rpc.rpc_sync("w1", int, args=(6,)))
    futures = []
    start(transports=({transport!r},))
    if RANK == 0:
        rpc.rpc_sync("w1", int)
        signal.signal(signal.SIGUSR1, handle)
        report(ready=True)
        report(waited=rpc.rpc_sync("w1", hang))
        report(future=futures[0].wait())
    rpc.shutdown()
    """
    group = workers(script)
    group.wait_for(0, "ready")
    group.send_signal(0, signal.SIGUSR1)
    assert group.wait_for(0, "handled") == 6
    (group.directory / "go").touch()
    facts = group.finish()[0]
    assert (facts["waited"], facts["future"]) == (True, 5)
