"""Calls between real processes: what must hold over real sockets, with real threads, and with large data."""

from __future__ import annotations

import pytest

from worker_processes import StartWorkers

pytestmark = pytest.mark.timeout(60)

both_transports = pytest.mark.parametrize("transports", [("unix",), ("tcp",)], ids="".join)


@both_transports
def test_callees_of_every_kind(workers: StartWorkers, transports: tuple[str, ...]) -> None:
    script = """
    import asyncio, functools, operator

    class Counter:
        def __init__(self, total=0): self.total = total
        def plus(self, n): return self.total + n
        @staticmethod
        def double(n): return 2 * n
        @classmethod
        def named(cls, n): return cls.__name__, n
        @staticmethod
        @rpc.functions.async_execution
        def later(n): return rpc.rpc_async("w0", operator.add, args=(n, 1)).then(lambda f: f.value() * 10)
        @classmethod
        @rpc.functions.async_execution
        def later_of_class(cls, n): return cls.later(n).then(lambda f: (cls.__name__, f.value()))

    async def add_async(a, b):
        await asyncio.sleep(0.001)
        return a + b + await rpc.rpc_async("w0", int, args=("100",))

    def where(): return rpc.get_worker_info().name

    start()
    if RANK == 0:
        base = 5
        report(answers=[
            rpc.rpc_sync("w1", where), rpc.rpc_sync(1, where), rpc.rpc_sync(rpc.get_worker_info("w1"), where),
            rpc.rpc_sync("w0", where),
            rpc.rpc_sync("w1", Counter, args=(3,)).total,
            rpc.rpc_sync("w1", Counter(3).plus, args=(4,)),
            rpc.rpc_sync("w1", Counter.double, args=(4,)),
            rpc.rpc_sync("w1", Counter.named, kwargs={"n": 4}),
            rpc.rpc_sync("w1", lambda x: x + base, args=(1,)),
            rpc.rpc_sync("w1", functools.partial(pow, 2), args=(5,)),
            rpc.rpc_sync("w1", functools.partial(lambda a, b: a - b, 9), args=(5,)),
            rpc.rpc_sync("w1", "a-b".split, args=("-",)),
            rpc.rpc_sync("w1", dict, kwargs={"a": 1}),
            rpc.rpc_sync("w1", add_async, args=(1, 2)),
            rpc.rpc_sync("w1", Counter.later, args=(1,)),
            rpc.rpc_sync("w1", Counter.later_of_class, args=(1,)),
        ])
    rpc.shutdown()
    """
    answers = workers(script, transports=transports).finish()[0]["answers"]
    assert answers == [
        *("w1", "w1", "w1", "w0", 3, 7, 8, ["Counter", 4], 6, 32, 4, ["a", "b"], {"a": 1}, 103, 20),
        ["Counter", 20],
    ]


def test_functions_see_the_globals_of_the_worker_that_runs_them(workers: StartWorkers) -> None:
    script = """
    state = {"rank": RANK}
    def read(): return state["rank"]
    start()
    report(ranks=[rpc.rpc_sync(to, read) for to in range(SIZE)])
    rpc.shutdown()
    """
    assert [facts["ranks"] for facts in workers(script, n=3).finish()] == [[0, 1, 2]] * 3


def test_a_function_may_call_on_as_soon_as_it_can_be_called(workers: StartWorkers) -> None:
    script = """
    import farcall.api
    def call_on(): return rpc.rpc_sync("w0", int)
    if RANK == 1:
        make = farcall.api.init_backend
        def make_slowly(*arguments, **more):
            agent = make(*arguments, **more)
            time.sleep(0.5)  # as if another process had got the core just now
            return agent
        farcall.api.init_backend = make_slowly
    start()
    if RANK == 0:
        report(**outcome(rpc.rpc_sync, "w1", call_on))
    rpc.shutdown()
    """
    facts = workers(script).finish()[0]
    assert facts.get("result") == 0, facts


@both_transports
def test_nested_a_hundred_deep_with_one_thread(workers: StartWorkers, transports: tuple[str, ...]) -> None:
    script = """
    def bounce(depth):
        return 0 if depth == 0 else 1 + rpc.rpc_sync((RANK + 1) % SIZE, bounce, args=(depth - 1,))
    start(num_worker_threads=1)
    time.sleep(0.2)
    if RANK == 0:
        report(depth=bounce(100), again=bounce(100))
    rpc.shutdown()
    """
    facts = workers(script, transports=transports).finish()[0]
    assert facts == {"depth": 100, "again": 100}


@both_transports
def test_sleeping_functions_do_not_delay_others(workers: StartWorkers, transports: tuple[str, ...]) -> None:
    script = """
    start()
    if RANK == 0:
        sleeping = [rpc.rpc_async("w1", time.sleep, args=(2,)) for _ in range(10)]
        delays = []
        while not any(future.done() for future in sleeping) and len(delays) < 300:
            delays.append(outcome(rpc.rpc_sync, "w1", int)["seconds"])
        report(longest=max(delays), median=sorted(delays)[len(delays) // 2], count=len(delays))
    rpc.shutdown()
    """
    facts = workers(script, transports=transports).finish()[0]
    assert facts["count"] == 300
    assert facts["longest"] < 0.5
    assert facts["median"] < 0.02


def test_exceptions_arrive_and_end_no_worker(workers: StartWorkers) -> None:
    script = """
    import traceback
    class Odd(Exception):
        def __init__(self, code, *, why):
            super().__init__(why)
            self.code = code
    def odd():
        try:
            [][1]
        except IndexError as error:
            failure = Odd(5, why="schräg 日本語")
            failure.add_note("a note")
            raise failure from error
    def leave(kind): raise kind("leave")
    def hidden():
        class Hidden(Exception): pass
        raise Hidden("nobody else knows it")

    start()
    if RANK == 0:
        try:
            rpc.rpc_sync("w1", odd)
        except Odd as error:
            report(code=error.code, args=error.args, cause=repr(error.__cause__), note=error.__notes__[0],
                   shown="".join(traceback.format_exception(error)))
        report(left=[outcome(rpc.rpc_sync, "w1", leave, args=(kind,))["error"]
                     for kind in (SystemExit, KeyboardInterrupt, GeneratorExit)])
        report(hidden=outcome(rpc.rpc_sync, "w1", hidden))
        report(exit=outcome(rpc.rpc_sync, "w1", sys.exit, args=(3,)), alive=rpc.rpc_sync("w1", int))
    rpc.shutdown()
    """
    facts = workers(script).finish()[0]
    assert (facts["code"], facts["args"], facts["note"]) == (5, ["schräg 日本語"], "a note")
    assert facts["cause"] == "IndexError('list index out of range')"
    assert "worker 'w1'" in facts["shown"]
    assert "in odd" in facts["shown"]
    assert facts["left"] == ["SystemExit", "KeyboardInterrupt", "GeneratorExit"]
    assert "nobody else knows it" in facts["hidden"]["text"]
    assert facts["exit"]["error"] == "SystemExit"
    assert facts["alive"] == 0


def test_timeouts_end_on_time_whatever_the_callee_does(workers: StartWorkers) -> None:
    script = """
    import ctypes
    def hold_the_interpreter(seconds):
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        return "late"
    start()
    if RANK == 0:
        rpc.rpc_sync("w1", int)
        report(sleeps=outcome(rpc.rpc_sync, "w1", time.sleep, args=(1,), timeout=0.3))
        report(holds=outcome(rpc.rpc_sync, "w1", hold_the_interpreter, args=(1,), timeout=0.3))
        report(queued=outcome(rpc.rpc_async("w1", int, timeout=0.3).wait))
        began = time.monotonic()
        future = rpc.rpc_async("w1", time.sleep, args=(2,), timeout=0.3)
        report(unread=wait_for(future.done), unread_seconds=time.monotonic() - began, error=repr(future.exception()))
        report(after=[rpc.rpc_sync("w1", int, args=(n,)) for n in range(20)])
    rpc.shutdown()
    """
    facts = workers(script).finish()[0]
    for which in ("sleeps", "holds", "queued"):
        assert facts[which]["error"] == "RpcTimeoutError"
        assert 0.29 <= facts[which]["seconds"] < 0.8
        assert "'w1'" in facts[which]["text"]
    assert facts["unread"]
    assert 0.29 <= facts["unread_seconds"] < 0.8
    assert "RpcTimeoutError" in facts["error"]
    assert facts["after"] == list(range(20))


def test_a_first_call_to_a_worker_that_is_busy_ends_on_time_and_is_no_loss(workers: StartWorkers) -> None:
    script = """
    import ctypes
    def hold_the_interpreter(seconds):
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    start()
    if RANK == 0:
        report(holding=True)
        rpc.rpc_sync("w2", hold_the_interpreter, args=(2,))
    elif RANK == 1:
        time.sleep(0.7)
        report(first=outcome(rpc.rpc_sync, "w2", int, timeout=0.5))
    rpc.shutdown()
    """
    first = workers(script, n=3).finish()[1]["first"]
    assert 0.4 < first["seconds"] < 1
    assert first["error"] == "RpcTimeoutError"


@both_transports
def test_large_arrays_both_ways_at_once(workers: StartWorkers, transports: tuple[str, ...]) -> None:
    script = """
    import numpy
    def turn_round(array):
        return array[::-1].copy()
    start()
    size = 8 << 20  # 64 MiB
    array = numpy.arange(size, dtype=numpy.float64) + RANK
    futures = [rpc.rpc_async((RANK + 1) % SIZE, turn_round, args=(array,)) for _ in range(3)]
    array[:] = -1  # the call has taken what it needs
    report(first=[float(future.wait()[0]) for future in futures],
           sums=[float(future.wait().sum()) for future in futures])
    rpc.shutdown()
    """
    size = 8 << 20
    for rank, facts in enumerate(workers(script, transports=transports, limit=50).finish()):
        assert facts["first"] == [size - 1 + rank] * 3
        assert facts["sums"] == [size * (size - 1) / 2 + rank * size] * 3


@both_transports
def test_many_large_arrays_at_once_through_one_thread(workers: StartWorkers, transports: tuple[str, ...]) -> None:
    script = """
    import numpy
    def pass_on(array, hops):
        return array if hops == 0 else rpc.rpc_sync((RANK + 1) % SIZE, pass_on, args=(array, hops - 1))
    start(num_worker_threads=1)
    futures = [rpc.rpc_async((RANK + 1) % SIZE, pass_on, args=(numpy.full(1 << 20, RANK * 100 + n), 2))
               for n in range(8)]
    results = [future.wait() for future in futures]
    right = [len(result) == 1 << 20 and bool((result == RANK * 100 + n).all()) for n, result in enumerate(results)]
    report(right=right, writable=all(result.flags.writeable for result in results))
    rpc.shutdown()
    """
    for facts in workers(script, transports=transports, limit=50).finish():
        assert facts == {"right": [True] * 8, "writable": True}


def test_a_large_result_nobody_reads_holds_up_nobody(workers: StartWorkers) -> None:
    script = """
    def large(): return bytes(64 << 20)
    start()
    if RANK == 0:
        futures = [rpc.rpc_async("w1", large) for _ in range(4)]
        report(quick=max(outcome(rpc.rpc_sync, "w1", int)["seconds"] for _ in range(50)))
        report(sizes=[len(future.wait()) for future in futures])
    rpc.shutdown()
    """
    facts = workers(script).finish()[0]
    assert facts["sizes"] == [64 << 20] * 4


def test_thousands_of_calls_nobody_waits_for(workers: StartWorkers) -> None:
    script = """
    count = 0
    def increment():
        global count
        count += 1
    start(num_worker_threads=1)
    if RANK == 0:
        for _ in range(5000):
            rpc.rpc_async("w1", increment)
    rpc.shutdown()
    report(count=count)
    """
    assert workers(script).finish()[1]["count"] == 5000


def test_many_calls_to_a_worker_that_does_not_read_for_a_while_are_sent_quickly(workers: StartWorkers) -> None:
    script = """
    import ctypes
    def hold_the_interpreter(seconds):
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    start()
    if RANK == 0:
        rpc.rpc_sync("w1", int)
        rpc.rpc_async("w1", hold_the_interpreter, args=(4,))
        time.sleep(0.1)
        began = time.monotonic()
        futures = [rpc.rpc_async("w1", int, args=(n,)) for n in range(20000)]
        report(seconds=time.monotonic() - began)
        report(right=[future.wait() for future in futures] == list(range(20000)))
    rpc.shutdown()
    """
    facts = workers(script).finish()[0]
    assert facts["right"]
    assert facts["seconds"] < 3


def test_a_failure_nobody_looked_at_is_on_stderr_once(workers: StartWorkers) -> None:
    script = """
    def broken(): raise ValueError("this is why")
    start()
    if RANK == 0:
        rpc.rpc_async("w1", broken)
        rpc.rpc_async("w1", broken).exception()
    rpc.shutdown()
    """
    group = workers(script)
    group.finish(quiet=False)
    assert group.errors(0).count("nobody looked at the failure of `broken` on worker 'w1'") == 1
    assert "ValueError: this is why" in group.errors(0)
    assert group.errors(1) == ""


def test_unpicklable_arguments_and_results(workers: StartWorkers) -> None:
    script = """
    def returns_lock(): return threading.Lock()
    start()
    if RANK == 0:
        report(argument=outcome(rpc.rpc_async, "w1", int, args=("7",), kwargs={"base": threading.Lock()}),
               result=outcome(rpc.rpc_sync, "w1", returns_lock))
    rpc.shutdown()
    """
    facts = workers(script).finish()[0]
    assert facts["argument"]["error"] == facts["result"]["error"] == "SerializationError"
    assert "argument 'base' of w1's `int`" in facts["argument"]["text"]
    assert "w1's `returns_lock`" in facts["result"]["text"]
    assert "_thread.lock" in facts["result"]["text"]
