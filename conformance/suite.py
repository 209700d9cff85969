"""PyTorch's tests of its RPC framework: what there is in the installed torch, and one of them run.

Torch has its tests as classes that know no agent; in its repository, files of a few lines make test cases of them for
an agent, by `rpc_utils.generate_tests`. That is done here, for the agents TENSORPIPE and FAULTY_TENSORPIPE, and the
generated classes are attributes of this module, where whoever unpickles one looks for it.

- A test's ranks are forked from the process that runs the test, not started anew as torch would: they have the
  implementation and torch without importing either.
- The classes of an agent are made when a test of it is run, in the process of that test: the module of the faulty one
  registers a backend as it is imported, and tests of the other rightly fail after that.
"""

from __future__ import annotations

import importlib
import sys
import threading
import unittest
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from conformance import native
from conformance.nursery import Loaded
from conformance.outcomes import Outcome, of_result
from conformance.stand_ins import tolerated

ITSELF: Final = "none"
"""The implementation that is torch's own."""

_TESTS: Final = "torch.testing._internal.distributed"
_GROUPS: Final = {
    "TensorPipe": ("GENERIC_TESTS", "TENSORPIPE_TESTS", "GENERIC_CUDA_TESTS", "TENSORPIPE_CUDA_TESTS"),
    "Faulty": ("FAULTY_AGENT_TESTS",),
}
_FIXTURES: Final = {
    "TensorPipe": ("tensorpipe_rpc_agent_test_fixture", "TensorPipeRpcAgentTestFixture"),
    "Faulty": ("faulty_rpc_agent_test_fixture", "FaultyRpcAgentTestFixture"),
}

_implementation = ITSELF


def load(implementation: str) -> Loaded:
    """Import torch, call the implementation, `module:function`, and import torch's tests.

    Raises ValueError for a name of another form, and whatever stands in the way otherwise.
    """
    global _implementation
    _implementation = implementation
    _provide_expecttest()
    import torch

    if implementation != ITSELF:
        native.watch(torch._C._distributed_rpc.TensorPipeAgent)
        _install(implementation)
    with tolerated(f"{_TESTS}.") as reasons:
        rpc_utils = _rpc_utils()
    names = unittest.TestLoader().getTestCaseNames
    tests, broken = [], {}
    for prefix in _GROUPS:
        for class_ in _classes(rpc_utils, prefix):
            tests += [f"{prefix}{class_.__name__}.{name}" for name in names(class_)]
            if class_.__module__ in reasons:
                broken[f"{prefix}{class_.__name__}"] = reasons[class_.__module__]
    return Loaded(f"torch {torch.__version__}", tests, broken, _warnings())


def run(test: str, note: Path) -> Outcome:
    """Run one test in this process, which must not run another."""
    native.note = note
    class_name, _, method = test.partition(".")
    prefix = next(prefix for prefix in _GROUPS if class_name.startswith(prefix))
    _generate(prefix)
    result = unittest.TestResult()
    getattr(sys.modules[__name__], class_name)(method).run(result)
    return of_result(result)


def _provide_expecttest() -> None:
    """Torch's test cases derive from a package that torch does not require, and that none of these tests uses."""
    try:
        importlib.import_module("expecttest")
    except ImportError:
        stand_in: Any = ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in


def _install(implementation: str) -> None:
    module, colon, function = implementation.partition(":")
    if not (module and colon and function):
        raise ValueError(f"an implementation is given as module:function, or {ITSELF!r}, not as {implementation!r}")
    getattr(importlib.import_module(module), function)()


def _rpc_utils() -> Any:
    return importlib.import_module(f"{_TESTS}.rpc_utils")


def _classes(rpc_utils: Any, prefix: str) -> list[type]:
    return [class_ for group in _GROUPS[prefix] for class_ in getattr(rpc_utils, group)]


def _generate(prefix: str) -> None:
    module, name = _FIXTURES[prefix]
    fixture = getattr(importlib.import_module(f"{_TESTS}.rpc.{module}"), name)
    rpc_utils = _rpc_utils()
    if _implementation != ITSELF and prefix == "Faulty":
        import torch

        testing = getattr(torch._C, "_distributed_rpc_testing", None)
        native.watch(getattr(testing, "FaultyTensorPipeAgent", None))
    generated = rpc_utils.generate_tests(prefix, fixture, _classes(rpc_utils, prefix), __name__)
    for class_name, class_ in generated.items():
        class_._spawn_processes = _fork_ranks
        setattr(sys.modules[__name__], class_name, class_)


def _fork_ranks(case: Any) -> None:
    """In place of the method that starts the ranks as new interpreters."""
    import torch.multiprocessing

    case._start_processes(torch.multiprocessing.get_context("fork").Process)


def _warnings() -> list[str]:
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if not threads:
        return []
    return [f"threads run after loading ({', '.join(threads)}): the tests, which are forked, do not have them"]
