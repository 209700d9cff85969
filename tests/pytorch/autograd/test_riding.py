"""Calls in a context, over an agent: this process is a group of one, and calls itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import farcall.pytorch as rpc
from farcall.pytorch import autograd
from farcall.pytorch.autograd import post


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """This process is a worker. At the end no context is left."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/store")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    yield
    assert autograd._get_debug_info() == {"num_current_backward_passes": "0", "num_autograd_contexts": "0"}
    assert post.contexts().current_id is None
    rpc.shutdown()


class Model:
    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))

    def apply(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.weight

    def gradient(self, context_id: int) -> torch.Tensor:
        return autograd.get_gradients(context_id)[self.weight]


def doubled(value: torch.Tensor) -> torch.Tensor:
    return value * 2


def doubled_twice(value: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("alone", doubled, (rpc.rpc_sync("alone", doubled, (value,)),))


def doubled_without(value: torch.Tensor) -> Any:
    return value.requires_grad, value.is_leaf


def current() -> int:
    return autograd._current_context()._context_id()


def later(value: torch.Tensor) -> Any:
    return rpc.rpc_async("alone", doubled, (value,)).then(lambda done: done.wait() * 5)


later = rpc.functions.async_execution(later)


def raising(value: torch.Tensor) -> None:
    raise ValueError("the function refuses")


late: list[threading.Event] = []
"""When `doubled_late` may go on."""


def doubled_late(value: torch.Tensor) -> torch.Tensor:
    late.pop().wait(20)
    return value * 2


def in_time(work: Callable[[], Any]) -> Any:
    """What it returns, in a thread that does not keep a test that fails from ending."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(15)
    assert results, "it does not end"
    return results[0]


def gradient_of(x: torch.Tensor, context_id: int, result: torch.Tensor) -> list[float]:
    autograd.backward(context_id, [result.sum()])
    found: list[float] = autograd.get_gradients(context_id)[x].tolist()
    return found


def leaf() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


@pytest.mark.usefixtures("alone")
class TestCalls:
    def test_rpc_sync(self) -> None:
        x = leaf()
        with autograd.context() as context_id:
            assert gradient_of(x, context_id, rpc.rpc_sync("alone", doubled, (x,))) == [2, 2]
        assert x.grad is None

    def test_rpc_async(self) -> None:
        x = leaf()
        with autograd.context() as context_id:
            assert gradient_of(x, context_id, rpc.rpc_async("alone", torch.mul, (x, 3)).wait()) == [3, 3]

    def test_remote_and_to_here(self) -> None:
        x = leaf()
        with autograd.context() as context_id:
            assert gradient_of(x, context_id, rpc.remote("alone", doubled, (x,)).to_here()) == [2, 2]

    def test_nested_calls(self) -> None:
        x = leaf()
        with autograd.context() as context_id:
            assert gradient_of(x, context_id, rpc.rpc_sync("alone", doubled_twice, (x,))) == [4, 4]

    def test_functions_that_return_futures(self) -> None:
        x = leaf()
        with autograd.context() as context_id:
            assert gradient_of(x, context_id, rpc.rpc_sync("alone", later, (x,))) == [10, 10]

    def test_proxies_of_references(self) -> None:
        x = leaf()
        model = rpc.remote("alone", Model)
        with autograd.context() as context_id:
            result = model.rpc_sync().apply(x) + model.rpc_async().apply(x).wait()
            result = result + model.remote().apply(x).to_here()
            assert gradient_of(x, context_id, result) == [6, 9]
            assert model.rpc_sync().gradient(context_id).tolist() == [3, 3]

    def test_a_parameter_as_an_argument_is_not_cut_off(self) -> None:
        weight = torch.nn.Parameter(torch.ones(2))
        with autograd.context() as context_id:
            assert gradient_of(weight, context_id, rpc.rpc_sync("alone", doubled, (weight,))) == [2, 2]

    def test_tensors_in_other_things(self) -> None:
        x = leaf()
        with autograd.context() as context_id:
            assert gradient_of(x, context_id, rpc.rpc_sync("alone", torch.stack, ([x, x],))) == [2, 2]

    def test_the_function_works_in_the_context(self) -> None:
        with autograd.context() as context_id:
            assert rpc.rpc_sync("alone", current) == context_id
        with pytest.raises(RuntimeError, match="doesn't have a valid autograd context"):
            rpc.rpc_sync("alone", current)

    def test_outside_of_a_context_tensors_arrive_as_leaves(self) -> None:
        assert rpc.rpc_sync("alone", doubled_without, (leaf(),)) == (True, True)

    def test_without_gradients_nothing_is_recorded(self) -> None:
        with autograd.context(), torch.no_grad():
            assert not rpc.rpc_sync("alone", doubled, (leaf(),)).grad_fn
            assert (
                autograd._current_context()
                ._send_functions()
                .keys()
                .isdisjoint(autograd._current_context()._recv_functions())
            )

    def test_the_reply_to_a_call_without_gradients_is_not_awaited(self) -> None:
        x, model = leaf(), rpc.remote("alone", Model)
        with autograd.context() as context_id:
            with torch.no_grad():
                assert model.rpc_sync().apply(x).tolist() == [2, 3]
            assert autograd._current_context()._send_functions() == {}
            assert gradient_of(x, context_id, model.rpc_sync().apply(x)) == [2, 3]

    def test_a_call_that_failed_is_not_awaited(self) -> None:
        x = leaf()
        with autograd.context() as context_id:
            with pytest.raises(ValueError, match="the function refuses"):
                rpc.rpc_sync("alone", raising, (x,))
            assert autograd._current_context()._send_functions() == {}
            assert gradient_of(x, context_id, rpc.rpc_sync("alone", doubled, (x,))) == [2, 2]

    def test_a_remote_call_that_failed_is_not_awaited(self) -> None:
        x = leaf()
        with autograd.context() as context_id:
            failed = rpc.remote("alone", raising, (x,))
            with pytest.raises(ValueError, match="the function refuses"):
                failed.to_here()
            result = rpc.rpc_sync("alone", doubled, (x,))
            assert in_time(lambda: gradient_of(x, context_id, result)) == [2, 2]

    def test_a_call_whose_time_ran_out_is_not_awaited(self) -> None:
        x, go_on = leaf(), threading.Event()
        late.append(go_on)
        with autograd.context() as context_id:
            try:
                with pytest.raises(TimeoutError):
                    rpc.rpc_sync("alone", doubled_late, (x,), timeout=0.05)
            finally:
                go_on.set()
            result = rpc.rpc_sync("alone", doubled, (x,))
            assert in_time(lambda: gradient_of(x, context_id, result)) == [2, 2]

    def test_an_error_of_the_function_leaves_nothing(self) -> None:
        with autograd.context(), pytest.raises(ValueError, match="the function refuses"):
            rpc.rpc_sync("alone", raising, (leaf(),))

    def test_a_call_in_a_context_that_was_released_is_refused(self) -> None:
        autograd._release_context(autograd._new_context()._context_id())
        contexts = post.contexts()
        contexts.current_id = 77
        try:
            with pytest.raises(RuntimeError, match="Couldn't find autograd context data"):
                rpc.rpc_sync("alone", doubled, (leaf(),))
        finally:
            contexts.current_id = None


@pytest.mark.usefixtures("alone")
class TestApi:
    def test_roots_are_checked(self) -> None:
        with autograd.context() as context_id:
            for bad in [(context_id, None), (None, None), (context_id, [1])]:
                with pytest.raises(TypeError, match="incompatible function arguments"):
                    autograd.backward(*bad)  # type: ignore[arg-type]
            for roots, words in [
                ([], "No tensors provided for gradient computation"),
                ([torch.ones(1)], "requires_grad not set on root"),
                ([leaf()], r"^a root is not a scalar, all roots need to be scalar: its shape is 2; give its .sum\(\)"),
                ([torch.ones(1, requires_grad=True)], "does not have a valid gradient function"),
            ]:
                with pytest.raises(RuntimeError, match=words):
                    autograd.backward(context_id, roots)

    def test_a_context_in_a_context_is_refused(self) -> None:
        with autograd.context(), pytest.raises(RuntimeError, match="Already have"), autograd.context():
            pass

    def test_a_context_that_is_dropped_is_reported(self) -> None:
        manager = autograd.context()
        context_id = manager.__enter__()
        with pytest.warns(ResourceWarning, match=f"context {context_id}, made at {__file__}:"):
            del manager
        autograd._release_context(context_id)

    def test_what_is_not_there(self) -> None:
        for ask in (autograd._retrieve_context, autograd._is_valid_context, autograd.get_gradients):
            with pytest.raises(RuntimeError, match="Could not find autograd context with id: 5"):
                ask(5)
        assert autograd._get_max_id() == 281474976710655

    @pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
    def test_compiled_code_runs_it(self) -> None:
        @torch.jit.script
        def gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
            return autograd.get_gradients(context_id)

        @torch.jit.script
        def run(context_id: int, loss: torch.Tensor) -> None:
            autograd.backward(context_id, [loss])

        x = leaf()
        with autograd.context() as context_id:
            run(context_id, rpc.rpc_sync("alone", doubled, (x,)).sum())
            assert gradients(context_id)[x].tolist() == [2, 2]


@pytest.mark.usefixtures("alone")
class TestReferences:
    def test_backward_at_the_owner(self) -> None:
        x = leaf()
        with autograd.context() as context_id:
            rpc.RRef(rpc.rpc_sync("alone", doubled, (x,)).sum()).backward(context_id)
            assert autograd.get_gradients(context_id)[x].tolist() == [2, 2]

    def test_without_a_context_it_is_torchs_own(self) -> None:
        x = leaf()
        root = rpc.RRef((x * 4).sum())
        root.backward(retain_graph=True)
        root.backward()
        assert x.grad is not None
        assert x.grad.tolist() == [8, 8]

    def test_what_cannot_be_a_root(self) -> None:
        with pytest.raises(RuntimeError, match=r"RRef should contain a tensor for \.backward\(\)"):
            rpc.RRef("text").backward()
        with pytest.raises(RuntimeError, match="Could not find autograd context with id: 100"):
            rpc.RRef(leaf().sum()).backward(100)
