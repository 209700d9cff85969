"""Worker processes of a fixed group that do what the test tells them: one line of Python at a time, one answer a line.

Run as a program it is such a worker: its arguments are rank, size, URL, heartbeat interval, patience and transports.
Imported it starts them: `WorkerProcesses`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any


class WorkerProcesses:
    """A group of processes `w0`, `w1` ... Leave the context to end all of them, whatever state they are in."""

    def __init__(
        self,
        size: int,
        url: str,
        interval: float,
        patience: float,
        *,
        transports: Sequence[str] = (),
        prefixes: Sequence[Sequence[str]] = (),
    ) -> None:
        """`prefixes`: what the command of each worker begins with."""
        self.processes: list[subprocess.Popen[str]] = []
        for rank in range(size):
            command = [*(prefixes[rank] if prefixes else ()), sys.executable, __file__]
            words = [rank, size, url, interval, patience, ",".join(transports)]
            self.processes.append(
                subprocess.Popen(
                    [*command, *map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
                )
            )
        self.pids: list[int] = []

    def __enter__(self) -> WorkerProcesses:
        try:
            self.pids = [self._answer(rank) for rank in range(len(self.processes))]
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def ask(self, rank: int, expression: str) -> Any:
        """What the worker evaluates it to. Fails the test if it raises."""
        pipe = self.processes[rank].stdin
        assert pipe is not None
        pipe.write(expression + "\n")
        return self._answer(rank)

    def _answer(self, rank: int) -> Any:
        pipe = self.processes[rank].stdout
        assert pipe is not None
        line = pipe.readline()
        assert line, f"worker w{rank} has ended with status {self.processes[rank].wait()}"
        answer = json.loads(line)
        assert "error" not in answer, f"worker w{rank}: {answer['error']}"
        return answer["value"]

    def stop(self, ranks: Sequence[int]) -> float:
        """Stops these processes; the time just before."""
        began = time.monotonic()
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGSTOP)
        return began

    def resume(self, ranks: Sequence[int]) -> float:
        """Lets them go on; the time just after."""
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGCONT)
        return time.monotonic()

    def end(self) -> None:
        for process in self.processes:
            process.kill()  # a stopped one too; a prefix such as `ip netns exec` replaces itself by the worker
        for process in self.processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    try:
                        pipe.close()
                    except BrokenPipeError:
                        pass


def work() -> None:
    import farcall as rpc

    rank, size, url, interval, patience, transports = sys.argv[1:]
    lost: dict[str, float] = {}
    ended: dict[str, tuple[float, str]] = {}

    def start_endless_calls() -> None:
        for other in range(int(size)):
            if other != int(rank):
                name = f"w{other}"
                future = rpc.rpc_async(name, time.sleep, args=(1000,), timeout=0)
                future.add_done_callback(lambda done, name=name: note_end(name, done))

    def note_end(name: str, done: Any) -> None:
        ended[name] = (time.monotonic(), type(done.exception()).__name__)

    def call_all() -> list[str]:
        """The names of those that answer; what stands for those that do not."""
        answers = []
        for other in range(int(size)):
            try:
                answers.append(rpc.rpc_sync(f"w{other}", rpc.get_worker_info, timeout=20).name)
            except rpc.RpcError as error:
                answers.append(type(error).__name__)
        return answers

    def names() -> list[str]:
        return sorted(info.name for info in rpc.get_worker_infos())

    known = {"start_endless_calls": start_endless_calls, "call_all": call_all, "names": names, "rpc": rpc}
    options = rpc.RpcBackendOptions(
        init_method=url,
        init_timeout=60,
        heartbeat_interval=float(interval),
        heartbeat_patience=float(patience),
        **({"transports": tuple(transports.split(","))} if transports else {}),  # type: ignore[arg-type]
    )
    rpc.init_rpc(f"w{rank}", rank=int(rank), world_size=int(size), rpc_backend_options=options)
    rpc.add_membership_callback(
        lambda change: lost.setdefault(change.worker.name, time.monotonic()) if change.kind == "lost" else None
    )
    print(json.dumps({"value": os.getpid()}), flush=True)
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = {"value": eval(line, known | {"lost": lost, "ended": ended})}
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    rpc.shutdown(graceful=False)


if __name__ == "__main__":
    work()
